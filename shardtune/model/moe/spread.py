"""Stacked experts: parameters of three dimensions, the experts first. FSDP2 shards them, or
`parallel.expert` spreads whole experts over ranks.

Spread experts stay where they are, and tokens travel: each rank of an `expert` group sends its
(token, expert) pairs to the ranks that hold these experts, and gets the outputs back. Ranks with
the same experts, `expert_shard` and `replicate`, are an FSDP group of their own.
"""

import contextlib
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

with contextlib.suppress(ImportError):  # transformers before 5.23
    from transformers.distributed.expert_parallel import (
        EPImplementationInterface,
        apply_expert_parallelism,
    )

from torch.distributed.tensor import Shard

from shardtune.distributed.layout import leaves_empty_slices
from shardtune.distributed.progress import Progress
from shardtune.distributed.tensors import is_spread, to_local
from shardtune.model.moe.token_exchange import ExpertExchange, SharedExperts
from shardtune.model.parts import has_new_transformers, is_factor, is_stack

_MODULE, _STACK = "ep_dispatch_experts", "grouped_gemm"  # transformers' styles
_SHARED = ("shared_expert", "shared_experts", "shared_mlp")  # transformers' names


def spread_experts(model: PreTrainedModel, mesh: DeviceMesh, progress: Progress) -> list[Any]:
    """Spread the stacked experts over `mesh` by the architecture's plan; return their modules.

    The parameters become DTensors, and each module exchanges tokens around its own forward.
    """
    plan = _plan_of_experts(model)
    # No plan knows adapters: without this each factor would get the style of its module.
    plan |= dict.fromkeys(filter(is_factor, plan), _STACK)
    modules: dict[nn.Module, list[SharedExperts]] = {}
    for name, module in model.named_modules():
        if plan.get(name) == _MODULE:
            beside = model.get_submodule(name.rpartition(".")[0]).named_children()
            modules[module] = [SharedExperts(child) for each, child in beside if each in _SHARED]

    def exchange(experts: nn.Module, mesh: DeviceMesh, _: DeviceMesh) -> ExpertExchange:
        return ExpertExchange(experts, modules[experts], mesh, progress)

    EPImplementationInterface.register("shardtune", exchange)
    # The second mesh is for tensor parallelism, which `exchange` does not use.
    apply_expert_parallelism(model, mesh, mesh, plan, ep_implementation="shardtune")
    # The host reads the sizes of each exchange, on which a compiled graph would break.
    for module in cast(dict[Any, Any], modules):
        module.forward = torch.compiler.disable(module.forward)
    return list(modules)


def _plan_of_experts(model: PreTrainedModel) -> dict[str, str]:
    """Return transformers' plan to spread experts, by the names of modules and parameters."""
    # Gemma 4's plan also cuts its dense MLPs, which FSDP2 shards here.
    plan = model._expand_parallel_plan(model.ep_plan)
    return {name: style for name, style in plan.items() if style not in ("colwise", "rowwise")}


def has_expert_plan(model: PreTrainedModel) -> bool:
    """Return whether transformers has a plan to spread the experts of an architecture."""
    plan = model.ep_plan if has_new_transformers() else None
    return bool(plan) and _MODULE in _plan_of_experts(model).values()


def spread_stacks(model: PreTrainedModel) -> set[str]:
    """Return the names of the stacks, and of their adapters, that `parallel.expert` spreads."""
    plan = _plan_of_experts(model) if has_new_transformers() and model.ep_plan else {}
    return {name for name, style in plan.items() if style == _STACK or is_factor(name)}


def is_whole_stack(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is a stack of experts that FSDP2 alone shards."""
    return is_stack(parameter) and not is_spread(parameter)


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
