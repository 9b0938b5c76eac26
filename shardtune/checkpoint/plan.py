"""Who writes and who reads which part: planned by torch.distributed.checkpoint, which knows every kind of sharding.

Its own `save` and `load` are not used: they send pickles in collectives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from shardtune.checkpoint.manifest import Checkpoint, dtype_name
from shardtune.distributed.world import World
from shardtune.errors import UserError


@dataclass(frozen=True)
class Part:
    """A box of a tensor that one rank writes."""

    tensor: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def plan_save(tensors: Mapping[str, torch.Tensor], world: World) -> list[list[Part]]:
    """What each rank writes: every element of every tensor once, over all of them. All ranks take part.

    Raises:
        ValueError: the ranks' parts do not make up the tensors.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=world.is_main)
    items = [_to_json(item) for item in planner.create_local_plan().items]
    plans = [
        SavePlan([_from_json(item, tensors) for item in of_rank])
        for of_rank in world.all_gather_json(items)
    ]
    plans, _ = planner.create_global_plan(plans)
    return [[part for item in plan.items if 0 not in (part := _part(item)).sizes] for plan in plans]


def _to_json(item: WriteItem) -> list[Any]:
    part = _part(item)
    return [item.type.name, part.tensor, part.offsets, part.sizes]


def _from_json(item: list[Any], tensors: Mapping[str, torch.Tensor]) -> WriteItem:
    kind, name, offsets, sizes = item
    tensor = tensors[name]
    return WriteItem(
        index=MetadataIndex(name, offsets),
        type=WriteItemType[kind],
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
            properties=TensorProperties(dtype=tensor.dtype),
            size=tensor.size(),
        ),
    )


def _part(item: WriteItem) -> Part:
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return Part(item.index.fqn, tuple(chunk.offsets), tuple(chunk.sizes))


def plan_load(
    tensors: dict[str, torch.Tensor], checkpoint: Checkpoint
) -> tuple[DefaultLoadPlanner, list[ReadItem]]:
    """What this rank reads, and the planner that knows where it goes.

    Raises:
        UserError: the checkpoint lacks tensors, or has them in another shape or dtype.
    """
    stored = checkpoint.manifest["tensors"]
    wrong = [
        f"{name} ({_kind(tensor)}, stored {'not at all' if name not in stored else _stored_kind(stored[name])})"
        for name, tensor in tensors.items()
        if name not in stored or _stored_kind(stored[name]) != _kind(tensor)
    ]
    if wrong:
        raise UserError(
            f"{checkpoint.name}: not of this model and optimizer: {wrong[0]}, {len(wrong)} tensors in all "
            "- resume with what it was saved with"
        )
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(tensors, _metadata(checkpoint, tensors), is_coordinator=False)
    return planner, planner.create_local_plan().items


def _kind(tensor: torch.Tensor) -> str:
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"


def _stored_kind(entry: Mapping[str, Any]) -> str:
    return f"{entry['dtype']} {entry['shape']}"


def _metadata(checkpoint: Checkpoint, tensors: Mapping[str, torch.Tensor]) -> Metadata:
    return Metadata(
        {
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=tensor.dtype),
                size=tensor.size(),
                chunks=[
                    ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
                    for chunk in checkpoint.chunks[name]
                ],
            )
            for name, tensor in tensors.items()
        }
    )
