"""Stacked experts under FSDP: parameters of three dimensions, the experts first."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard


def shard_placement(parameter: nn.Parameter, shards: int) -> Shard:
    """Return the dimension of a parameter that FSDP2 splits into `shards`.

    It is the first, FSDP2's own choice, unless that leaves ranks without any of the stacked
    experts. Then it is the last if it divides evenly, as FSDP2 demands of every other dimension,
    else the first again, and these ranks have empty slices.
    """
    experts, width = parameter.shape[0], parameter.shape[-1]
    is_some_slice_empty = -(-experts // shards) * (shards - 1) >= experts
    if parameter.dim() >= 3 and is_some_slice_empty and width % shards == 0:
        # The last dimension: the second is where the files' gate and up projections are joined.
        return Shard(parameter.dim() - 1)
    return Shard(0)


def always_give_expert_gradients(layer: nn.Module) -> None:
    """Make every backward through the layer give its stacked experts a gradient.

    It is zero where no token reached an expert: LongCat's and Zaya's tokens may all go to experts
    without parameters. A rank with fewer gradients than the others reduces less than they do, and
    the collective fails. FSDP2's `set_reduce_scatter_unused_params` would also make gradients for
    parameters that have none on any rank, such as DeepSeek's indexers, and weight decay would
    shrink those.
    """

    def fill(_: torch.Tensor) -> None:
        for parameter in layer.parameters():
            if parameter.dim() >= 3 and parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def watch(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        for argument in arguments:
            if isinstance(argument, torch.Tensor) and argument.requires_grad:
                # Its gradient is complete after those of the experts, and before FSDP2 reduces the
                # layer's.
                argument.register_hook(fill)

    if any(parameter.dim() >= 3 for parameter in layer.parameters()):
        layer.register_forward_pre_hook(watch)
