"""Restore a checkpoint's state on any number of ranks, whichever disks its files are on."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
import xxhash
from transformers import PreTrainedModel, set_seed

from shardtune.checkpoint.manifest import Checkpoint, DamagedCheckpoint, StoredChunk
from shardtune.checkpoint.plan import plan_load
from shardtune.checkpoint.run_dir import RunDir
from shardtune.checkpoint.safetensors_writer import tensor_bytes
from shardtune.checkpoint.train_state import RANDOM, restore_random_state, training_state
from shardtune.distributed.world import World
from shardtune.log import logger

# A slow link is not an error, and a dead rank closes its connection.
TRANSFER_TIMEOUT = datetime.timedelta(days=2)


@dataclass(frozen=True)
class _ReadRequest:
    """A box of a chunk, and the tensor of that shape to copy it into."""

    chunk: StoredChunk
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
    """Restore weights, moments and random states from an accepted checkpoint. Collective.

    Chunks that are only on the disks of other nodes are sent by a rank that can read them.

    Raises:
        UserError: on every rank, if tensors are missing or have another shape.
        OSError, DamagedCheckpoint: on the rank that reads a file that was damaged since the check.
    """
    tensors = training_state(model, optimizer)
    random_targets = _random_targets(checkpoint, world)

    def read_local() -> list[_ReadRequest]:
        """Read the chunks on this rank's disk; return the others."""
        planner, items = plan_load(tensors, checkpoint)
        requests = []
        for name, target in random_targets.items():
            chunk = checkpoint.chunks[name][0]
            requests.append(_ReadRequest(chunk, chunk.whole, target))
        for item in items:
            chunk = checkpoint.chunks[item.storage_index.fqn][item.storage_index.index or 0]
            edges = zip(item.storage_offsets, item.lengths, strict=True)
            box = [slice(start, start + length) for start, length in edges]
            requests.append(_ReadRequest(chunk, box, planner.resolve_tensor(item).detach()))
        remote = []
        for request in requests:
            if run_dir.leader_of[world.rank] in checkpoint.holders[request.chunk.file]:
                request.target.copy_(read_chunk(checkpoint, request.chunk, request.box))
            else:
                remote.append(request)
        return remote

    _receive(checkpoint, world.run_on_all_ranks(read_local), run_dir, world)
    if random_targets:
        restore_random_state(random_targets, world.device)
    else:
        logger.info(
            f"Random states (dropout) are seeded anew: {checkpoint.name} has those of "
            f"{checkpoint.world_size} ranks"
        )
        set_seed((seed + world.rank + 2654435761 * checkpoint.step) % 2**32)


def _random_targets(checkpoint: Checkpoint, world: World) -> dict[str, torch.Tensor]:
    """Allocate this rank's random states; none if the number of ranks has changed."""
    if checkpoint.world_size != world.size:
        return {}
    return {
        name: torch.empty(checkpoint.shape(name), dtype=checkpoint.dtype(name))
        for name in checkpoint.chunks
        if name.startswith(RANDOM) and name.endswith(f".{world.rank:05d}")
    }


def _receive(
    checkpoint: Checkpoint, remote: list[_ReadRequest], run_dir: RunDir, world: World
) -> None:
    """Transfer all requests of all ranks in one order, so that each send meets its receive."""
    local_requests = [
        [r.chunk.tensor, r.chunk.file, [[s.start, s.stop] for s in r.box], r.target.nbytes]
        for r in remote
    ]
    requests = world.all_gather_json(local_requests)
    if not any(requests):
        return
    total = sum(nbytes for *_, nbytes in chain(*requests))
    logger.info(f"Read from the disks of other nodes: {total / 1e9:.2f} GB")
    group = dist.new_group(backend="gloo", timeout=TRANSFER_TIMEOUT)
    for receiver, receiver_requests in enumerate(requests):
        for number, (name, file, edges, _) in enumerate(receiver_requests):
            chunk = next(chunk for chunk in checkpoint.chunks[name] if chunk.file == file)
            box = [slice(*edge) for edge in edges]
            part = transfer(checkpoint, chunk, box, receiver, run_dir, world, group)
            if part is not None:
                remote[number].target.copy_(part)
    dist.destroy_process_group(group)


def transfer(
    checkpoint: Checkpoint,
    chunk: StoredChunk,
    box: Sequence[slice],
    receiver: int,
    run_dir: RunDir,
    world: World,
    group: dist.ProcessGroup,
) -> torch.Tensor | None:
    """Give the receiver a box of a chunk, from its own disk or sent by a rank that can read it.

    Returns None on every other rank. All ranks call this for the same boxes in the same order.

    Raises:
        OSError, DamagedCheckpoint: on the rank that reads. A receiver that waits gets zeros.
    """
    holders = checkpoint.holders[chunk.file]
    if run_dir.leader_of[receiver] in holders:
        return read_chunk(checkpoint, chunk, box) if world.rank == receiver else None
    senders = [rank for rank, leader in enumerate(run_dir.leader_of) if leader in holders]
    sender = senders[receiver % len(senders)]
    shape = [edge.stop - edge.start for edge in box]
    dtype = checkpoint.dtype(chunk.tensor)
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


def read_tensor(
    checkpoint: Checkpoint, name: str, read: Callable[[Checkpoint, StoredChunk], torch.Tensor]
) -> torch.Tensor:
    """Assemble a whole tensor from the chunks that `read` returns.

    Raises:
        DamagedCheckpoint: a chunk does not match its digest.
    """
    shape = checkpoint.shape(name)
    whole = None
    for chunk in checkpoint.chunks[name]:
        part = read(checkpoint, chunk)
        if xxhash.xxh3_128(tensor_bytes(part)).hexdigest() != chunk.xxh3_128:
            raise DamagedCheckpoint(f"{checkpoint.name}/{chunk.file}: tensor {name} is damaged")
        if torch.Size(chunk.sizes) == shape:
            return part
        if whole is None:
            whole = torch.empty(shape, dtype=part.dtype)
        whole[chunk.place] = part
    return torch.empty(shape, dtype=checkpoint.dtype(name)) if whole is None else whole


def read_chunk(
    checkpoint: Checkpoint, chunk: StoredChunk, box: Sequence[slice] | None = None
) -> torch.Tensor:
    """Read a chunk, or a box within it, from the first directory that has its file.

    All of the chunk is read and compared with its digest: a file may be damaged after its check.

    Raises:
        OSError: it cannot be read; FileNotFoundError: no directory has it.
        DamagedCheckpoint: it does not match its digest.
    """
    path = checkpoint.find(chunk.file)
    if path is None:
        places = ", ".join(map(str, checkpoint.directories))
        raise FileNotFoundError(f"{chunk.file} is in none of {places}")
    content = torch.empty(chunk.end - chunk.begin, dtype=torch.uint8)
    left = whole = tensor_bytes(content)
    # Not memory-mapped: an error of the disk would then kill the process.
    with path.open("rb", buffering=0) as file:
        file.seek(chunk.begin)
        while left and (count := file.readinto(left)):
            left = left[count:]
    if left or xxhash.xxh3_128(whole).hexdigest() != chunk.xxh3_128:
        raise DamagedCheckpoint(f"{path}: tensor {chunk.tensor} is damaged")
    tensor = content.view(checkpoint.dtype(chunk.tensor)).reshape(list(chunk.sizes))
    return tensor if box is None else tensor[tuple(box)]
