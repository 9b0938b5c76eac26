"""Estimate a GPU's time for counted kernels, within about 30%: an assumption, not measured.

Rates are what large kernels reach, below the published peaks:

- matrix products in bfloat16: cuBLAS reaches about 650 of H100's 989 TFLOP/s at 700 W;
- attention: FlashAttention-2 on H100, causal, heads of 128, and FlashAttention-3 (arXiv 2407.08608,
  figures 5 and 6); a backward that repeats to the bit is assumed to be slower;
- memory: 84% of the published 3.35 TB/s (H100 SXM) and 4.8 TB/s (H200);
- a launch: the host's time for one operator of PyTorch, eager, forward or backward;
- exchanges of tokens inside a node: 350 of NVLink's 450 GB/s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from shardtune.planner.arithmetic.figures import Kernel, Kind

LAUNCH_S = 4.5e-6


class Gpu(NamedTuple):
    """Rates of one GPU: FLOP/s and bytes/s."""

    name: str
    bytes_per_s: float
    products: float = 650e12
    attention: float = 350e12
    attention_backward: float = 270e12
    exchange_bytes_per_s: float = 350e9
    peak: float = 989e12

    def with_flash_attention_3(self) -> Gpu:
        return Gpu(self.name, self.bytes_per_s, attention=550e12, attention_backward=400e12)


GPUS = H100, H200 = (Gpu("H100", 2.8e12), Gpu("H200", 4.0e12))


def gpu_of(memory_bytes: float) -> Gpu:
    """Return the GPU that has this memory, or is nearest to it."""
    return H200 if memory_bytes > 110e9 else H100


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


def launched(kernels: Mapping[Kernel, float]) -> float:
    """Return the number of kernels, collectives left out."""
    return sum(n for kernel, n in kernels.items() if kernel.kind != Kind.COLLECTIVE)


def moved_bytes(kernels: Mapping[Kernel, float], *kinds: Kind) -> float:
    """Return the bytes that kernels of these kinds move; without kinds, all but collectives."""
    wanted = kinds or tuple(kind for kind in Kind if kind != Kind.COLLECTIVE)
    return sum(n * kernel.n_bytes for kernel, n in kernels.items() if kernel.kind in wanted)
