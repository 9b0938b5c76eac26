"""Tell which ranks compute with parts of a parameter, and choose where FSDP2 cuts it."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from shardtune.distributed.tensors import to_local
from shardtune.model.facts.problems import leaves_empty_slices
from shardtune.model.traits import is_stack


def is_spread(parameter: torch.Tensor) -> bool:
    """Return whether a parameter, sharded or gathered, is a stack of spread experts."""
    return "expert" in _dimensions(parameter)


def is_cut(parameter: torch.Tensor) -> bool:
    """Return whether the ranks of `tensor` compute with parts of a parameter."""
    return "tensor" in _dimensions(parameter)


def _dimensions(parameter: torch.Tensor) -> tuple[str, ...]:
    is_sharded = isinstance(parameter, DTensor)
    return (cast(DTensor, parameter).device_mesh.mesh_dim_names or ()) if is_sharded else ()


def gathered_numel(parameter: torch.Tensor) -> int:
    """Return how many elements of a sharded parameter a rank has once FSDP2 has gathered it."""
    names, numel = _dimensions(parameter), parameter.numel()
    for name in {"expert", "tensor"}.intersection(names):
        numel //= cast(DTensor, parameter).device_mesh.size(names.index(name))
    return numel


def shard_placement(parameter: nn.Parameter, shards: int) -> Shard:
    """Return the dimension of a parameter that FSDP2 splits into `shards`."""
    # It is the first, as FSDP2 itself chooses, unless some ranks would get no experts of a stack.
    # Then it is the last, if it divides evenly, as FSDP2 demands of all dimensions but the first.
    experts, width = to_local(parameter).shape[0], parameter.shape[-1]
    has_experts = is_stack(parameter) or is_spread(parameter)
    if has_experts and leaves_empty_slices(experts, shards) and width % shards == 0:
        # Not the second dimension, in which gate and up projections of the files are joined.
        return Shard(parameter.dim() - 1)
    return Shard(0)
