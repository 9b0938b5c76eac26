"""Run train_fsdp.py and print, for each step, its seconds by kind of operation as one line of JSON.

On a GPU these are the seconds of its kernels.

python -m benchmarks.step_profile [arguments of train_fsdp.py]
"""

from __future__ import annotations

import json
import time
from collections import Counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import train_fsdp
from benchmarks.measure import PROFILE_LABEL
from shardtune.distributed.exit_code import run

KINDS = {
    "matrix products": ("mm", "addmm", "addmm_", "bmm", "_grouped_mm"),
    "attention": (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        "_flash_attention_forward",
        "_flash_attention_backward",
    ),
    "copies, casts and fills": (
        "copy_",
        "cat",
        "fill_",
        "zero_",
        "index",
        "index_select",
        "index_add_",
        "slice_scatter",
    ),
    "optimizer and gradient norm": ("_fused_adamw_", "linalg_vector_norm", "_foreach_mul_"),
}
ATTENTION_OF_CPU = "shardtune::causal_documents"  # made of other operators
ACTIVITIES = [ProfilerActivity.CPU]
if torch.cuda.is_available():
    ACTIVITIES.append(ProfilerActivity.CUDA)
OTHERS = "normalisation, activations and other element-wise operations"
HOST = "Python and dispatch"


def main() -> None:
    train_step = train_fsdp.train_step

    def profiled(job: Any, *arguments: Any) -> Any:
        started = time.perf_counter()
        with profile(activities=ACTIVITIES) as profiler:
            done = train_step(job, *arguments)
        seconds = time.perf_counter() - started
        print(PROFILE_LABEL + json.dumps(by_kind(profiler, seconds)), flush=True)
        return done

    train_fsdp.train_step = profiled
    train_fsdp.main()


def is_within(event: Any, name: str) -> bool:
    """Return whether the event, or one around it, has a name that begins so."""
    while event is not None and not event.name.startswith(name):
        event = event.cpu_parent
    return event is not None


def by_kind(profiler: profile, seconds: float) -> dict[str, float]:
    """Return the seconds within each kind of operation; the rest of the step is the host's."""
    kind_of = {f"aten::{name}": kind for kind, names in KINDS.items() for name in names}
    seconds_of_kind: Counter[str] = Counter()
    for event in profiler.events():
        kind = kind_of.get(event.name, OTHERS if event.name.startswith("aten::") else HOST)
        if is_within(event, ATTENTION_OF_CPU):
            kind = "attention"
        time_us = event.self_cpu_time_total
        if len(ACTIVITIES) > 1:
            time_us = event.self_device_time_total
        seconds_of_kind[kind] += time_us / 1e6
    seconds_of_kind[HOST] = seconds - sum(
        value for kind, value in seconds_of_kind.items() if kind != HOST
    )
    return dict(seconds_of_kind.most_common())


if __name__ == "__main__":
    run(main)
