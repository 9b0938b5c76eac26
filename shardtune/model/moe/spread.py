"""Stacked experts: parameters of three dimensions, the experts first. FSDP2 shards them, or
`parallel.expert` spreads whole experts over ranks.

Spread experts stay where they are, and tokens travel: each rank of an `expert` group sends its
(token, expert) pairs to the ranks that hold these experts, and gets the outputs back. Ranks with
the same experts, `expert_shard` and `replicate`, are an FSDP group of their own.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
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

from shardtune.distributed.progress import Progress
from shardtune.model.moe.placement import leaves_empty_slices
from shardtune.model.moe.shared_experts import SharedExperts
from shardtune.model.moe.token_exchange import ExpertExchange
from shardtune.model.source.config_json import too_old_transformers, undivided_experts
from shardtune.model.traits import has_experts, is_factor, is_stack

_MODULE, _STACK = "ep_dispatch_experts", "grouped_gemm"  # transformers' styles
_SHARED = ("shared_expert", "shared_experts", "shared_mlp")  # transformers' names


def spread_problems(model: PreTrainedModel, degree: int, copies: int) -> Iterator[str]:
    """Yield why experts cannot be spread over `degree` ranks, and each part over `copies` ranks."""
    if degree == 1:
        return
    kind, key = model.config.model_type, f"parallel.expert={degree}"
    if problem := too_old_transformers(degree):
        yield problem
        return
    plan = _plan_of_experts(model)
    stacks = [model.get_parameter(name) for name, style in plan.items() if style == _STACK]
    if _MODULE not in plan.values() or not stacks:
        lack = "has no plan to spread its experts over ranks"
        if not has_experts(model):
            lack = "has no experts"
        yield f"{key}: {kind} {lack} - use parallel.expert=1"
    for number in sorted({stack.shape[0] for stack in stacks}):
        if problem := undivided_experts(degree, number, kind):
            yield problem
    # transformers cannot read the empty slices of files that hold stacks.
    local = {(s.shape[0] // degree, s.shape[-1]) for s in stacks if s.shape[0] % degree == 0}
    for experts, width in sorted(local):
        if leaves_empty_slices(experts, copies) and width % copies:
            yield (
                f"{key}: {copies} ranks share {experts} experts of {kind}, and neither these nor "
                f"their width, {width}, can be cut into {copies} - use a larger parallel.replicate"
            )


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


def spread_stacks(model: PreTrainedModel) -> set[str]:
    """Return the names of the stacks, and of their adapters, that `parallel.expert` spreads."""
    plan = {} if too_old_transformers(2) or not model.ep_plan else _plan_of_experts(model)
    return {name for name, style in plan.items() if style == _STACK or is_factor(name)}


def stacked_experts(model: PreTrainedModel) -> Iterator[tuple[str, Any, int]]:
    """Yield name, module and number of experts of each stack that takes a router's choices."""
    for name, module in model.named_modules():
        stacks = [*filter(is_stack, module.parameters(recurse=False))]
        # The module itself, tokens, the router's choices and their weights.
        if stacks and len(inspect.signature(type(module).forward).parameters) == 4:
            yield name, module, stacks[0].shape[0]
