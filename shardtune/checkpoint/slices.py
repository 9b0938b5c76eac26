"""Divide tensors among ranks: which slices each rank writes, and which it reads."""

import math
from collections.abc import Mapping, Sequence

import torch

from shardtune.checkpoint.manifest import Checkpoint, StoredChunk
from shardtune.distributed.tensors import DTYPES, dtype_name, first_indices, to_local
from shardtune.distributed.world import World
from shardtune.errors import UserError, first_few


def slices_to_write(
    tensors: Mapping[str, torch.Tensor], world: World
) -> tuple[dict[str, Sequence[int]], dict[str, tuple[str, list[int]]]]:
    """Decide which tensors this rank writes its part of. Collective.

    Where several ranks hold a part, the rank with the fewest bytes so far writes it. `tensors` are
    those of this rank's stage.

    Returns:
        The first index of each part that this rank writes, and the tensors of all ranks.
    """
    # An empty part has the same first index as the next rank's part, and nobody writes it.
    local = [
        [
            name,
            first_indices(tensor) if to_local(tensor).numel() else None,
            dtype_name(tensor.dtype),
            list(tensor.shape),
        ]
        for name, tensor in tensors.items()
    ]
    holders: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    kinds: dict[str, tuple[str, list[int]]] = {}
    for rank, parts in enumerate(world.all_gather_json(local)):
        for name, offsets, *kind in parts:
            kinds[name] = (kind[0], kind[1])
            if offsets is not None:
                holders.setdefault((name, tuple(offsets)), []).append(rank)
    bytes_of = [0] * world.size
    own: dict[str, Sequence[int]] = {}
    for (name, offsets), ranks in holders.items():
        writer = min(ranks, key=bytes_of.__getitem__)
        dtype, shape = kinds[name]
        bytes_of[writer] += math.prod(shape) * DTYPES[dtype].itemsize or 1
        if writer == world.rank:
            own[name] = offsets
    return own, kinds


def slices_to_read(
    tensors: dict[str, torch.Tensor], checkpoint: Checkpoint
) -> list[tuple[StoredChunk, list[slice], torch.Tensor]]:
    """Return the boxes of chunks that this rank reads, and where in its tensors each belongs.

    Raises UserError.
    """
    entries = checkpoint.manifest["tensors"]
    stored = {name: (entry["dtype"], entry["shape"]) for name, entry in entries.items()}
    needed = {name: (dtype_name(t.dtype), list(t.shape)) for name, t in tensors.items()}
    if wrong := [name for name, kind in needed.items() if stored.get(name) != kind]:
        raise UserError(
            f"{checkpoint.name} does not fit this model and optimizer: it has no {needed[wrong[0]]}"
            f" for {first_few(wrong, 3)} - resume with the model and optimizer of the checkpoint"
        )
    requests = []
    for name, tensor in tensors.items():
        start, local = first_indices(tensor), to_local(tensor).detach()
        for chunk in checkpoint.chunks[name]:
            # The intersection of chunk and part, in coordinates of the whole tensor.
            edges = [
                (max(first, own_first), min(first + size, own_first + own_size))
                for first, size, own_first, own_size in zip(
                    chunk.offsets, chunk.sizes, start, local.shape, strict=True
                )
            ]
            if all(begin < end for begin, end in edges):
                target = local[tuple(_slices(edges, start))]
                requests.append((chunk, _slices(edges, chunk.offsets), target))
    return requests


def _slices(edges: Sequence[tuple[int, int]], start: Sequence[int]) -> list[slice]:
    """Return the slices of a tensor that begins at `start` of the whole one."""
    return [slice(b - first, e - first) for (b, e), first in zip(edges, start, strict=True)]
