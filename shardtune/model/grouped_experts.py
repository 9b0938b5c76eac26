"""The products of stacked experts, on rows that are sorted by expert.

As transformers' `grouped_mm_experts_forward`, without its sorting and without weights: rows that
come from other ranks are brought into order once, and each caller has its own weights.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import _grouped_linear


def are_stacked(experts: type[nn.Module]) -> bool:
    """Whether these experts follow transformers' `use_experts_implementation`."""
    return hasattr(experts, "_apply_gate")


def expert_outputs(
    experts: nn.Module, rows: torch.Tensor, expert_ids: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """Return the output of each row's expert: (rows, width).

    rows: (rows, width), sorted by `expert_ids`, (rows,). ends: (experts,), int32, of each expert
    the number of rows up to its last.
    """
    this: Any = experts  # the attributes of transformers' experts
    # Adapted experts have one of their own.
    product = getattr(this, "product", None) or partial(stack_product, experts)
    up = "gate_up_proj" if this.has_gate else "up_proj"
    hidden = product(up, rows, expert_ids, ends)
    hidden = this._apply_gate(hidden) if this.has_gate else this.act_fn(hidden)
    hidden = product("down_proj", hidden, expert_ids, ends)
    if this.has_post_expert_norm:
        hidden = this.post_expert_norm(hidden)
    return hidden


def stack_product(
    experts: nn.Module, name: str, rows: torch.Tensor, expert_ids: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """Multiply rows (rows, in) by one stack: (rows, out)."""
    this: Any = experts
    bias = getattr(this, f"{name}_bias")[expert_ids] if this.has_bias else None
    return _grouped_linear(rows, getattr(this, name), ends, bias, this.is_transposed)
