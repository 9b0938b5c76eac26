"""Which rank writes and reads which part of each tensor.

torch.distributed.checkpoint plans it: its planners know every kind of sharding. Its `save` and
`load` are not used, because they send pickles in collectives.
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

from shardtune.checkpoint.manifest import Checkpoint
from shardtune.distributed.tensors import dtype_name
from shardtune.distributed.world import World
from shardtune.errors import UserError


@dataclass(frozen=True)
class TensorPart:
    """A box of a tensor that one rank writes: its first index and its size in each dimension."""

    tensor: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def plan_save(tensors: Mapping[str, torch.Tensor], world: World) -> list[list[TensorPart]]:
    """Return the parts that each rank writes: together every element once. Collective.

    Raises:
        ValueError: the parts of the ranks do not make up the tensors.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=world.is_main)
    items = [_to_json(item) for item in planner.create_local_plan().items]
    plans, _ = planner.create_global_plan(
        [
            SavePlan([_from_json(item, tensors) for item in rank_items])
            for rank_items in world.all_gather_json(items)
        ]
    )
    return [[part for part in map(_part, plan.items) if 0 not in part.sizes] for plan in plans]


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


def _part(item: WriteItem) -> TensorPart:
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return TensorPart(item.index.fqn, tuple(chunk.offsets), tuple(chunk.sizes))


def plan_load(
    tensors: dict[str, torch.Tensor], checkpoint: Checkpoint
) -> tuple[DefaultLoadPlanner, list[ReadItem]]:
    """Return the boxes that this rank reads, and the planner that maps them to its tensors.

    Raises:
        UserError: the checkpoint lacks tensors, or has them in another shape or dtype.
    """
    entries = checkpoint.manifest["tensors"]
    stored = {name: f"{entry['dtype']} {entry['shape']}" for name, entry in entries.items()}
    needed = {name: f"{dtype_name(t.dtype)} {list(t.shape)}" for name, t in tensors.items()}
    wrong = [name for name, kind in needed.items() if stored.get(name) != kind]
    if wrong:
        name = wrong[0]
        raise UserError(
            f"{checkpoint.name} does not fit this model and optimizer: {name} is {needed[name]}, "
            f"stored is {stored.get(name, 'none')} ({len(wrong)} tensors differ) "
            "- resume with the model and optimizer of the checkpoint"
        )
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(tensors, _metadata(checkpoint, tensors), is_coordinator=False)
    return planner, planner.create_local_plan().items


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
