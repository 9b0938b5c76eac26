"""The shipped settings on the first layers of GLM-4.5-Air, eager and compiled.

Every side runs in rounds of one process each. The last round also profiles a step after the timed
ones, and leaves its trace.
"""

from __future__ import annotations

import shutil
from functools import partial
from statistics import median
from typing import Any

import torch

from distTest.gpu_check.checks import Outcome, is_tiny, require, result_path
from distTest.gpu_check.memory import compare, plan_job, slice_that_fits
from distTest.gpu_check.profile_table import as_markdown, kernel_table
from distTest.gpu_check.runs import Run, work_folder
from distTest.workloads.shapes import Slice
from shardtune.distributed.compiling import can_compile

_SHAPE = "glm-4.5-air, real width"
# As in config.yaml, where one of several ranks holds less of each parameter.
SETTINGS = (
    "model.master_dtype=bfloat16",
    "model.activation_checkpointing=full",
    "optimizer.name=adamw8bit",
)
_BYTES_PER_PARAMETER, _SHARE = 9, 0.7
_TIMED = slice(1, 4)  # steps; the first one compiles
_PROFILED = 5  # the step's number, and one follows: the profile is written before it
_TOLERANCE = 1e-2  # relative, of bfloat16 losses: tokens near a tie change experts


def slice_for(length: int) -> Slice:
    """Return the layers that this GPU has room for."""
    return slice_that_fits(_SHAPE, _BYTES_PER_PARAMETER, length, _SHARE)


def _measure(length: int, rounds: int) -> Outcome:
    """Measure speed, losses and memory, and list the kernels of a step."""
    steps, profiled = [], f"logging.profile_steps=[{_PROFILED},{_PROFILED}]"
    steps += [f"train.max_steps={_PROFILED + 1}", "optimizer.lr=1e-4"]
    job = plan_job(slice_for(length), *SETTINGS, *steps)
    sides = {"eager": "false"}
    if can_compile(torch.device("cuda")):
        sides["compiled"] = "true"
    runs: dict[str, list[Run]] = {side: [] for side in sides}
    for turn in range(rounds):
        more = [profiled] * (turn == rounds - 1)
        for side, compiled in sorted(sides.items(), reverse=turn % 2 == 0):  # eager first
            name = f"{side}-{turn}"
            runs[side].append(job.run(name, f"model.compile={compiled}", *more))
    problems, memory, figures = compare(job, runs["eager"][0])
    problems += _different_losses(runs)
    figures = {
        "model": f"GLM-4.5-Air, {job.part}",
        "parameters": job.plan.parameters,
        "row_tokens": job.part.row_tokens,
        "command": " ".join(["train_fsdp.py", *job.assignments]).replace(f"{work_folder()}/", ""),
        "memory": figures,
        "sides": {side: _figures(side, repeated) for side, repeated in runs.items()},
    }
    texts = [f"{job.part}, rows of {job.part.row_tokens} tokens"]
    for side, measured in figures["sides"].items():
        low, middle, high = measured["tokens_per_second"]
        mfu = "unknown" if measured["mfu"] is None else f"{measured['mfu'][1]:.1%}"
        idle = measured["kernels"].get("idle_ms", 0.0)
        texts.append(
            f"{side} {middle:.0f} tokens/s ({low:.0f} to {high:.0f}), MFU {mfu}, the GPU idle for "
            f"{idle:.1f} ms of a step"
        )
        if not measured["kernels"]["kernels"]:
            problems.append(f"{side}: the profile of step {_PROFILED} has no kernels")
        else:
            print(as_markdown(f"{side}, step {_PROFILED}", measured["kernels"]))
    if "compiled" not in sides:
        texts.append("compiled: skipped, since nothing is compiled here")
    return require(problems, "; ".join([*texts, memory]), figures)


def _figures(side: str, rounds: list[Run]) -> dict[str, Any]:
    timed = [step for run in rounds for step in run.steps[_TIMED]]
    (trace,) = (rounds[-1].directory / "profile").glob("*.json.gz")
    shutil.copy(trace, result_path().with_suffix(f".{side}.trace.json.gz"))
    kinds = {"kinds": ("cpu_op",)} if is_tiny() else {}  # a pretended GPU has no kernels
    mfu = [step["mfu"] for step in timed]
    return {
        "losses": [step["loss"] for step in rounds[0].steps],
        "tokens_per_second": _spread([step["tokens_per_second"] for step in timed]),
        "mfu": None if None in mfu else _spread(mfu),
        "reserved_bytes": rounds[0].steps[-1]["reserved_memory_bytes"],
        "kernels": kernel_table(trace, **kinds),
    }


def _spread(values: list[float]) -> list[float]:
    """Return the smallest, the median and the largest."""
    return [min(values), median(values), max(values)]


def _different_losses(runs: dict[str, list[Run]]) -> list[str]:
    """Return problems: rounds must agree to the bit, and compiled with eager within a tolerance."""
    problems = []
    losses = {side: [[s["loss"] for s in run.steps] for run in rs] for side, rs in runs.items()}
    for side, (first, *others) in losses.items():
        if any(other != first for other in others):
            problems.append(f"{side}: another round has other losses")
        pairs = zip(first, losses["eager"][0], strict=True)
        if not (apart := max(abs(a / b - 1) for a, b in pairs)) <= _TOLERANCE:
            problems.append(f"{side}: losses are {apart:.1e} from the eager ones")
    return problems


rows_of_4096, rows_of_8192 = partial(_measure, 4096, 1), partial(_measure, 8192, 2)
