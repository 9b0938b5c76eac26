"""Name the GPU, and check that it multiplies as fast as its data sheet says."""

import importlib.util
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from distTest.gpu_check.checks import Outcome, is_tiny, require
from distTest.workloads.script import output_of
from shardtune.distributed.gpus import use_gpu
from shardtune.errors import first_line
from shardtune.model.flops import published_peak

_CONTEXT_BYTES = 3e9  # more than the driver and this process take of a GPU before its tensors
_LEAST = 0.7  # the least share of the published rate; a slower GPU is throttled or shared


def device() -> Outcome:
    """Name device, driver and versions, and measure bfloat16 products and copies. Raises Failed."""
    size, times = (256, 2) if is_tiny() else (8192, 20)
    free, total = torch.cuda.mem_get_info()
    held = total - free
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    # The fastest of some bursts: a clock that is held down slows all of them.
    product_s = min(seconds(lambda: a @ b, times) for _ in range(1 if is_tiny() else 5))
    copied = torch.empty(1 << (16 if is_tiny() else 30), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(copied)
    copy_s = seconds(lambda: target.copy_(copied), times)
    name, rate = torch.cuda.get_device_name(), 2 * size**3 / product_s
    published = published_peak(name, torch.bfloat16)
    figures: dict[str, Any] = {
        "device": name,
        "capability": list(torch.cuda.get_device_capability()),
        "memory_bytes": total,
        "free_bytes": free,
        "driver": nvidia_smi("driver_version"),
        "clock": nvidia_smi("clocks.sm,clocks.max.sm,power.limit,temperature.gpu"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "bfloat16_flops": rate,
        "published_flops": published,
        "copy_bytes_per_s": 2 * copied.nbytes / copy_s,
    }
    summary = (
        f"{name}, {total / 1e9:.1f} GB, driver {figures['driver']}, PyTorch {torch.__version__}: "
        f"{rate / 1e12:.3g} TFLOP/s in bfloat16, "
        f"{figures['copy_bytes_per_s'] / 1e12:.3g} TB/s"
    )
    # Small products do not show a GPU's rate, and a pretended GPU has none.
    problem = None if is_tiny() else slowness(rate, published)
    return require(list(filter(None, [held_by_others(held), problem])), summary, figures)


def smoke() -> Outcome:
    """Try what every run needs, one line each, and print the machine's facts."""
    pip = f"{sys.executable} -m pip list"
    for command in ("nvidia-smi", "free -g", "df -h /tmp", "ip link", pip):
        print(f"$ {command}\n{output_of(*command.split())}")
    device, bytes_pinned = use_gpu(0), 1 << (12 if is_tiny() else 32)
    parts: dict[str, Callable[[], object]] = {
        "segments that grow": lambda: torch.ones(1 << 20, device=device),
        "NCCL with one process": partial(_all_reduce, device),
        "Triton": partial(_compile, device),
        "4 GB pinned": partial(torch.empty, bytes_pinned, dtype=torch.uint8, pin_memory=True),
    }
    problems, took = list[str](), dict[str, float]()
    for name, part in parts.items():
        started = time.perf_counter()
        try:
            part()
            torch.cuda.synchronize()
        except Exception as error:  # a driver may raise anything; the other parts are tried
            problems.append(f"{name}: {first_line(error)}")
        took[name] = time.perf_counter() - started
    text = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in took.items())
    return require(problems, text, {"seconds": took})


def _all_reduce(device: torch.device) -> None:
    store = dist.HashStore()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1, device_id=device
    )
    dist.all_reduce(torch.ones(8, device=device))


def _compile(device: torch.device) -> None:
    # Without Triton runs compile nothing, and a pretended GPU has no driver for it.
    if importlib.util.find_spec("triton") and not is_tiny():
        torch.compile(lambda x: 2 * x + 1, dynamic=True)(torch.ones(8, device=device))


def held_by_others(n_bytes: int) -> str | None:
    """Return a problem if `n_bytes`, held before this process has tensors, are too many."""
    if n_bytes < _CONTEXT_BYTES:
        return None
    return f"other processes hold {n_bytes / 1e9:.1f} GB of the GPU - end them (nvidia-smi)"


def slowness(flops_per_s: float, published: float | None) -> str | None:
    if published is None or flops_per_s >= _LEAST * published:
        return None
    return (
        f"products run at {flops_per_s / published:.0%} of the published "
        f"{published / 1e12:.0f} TFLOP/s, below {_LEAST:.0%} - look at the clocks, the power limit "
        "and other processes (nvidia-smi -q -d CLOCK,POWER,PERFORMANCE)"
    )


def nvidia_smi(query: str) -> str:
    answer = output_of("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader")
    return answer.partition("\n")[0] or "unknown"


def seconds(work: object, times: int) -> float:
    """Return the mean seconds of a call, after two calls that do not count."""
    assert callable(work)
    for _ in range(2):
        work()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / times
