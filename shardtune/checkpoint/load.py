"""Restore a checkpoint's state on any number of ranks, whichever disks its files are on."""

import datetime
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
import xxhash
from transformers import PreTrainedModel, set_seed

from shardtune.checkpoint.manifest import Checkpoint, DamagedCheckpoint, StoredChunk
from shardtune.checkpoint.run_dir import RunDir
from shardtune.checkpoint.safetensors_writer import tensor_bytes
from shardtune.checkpoint.slices import slices_to_read
from shardtune.checkpoint.train_state import RANDOM, restore_random_state, training_state
from shardtune.distributed.world import World
from shardtune.log import logger

_PIECE_BYTES = 16 << 20  # read at once, in whole rows
# The timeout is long: a slow link is no error, and a dead rank closes its connection anyway.
_TRANSFER_TIMEOUT = datetime.timedelta(days=2)


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
    random_states = {
        name: torch.empty(checkpoint.shape(name), dtype=checkpoint.dtype(name))
        for name in checkpoint.chunks
        if name.startswith(RANDOM) and name.endswith(f".{world.rank:05d}")
        if checkpoint.world_size == world.size
    }
    tensors = training_state(model, optimizer) | random_states
    remote = []
    for chunk, box, target in world.run_on_all_ranks(lambda: slices_to_read(tensors, checkpoint)):
        if run_dir.leader_of[world.rank] in checkpoint.holders[chunk.file]:
            read_chunk(checkpoint, chunk, box, target)
        else:
            remote.append((chunk, box, target))
    edges = [
        [c.tensor, checkpoint.chunks[c.tensor].index(c), [[s.start, s.stop] for s in box]]
        for c, box, _ in remote
    ]
    wanted = [
        (receiver, checkpoint.chunks[name][number], [slice(*edge) for edge in box])
        for receiver, boxes in enumerate(world.all_gather_json(edges))
        for name, number, box in boxes
    ]
    if wanted:
        logger.info(f"Read from the disks of other nodes: {len(wanted)} parts of tensors")
        received = transfer(checkpoint, wanted, run_dir, world)
        for (_, _, target), part in zip(remote, received, strict=True):
            target.copy_(part)
    if random_states:
        restore_random_state(random_states, world.device)
    else:
        logger.info(
            f"Random states (dropout) are seeded anew: {checkpoint.name} has those of "
            f"{checkpoint.world_size} ranks"
        )
        set_seed((seed + world.rank + 2654435761 * checkpoint.step) % 2**32)


def transfer(
    checkpoint: Checkpoint,
    wanted: Iterable[tuple[int, StoredChunk, Sequence[slice]]],
    run_dir: RunDir,
    world: World,
) -> Iterator[torch.Tensor]:
    """Yield the boxes of chunks that this rank wants, from its own disk or sent by another rank.

    `wanted` has the receiver of each box. Collective: all ranks exhaust it with the same list, and
    so each send meets its receive. Raises OSError, DamagedCheckpoint.
    """
    group = dist.new_group(backend="gloo", timeout=_TRANSFER_TIMEOUT)
    for receiver, chunk, box in wanted:
        holders = checkpoint.holders[chunk.file]
        if run_dir.leader_of[receiver] in holders:
            if world.rank == receiver:
                yield read_chunk(checkpoint, chunk, box)
            continue
        senders = [rank for rank, leader in enumerate(run_dir.leader_of) if leader in holders]
        sender = senders[receiver % len(senders)]
        if world.rank == sender:
            part = read_chunk(checkpoint, chunk, box).contiguous()
            dist.send(part.reshape(-1).view(torch.uint8), receiver, group)
        elif world.rank == receiver:
            shape = [edge.stop - edge.start for edge in box]
            part = torch.empty(shape, dtype=checkpoint.dtype(chunk.tensor))
            dist.recv(part.view(-1).view(torch.uint8), sender, group)
            yield part
    # A rank with nothing to send or receive would end while others still connect to it.
    dist.barrier(group)
    dist.destroy_process_group(group)


def read_tensor(
    checkpoint: Checkpoint, name: str, chunks: Iterator[torch.Tensor] | None = None
) -> torch.Tensor:
    """Assemble a whole tensor from these chunks, or from those in the checkpoint's directories."""
    shape = checkpoint.shape(name)
    whole = torch.empty(shape, dtype=checkpoint.dtype(name))  # takes memory where it is written
    for chunk in checkpoint.chunks[name]:
        part = next(chunks) if chunks else read_chunk(checkpoint, chunk)
        if part.shape == shape:
            return part
        whole[chunk.place] = part
    return whole


def read_chunk(
    checkpoint: Checkpoint,
    chunk: StoredChunk,
    box: Sequence[slice] | None = None,
    target: torch.Tensor | None = None,
) -> torch.Tensor:
    """Read a chunk, or a box within it, from the first directory that has its file.

    Copies it to `target` piece by piece, or to a new tensor, and returns that. All of the chunk is
    read and compared with its digest: a file may be damaged after its check.

    Raises:
        OSError: it cannot be read; FileNotFoundError: no directory has it.
        DamagedCheckpoint: it does not match its digest; `target` may have been written by then.
    """
    path = checkpoint.find(chunk.file)
    if path is None:
        places = ", ".join(map(str, checkpoint.directories))
        raise FileNotFoundError(f"{chunk.file} is in none of {places}")
    box = chunk.whole if box is None else box
    if target is None:
        shape = [edge.stop - edge.start for edge in box]
        target = torch.empty(shape, dtype=checkpoint.dtype(chunk.tensor))
    # A scalar is read as one row.
    wanted, *columns = box or [slice(0, 1)]
    n_rows, *row_shape = chunk.sizes or [1]
    rows = target if chunk.sizes else target.view(1)
    row_bytes = (chunk.end - chunk.begin) // n_rows
    rows_at_once = max(1, _PIECE_BYTES // row_bytes)
    content = torch.empty(min(n_rows, rows_at_once) * row_bytes, dtype=torch.uint8)
    digest = xxhash.xxh3_128()
    # Not memory-mapped: an error of the disk would then kill the process.
    with path.open("rb", buffering=0) as file:
        file.seek(chunk.begin)
        for first in range(0, n_rows, rows_at_once):
            last = min(n_rows, first + rows_at_once)
            piece = content[: (last - first) * row_bytes]
            left = tensor_bytes(piece)
            while left and (count := file.readinto(left)):
                left = left[count:]
            digest.update(tensor_bytes(piece[: len(piece) - len(left)]))
            begin, end = max(first, wanted.start), min(last, wanted.stop)
            if begin < end:
                read = piece.view(target.dtype).view(last - first, *row_shape)
                rows[begin - wanted.start : end - wanted.start].copy_(
                    read[(slice(begin - first, end - first), *columns)]
                )
    if digest.hexdigest() != chunk.xxh3_128:
        raise DamagedCheckpoint(f"{path}: tensor {chunk.tensor} is damaged")
    return target
