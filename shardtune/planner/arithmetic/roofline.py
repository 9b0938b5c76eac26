"""Estimate a GPU's time for counted kernels: an assumption, held against runs that others measured.

Rates are the shares of a card's published peaks that large kernels reach:

- matrix products in bfloat16: cuBLAS reaches about 650 of H100's 989 TFLOP/s at 700 W, and 220 of
  A100's 312;
- attention: FlashAttention-2 on H100 and A100, causal, heads of 128, and FlashAttention-3 on H100
  (arXiv 2407.08608, figures 5 and 6);
- memory: 84% of the published rate;
- a launch: the host's time for one operator of PyTorch, eager, forward or backward;
- exchanges of tokens inside a node: 350 of the 450 GB/s of H100's NVLink, and gathers 330.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from shardtune.cards import Card
from shardtune.planner.arithmetic.figures import Kernel, Kind

LAUNCH_S = 4.5e-6
_HOPPER_FLOPS_PER_S = 700e12  # slower cards are of Ampere, Ada or GeForce


class Gpu(NamedTuple):
    """Rates that kernels reach on a card: FLOP/s and bytes/s."""

    card: Card
    products: float
    attention: float
    attention_backward: float

    @property
    def bytes_per_s(self) -> float:
        return 0.84 * self.card.bytes_per_s

    @property
    def exchange_bytes_per_s(self) -> float:
        return 350 / 450 * self.card.link_bytes_per_s

    @property
    def gather_bytes_per_s(self) -> float:
        return 330 / 450 * self.card.link_bytes_per_s

    def with_flash_attention_3(self) -> Gpu:
        return Gpu(self.card, self.products, 550e12, 400e12)


def gpu_of(card: Card) -> Gpu:
    """Return the rates that kernels reach on a card."""
    peak = card.flops_per_s
    if peak < _HOPPER_FLOPS_PER_S:
        return Gpu(card, 220 / 312 * peak, 190 / 312 * peak, 150 / 312 * peak)
    # FlashAttention-2 uses the instructions of Ampere, so later cards run it at H100's rate.
    of_h100 = min(1, peak / 989e12)
    return Gpu(card, 650 / 989 * peak, 350e12 * of_h100, 270e12 * of_h100)


def kernel_seconds(kernel: Kernel, gpu: Gpu) -> float:
    """Return a kernel's seconds on the device. Gathers and reductions hide behind other kernels."""
    if kernel.kind == Kind.COLLECTIVE:
        return kernel.n_bytes / gpu.exchange_bytes_per_s if "alltoall" in kernel.operator else 0.0
    rates = {
        Kind.PRODUCT: gpu.products,
        Kind.ATTENTION: gpu.attention,
        Kind.ATTENTION_BACKWARD: gpu.attention_backward,
    }
    arithmetic = kernel.flops / rates[kernel.kind] if kernel.kind in rates else 0.0
    return max(arithmetic, kernel.n_bytes / gpu.bytes_per_s)


def seconds(kernels: Mapping[Kernel, float], gpu: Gpu) -> float:
    """Return the seconds of counted kernels: the device's, or the host's to launch them."""
    device = sum(n * kernel_seconds(kernel, gpu) for kernel, n in kernels.items())
    return max(device, launched(kernels) * LAUNCH_S)


def with_gathers(kernels_s: float, n_bytes: float, gpu: Gpu, is_hidden: bool) -> float:
    """Return the seconds of kernels and of gathers and reductions inside a node.

    `is_hidden`: they run beside the products, as in dense layers. Experts that are not spread are
    gathered for few products, and take that time besides.
    """
    gathers_s = n_bytes / gpu.gather_bytes_per_s
    return max(kernels_s, gathers_s) if is_hidden else kernels_s + gathers_s


def launched(kernels: Mapping[Kernel, float]) -> float:
    """Return the number of kernels, collectives left out."""
    return sum(n for kernel, n in kernels.items() if kernel.kind != Kind.COLLECTIVE)
