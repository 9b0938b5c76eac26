"""What the GPU is, and whether it multiplies as fast as it should."""

from __future__ import annotations

import subprocess
import time
from typing import Any

import torch

from distTest.gpu_check.checks import Outcome, is_tiny


def device() -> Outcome:
    """Name device, driver and versions, and measure bfloat16 products and copies."""
    size, times = (256, 2) if is_tiny() else (8192, 30)
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product_s = seconds(lambda: a @ b, times)
    copied = torch.empty(1 << (16 if is_tiny() else 30), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(copied)
    copy_s = seconds(lambda: target.copy_(copied), times)
    free, total = torch.cuda.mem_get_info()
    figures: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
        "memory_bytes": total,
        "free_bytes": free,
        "driver": driver(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "bfloat16_flops": 2 * size**3 / product_s,
        "copy_bytes_per_s": 2 * copied.nbytes / copy_s,
    }
    return Outcome(
        f"{figures['device']}, {total / 1e9:.1f} GB, driver {figures['driver']}, PyTorch "
        f"{torch.__version__}: {figures['bfloat16_flops'] / 1e12:.3g} TFLOP/s in bfloat16, "
        f"{figures['copy_bytes_per_s'] / 1e12:.3g} TB/s",
        figures,
    )


def driver() -> str:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.split("\n")[0].strip()


def seconds(work: object, times: int) -> float:
    """Return the mean seconds of a call, after two that do not count."""
    assert callable(work)
    for _ in range(2):
        work()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / times
