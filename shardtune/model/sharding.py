"""FSDP2 on a model: one group per decoder layer, and one for the experts of a layer."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from math import gcd
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from shardtune.distributed.tensors import DTYPES, is_cut, to_local
from shardtune.distributed.world import World
from shardtune.errors import UserError
from shardtune.model.fsdp_groups import gather_ahead, groups_of
from shardtune.model.moe.spread import is_whole_stack, shard_placement, spread_experts
from shardtune.model.tensor_parallel import cut_layers
from shardtune.optimizers.rounding import SCALE_BLOCK


def shard(
    model: PreTrainedModel,
    layers: list[nn.Module],
    cut: Iterable[tuple[str, tuple[int, int], int]],
    world: World,
    policy: MixedPrecisionPolicy,
) -> None:
    """Apply FSDP2: one group per decoder layer, and the root's group for all other parameters.

    Spread experts are a group of their own. A weight that needs no copy is in no group.
    """
    # Inner groups come first: a group takes all parameters within its module that no group has.
    if world.expert_mesh:
        _shard_experts(model, world.expert_mesh, world, policy)
    # FSDP2 works within a replica. `OwnedParameters` exchanges gradients between replicas.
    mesh = world.mesh["shard"]
    placement: Any = partial(shard_placement, shards=mesh.size())
    if tensor_mesh := world.meshes.tensor_mesh:
        placement = cut_layers(model, cut, tensor_mesh, placement, world.progress)
    fully = partial(
        fully_shard,
        mesh=mesh,
        mp_policy=policy,
        shard_placement_fn=placement,
        ignored_params={p for p in model.parameters() if _needs_no_copy(p, world, policy)},
    )
    for layer in reversed(layers):  # a layer within another one comes first
        fully(layer)
        always_give_gradients(layer)
    fully(model)
    gather_ahead(model, layers)
    for group in groups_of(model):
        group.reduce_in(world.meshes.for_reductions, DTYPES[world.layout.gradient_dtype])
        # Gradients of other replicas are added later. Spread experts and cut matrices have met the
        # tokens of all ranks.
        group.average_over(world.layout.stage_ranks)


def _needs_no_copy(parameter: nn.Parameter, world: World, policy: MixedPrecisionPolicy) -> bool:
    """Return whether a rank computes with a weight as it stores it."""
    # FSDP2 would copy that weight all the same, and hold it twice. Without FSDP2 autograd alone
    # sums the gradients of a trained weight, in its dtype, and sends them nowhere.
    layout = world.layout
    if layout.shards > 1 or parameter.dtype != policy.param_dtype:
        return False
    is_autograds = layout.stage_ranks == 1 and parameter.dtype == policy.reduce_dtype
    return not parameter.requires_grad or (is_autograds and not layout.offloads)


def _shard_experts(
    model: PreTrainedModel, mesh: DeviceMesh, world: World, policy: MixedPrecisionPolicy
) -> None:
    """Spread the experts over `expert`, and apply FSDP2 to each rank's over `expert_shard`."""
    copies = mesh["expert_shard"].size()
    for experts in spread_experts(model, mesh["expert"], world.progress):
        fully_shard(
            experts,
            mesh=mesh["expert_shard"],
            # The router's weights stay in float32, as in a layer whose experts have no group.
            mp_policy=replace(policy, cast_forward_inputs=False),
            shard_placement_fn=partial(shard_placement, shards=copies),
        )


def require_whole_blocks(model: PreTrainedModel, optimizer: str) -> None:
    """Raise UserError if a rank's part of a weight begins or ends within a block of one scale."""
    for name, parameter in model.named_parameters():
        width = to_local(parameter).shape[-1]
        if parameter.dim() >= 2 and width < parameter.shape[-1] and width % SCALE_BLOCK:
            remedy = (
                "use parallel.expert, so that whole experts are spread, parallel.replicate, so "
                "that fewer ranks share a copy"
            )
            if is_cut(parameter):
                ranks = parameter.shape[-1] // width
                fewer = gcd(ranks, *map(_blocks, filter(is_cut, model.parameters())))
                remedy = f"use parallel.tensor={fewer}, so that fewer ranks cut its columns"
            raise UserError(
                f"optimizer.name={optimizer}: {name} is divided into parts of {width} columns, "
                f"which cut its blocks of {SCALE_BLOCK} with one scale - {remedy}, or "
                "optimizer.name=adamw"
            )


def _blocks(parameter: torch.Tensor) -> int:
    """Return into how many parts the columns of a cut matrix may be cut; 0: they are not cut."""
    width = parameter.shape[-1]
    if to_local(parameter).shape[-1] == width:
        return 0
    return 1 if width % SCALE_BLOCK else width // SCALE_BLOCK


def always_give_gradients(layer: nn.Module) -> None:
    """Let each backward give a zero gradient to parameters of a layer that no row has used."""
    # LongCat's and Zaya's tokens may all go to experts without parameters, and DeepSeek V4
    # compresses no keys of short rows. A rank with fewer gradients than other ranks reduces less
    # than they do, and the collective fails. FSDP2's `set_reduce_scatter_unused_params` would also
    # make gradients for parameters that have none on any rank, such as DeepSeek's indexers, which
    # weight decay would then shrink. Spread experts always have gradients, and may be reduced
    # before the layer.

    def sometimes_unused() -> Iterator[nn.Parameter]:
        for name, parameter in layer.named_parameters():
            if is_whole_stack(parameter) or (".compressor." in name and ".indexer." not in name):
                yield parameter

    def fill(_: torch.Tensor) -> None:
        for parameter in sometimes_unused():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def watch(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        for argument in arguments:
            if isinstance(argument, torch.Tensor) and argument.requires_grad:
                # The gradient of the layer's input is complete after the gradients of its experts,
                # and before FSDP2 reduces the layer's gradients.
                argument.register_hook(fill)

    if next(sometimes_unused(), None) is not None:
        layer.register_forward_pre_hook(watch)
