"""Putting a checkpoint's state back, on any number of ranks and wherever its files lie."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

import torch
import torch.distributed as dist
from transformers import PreTrainedModel, set_seed

from shardtune.checkpoint.manifest import Checkpoint, Chunk, read_chunk
from shardtune.checkpoint.plan import plan_load
from shardtune.checkpoint.run_dir import RunDir
from shardtune.checkpoint.safetensors_writer import DTYPES
from shardtune.checkpoint.train_state import RANDOM, restore_random_state, training_state
from shardtune.distributed.world import World
from shardtune.log import logger

TRANSFER_TIMEOUT = datetime.timedelta(
    days=2
)  # a slow link is not an error; a dead rank closes its connection


@dataclass(frozen=True)
class _Wanted:
    """A box of a chunk, and the tensor of that shape that it belongs into."""

    chunk: Chunk
    box: list[slice]
    target: torch.Tensor


def load_checkpoint(
    checkpoint: Checkpoint,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    seed: int,
    run_dir: RunDir,
    world: World,
) -> None:
    """Put weights, moments and random states back, from an accepted checkpoint. Every rank takes part.

    What lies on the disks of other nodes only is sent by a rank that has it.

    Raises:
        UserError: on every rank, if tensors are missing or of another shape.
        OSError, DamagedCheckpoint: on the rank that reads it, if what was intact when it was checked is not so now.
    """
    tensors = training_state(model, optimizer)
    random = _random_targets(checkpoint, world)

    def read_own() -> list[_Wanted]:
        planner, items = plan_load(tensors, checkpoint)
        own = [checkpoint.chunks[name][0] for name in random]
        wanted = [
            _Wanted(chunk, [slice(0, n) for n in chunk.sizes], random[chunk.tensor])
            for chunk in own
        ]
        for item in items:
            chunk = checkpoint.chunks[item.storage_index.fqn][item.storage_index.index or 0]
            box = [
                slice(start, start + n)
                for start, n in zip(item.storage_offsets, item.lengths, strict=True)
            ]
            wanted.append(_Wanted(chunk, box, planner.resolve_tensor(item).detach()))
        elsewhere = []
        for part in wanted:
            if run_dir.leader_of[world.rank] in checkpoint.holders[part.chunk.file]:
                part.target.copy_(read_chunk(checkpoint, part.chunk, part.box))
            else:
                elsewhere.append(part)
        return elsewhere

    _receive(checkpoint, world.run_on_all_ranks(read_own), run_dir, world)
    if random:
        restore_random_state(random, world.rank, world.device)
    else:
        logger.info(
            f"Random states (dropout) start anew: {checkpoint.name} has those of another world size"
        )
        set_seed((seed + world.rank + 2654435761 * checkpoint.step) % 2**32)


def _random_targets(checkpoint: Checkpoint, world: World) -> dict[str, torch.Tensor]:
    """Room for each random state of this rank; none on another number of ranks, where there is none to go on with."""
    stored = checkpoint.manifest["tensors"]
    return {
        name: torch.empty(stored[name]["shape"], dtype=DTYPES[stored[name]["dtype"]])
        for name in stored
        if name.startswith(RANDOM)
        and name.endswith(f".{world.rank:05d}")
        and checkpoint.world_size == world.size
    }


def _receive(checkpoint: Checkpoint, wanted: list[_Wanted], run_dir: RunDir, world: World) -> None:
    """All ranks go through all requests in one order, so that each send meets its receive."""
    requests = world.all_gather_json(
        [
            [part.chunk.tensor, part.chunk.file, [[s.start, s.stop] for s in part.box]]
            for part in wanted
        ]
    )
    if not any(requests):
        return
    amounts = world.all_gather_json(
        sum(part.target.numel() * part.target.element_size() for part in wanted)
    )
    logger.info(f"Read from the disks of other nodes: {sum(amounts) / 1e9:.2f} GB")
    group = dist.new_group(backend="gloo", timeout=TRANSFER_TIMEOUT)
    for receiver, of_rank in enumerate(requests):
        for number, (name, file, bounds) in enumerate(of_rank):
            chunk = next(chunk for chunk in checkpoint.chunks[name] if chunk.file == file)
            box = [slice(*edges) for edges in bounds]
            part = transfer(checkpoint, chunk, box, receiver, run_dir, world, group)
            if part is not None:
                wanted[number].target.copy_(part)
    dist.destroy_process_group(group)


def transfer(
    checkpoint: Checkpoint,
    chunk: Chunk,
    box: list[slice],
    receiver: int,
    run_dir: RunDir,
    world: World,
    group: dist.ProcessGroup,
) -> torch.Tensor | None:
    """A box of a chunk for one rank, from its own disk or sent by a rank that has it; None on every other rank.

    All ranks call this for the same boxes in the same order.

    Raises:
        OSError, DamagedCheckpoint: on the rank that has it, when the other, which waits, has got zeros instead.
    """
    holders = checkpoint.holders[chunk.file]
    if run_dir.leader_of[receiver] in holders:
        return read_chunk(checkpoint, chunk, box) if world.rank == receiver else None
    senders = [rank for rank, leader in enumerate(run_dir.leader_of) if leader in holders]
    sender = senders[receiver % len(senders)]
    shape = [edges.stop - edges.start for edges in box]
    dtype = DTYPES[checkpoint.manifest["tensors"][chunk.tensor]["dtype"]]
    if world.rank == sender:
        part = torch.zeros(shape, dtype=dtype)
        try:
            part = read_chunk(checkpoint, chunk, box)
        finally:
            dist.send(part.contiguous().reshape(-1).view(torch.uint8), receiver, group)
    elif world.rank == receiver:
        received = torch.empty(torch.Size(shape).numel() * dtype.itemsize, dtype=torch.uint8)
        dist.recv(received, sender, group)
        return received.view(dtype).reshape(shape)
    return None
