"""Time a plain loop of the products and the attention of GLM-4.5-Air's layers.

It has no norms, routers, copies, optimizer or host between kernels. So its MFU is the ceiling of
the run with the same layers on the same GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.attention import activate_flash_attention_impl, varlen
from transformers import AutoConfig, AutoModelForCausalLM

from distTest.gpu_check.checks import Outcome, is_tiny
from distTest.gpu_check.device import seconds
from distTest.gpu_check.glm import slice_for
from shardtune.model.flops import count_flops, published_peak

_LENGTH = 4096  # tokens of a row; each row is one document


@dataclass
class Work:
    """Functions of one layer, or of the head, each with inputs whose gradients are wanted."""

    calls: list[tuple[Callable[..., torch.Tensor], list[torch.Tensor]]]

    def __post_init__(self) -> None:
        with torch.no_grad():  # random, since constant operands multiply faster
            self._gradients = [torch.randn_like(call(*inputs)) for call, inputs in self.calls]

    def forward(self) -> None:
        with torch.no_grad():
            for function, inputs in self.calls:
                function(*inputs)

    def forward_and_backward(self) -> None:
        for (function, inputs), gradient in zip(self.calls, self._gradients, strict=True):
            torch.autograd.grad(function(*inputs), inputs, gradient)


def ceiling() -> Outcome:
    """Time each kind of layer and the head, and add them up for the slice."""
    length, times = (256, 1) if is_tiny() else (_LENGTH, 10)
    part = slice_for(length)
    shape, version = part.settings, "FA3" if _activates_third() else "FA2"
    torch.manual_seed(0)
    n_dense = shape["first_k_dense_replace"]
    counts = {"dense": n_dense, "experts": part.layers - n_dense, "head": 1}
    once, computed_again = 0.0, 0.0
    ms = dict[str, float]()
    for kind, count in counts.items():
        work = _KINDS[kind](shape, length)
        both = seconds(work.forward_and_backward, times)
        # Full checkpointing runs each layer's forward again, but not the head's.
        again = 0.0 if kind == "head" else seconds(work.forward, times)
        ms |= {kind: 1e3 * both, f"{kind}, forward": 1e3 * again}
        once, computed_again = once + count * both, computed_again + count * again
    with torch.device("meta"):
        config = AutoConfig.for_model(part.model_type, **shape)
        flops = count_flops(AutoModelForCausalLM.from_config(config))
    step = flops.per_step(np.array([length]), length)
    peak = published_peak(torch.cuda.get_device_name(), torch.bfloat16)
    rate = step / (once + computed_again)
    figures: dict[str, Any] = {"ms": ms, "attention": version, "flops_per_s": rate}
    text = f"{part}: {rate / 1e12:.3g} model TFLOP/s"
    if peak:
        figures |= {"mfu": rate / peak, "mfu_without_recomputation": step / once / peak}
        text += (
            f", MFU {figures['mfu']:.1%} with full activation checkpointing, "
            f"{figures['mfu_without_recomputation']:.1%} without"
        )
    return Outcome(f"a plain loop of the products and attention ({version}) of {text}", figures)


def _activates_third() -> bool:
    """Return whether varlen attention calls FlashAttention 3 from now on."""
    try:
        activate_flash_attention_impl("FA3")
    except Exception:  # the import of a package may raise anything
        return False
    return True


def _matrix(*shape: int) -> torch.Tensor:
    made = torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    return made.mul_(shape[-1] ** -0.5).requires_grad_()


def _product(tokens: int, width: int, out: int) -> tuple[Callable[..., torch.Tensor], list[Any]]:
    return torch.nn.functional.linear, [_matrix(tokens, width), _matrix(out, width)]


def _grouped(
    rows: int, width: int, out: int, groups: int
) -> tuple[Callable[..., torch.Tensor], list[Any]]:
    """Return grouped products in which all experts have equally many rows."""
    ends = torch.arange(1, groups + 1, device="cuda") * (rows // groups)

    def grouped(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.grouped_mm(
            x, weight.transpose(-2, -1), offs=ends.to(torch.int32)
        )

    return grouped, [_matrix(rows // groups * groups, width), _matrix(groups, out, width)]


def _attention(shape: dict[str, Any], length: int) -> Work:
    heads, key_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    width, hidden = shape["head_dim"], shape["hidden_size"]
    ends = torch.tensor([0, length], dtype=torch.int32, device="cuda")
    attend: Any = partial(
        varlen.varlen_attn,
        cu_seq_q=ends,
        cu_seq_k=ends,
        max_q=length,
        max_k=length,
        window_size=(-1, 0),
        enable_gqa=True,
    )
    projections = [_product(length, hidden, n * width) for n in (heads, key_heads, key_heads)]
    attention = attend, [_matrix(length, n, width) for n in (heads, key_heads, key_heads)]
    return Work([*projections, attention, _product(length, heads * width, hidden)])


def _mlp(length: int, hidden: int, width: int) -> list[Any]:
    return [_product(length, hidden, 2 * width), _product(length, width, hidden)]


def _dense_layer(shape: dict[str, Any], length: int) -> Work:
    mlp = _mlp(length, shape["hidden_size"], shape["intermediate_size"])
    return Work(_attention(shape, length).calls + mlp)


def _expert_layer(shape: dict[str, Any], length: int) -> Work:
    hidden, width = shape["hidden_size"], shape["moe_intermediate_size"]
    experts, rows = shape["n_routed_experts"], length * shape["num_experts_per_tok"]
    routed = [_grouped(rows, hidden, 2 * width, experts), _grouped(rows, width, hidden, experts)]
    shared = _mlp(length, hidden, width * shape["n_shared_experts"])
    return Work(_attention(shape, length).calls + routed + shared)


def _head(shape: dict[str, Any], length: int) -> Work:
    return Work([_product(length, shape["hidden_size"], shape["vocab_size"])])


_KINDS: dict[str, Callable[[dict[str, Any], int], Work]] = {
    "dense": _dense_layer,
    "experts": _expert_layer,
    "head": _head,
}
