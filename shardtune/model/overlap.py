"""What runs beside FSDP2's collectives: layers are gathered one ahead, and reductions do not wait
for gathers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, cast

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardtune.model.experts import is_spread


def gather_ahead(model: Any, layers: Sequence[nn.Module]) -> None:
    """Let each layer begin to gather the next one with its spread experts, both ways.

    FSDP2 itself gathers spread experts behind the host's wait for the sizes of their exchange, when
    the network has been idle. In the backward it follows the forwards since the last backward: with
    those of several micro-batches in flight it would gather the last layer of another one for
    nothing. A layer that is computed again gathers nothing.
    """
    groups: list[list[Any]] = [list(filter(_is_group, layer.modules())) for layer in layers]
    for group in chain(*groups):
        group.set_modules_to_backward_prefetch([group])  # nothing: it has been gathered
    for before, behind in pairwise([[model], *groups]):
        before[0].set_modules_to_forward_prefetch(behind)
    for before, behind in pairwise([*groups, [model]]):
        behind[0].set_modules_to_backward_prefetch(before)


def gathered_groups(model: Any) -> dict[Any, list[nn.Parameter]]:
    """Return FSDP2's groups and their parameters, in the order in which they may stay gathered.

    First comes what stands around the layers, then the layers, then their spread experts, which
    travel between fewer ranks. A parameter that FSDP2 leaves alone is in none.
    """
    groups = [model, *(each for each in model.modules() if _is_group(each) and each is not model)]
    parameters: dict[Any, list[nn.Parameter]] = {}
    of_inner_groups: set[nn.Parameter] = set()
    for group in reversed(groups):
        sharded = [p for p in group.parameters() if isinstance(cast(Any, p), DTensor)]
        parameters[group] = [p for p in sharded if p not in of_inner_groups]
        of_inner_groups.update(parameters[group])
    groups.sort(key=lambda group: any(map(is_spread, parameters[group])))
    return {group: parameters[group] for group in groups}


def reduce_beside_gathers(model: nn.Module, groups: Mapping[str, dist.ProcessGroup]) -> None:
    """Let FSDP2 reduce gradients in these groups, by the dimension over which it gathers."""
    for module in filter(_is_group, model.modules()):
        for group in cast(Any, module)._get_fsdp_state()._fsdp_param_groups:
            (dimension,) = group.mesh_info.mesh.mesh_dim_names
            # `set_separate_reduce_scatter_group` makes groups here. A stage without experts would
            # make one fewer, and NCCL, which splits the group of all ranks, would wait for it.
            group.mesh_info.reduce_scatter_process_group = groups.get(dimension)


def _is_group(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)
