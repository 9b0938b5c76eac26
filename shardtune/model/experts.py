"""Stacked experts under FSDP."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.attention.varlen  # makes its operator known
from torch import nn


def always_give_expert_gradients(layer: nn.Module) -> None:
    """Make every backward through the layer give its stacked experts a gradient, zero where no token reached one.

    LongCat's and Zaya's tokens may all go to experts without parameters. A rank with fewer gradients than the others
    reduces less than they do, and the collective fails. FSDP2's `set_reduce_scatter_unused_params` would make gradients
    for what has none on any rank as well, such as DeepSeek's indexers, and weight decay would then shrink those.
    """

    def fill(_: torch.Tensor) -> None:
        for parameter in layer.parameters():
            if parameter.dim() >= 3 and parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def watch(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        for argument in arguments:
            if isinstance(argument, torch.Tensor) and argument.requires_grad:
                # Its gradient is complete after those of the experts, and before FSDP2 reduces the layer's.
                argument.register_hook(fill)

    if any(parameter.dim() >= 3 for parameter in layer.parameters()):
        layer.register_forward_pre_hook(watch)
