"""Check whole runs: losses against a CPU, resumes, saves beside steps, two GPUs against one."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from statistics import median
from typing import Any

import torch

from distTest.gpu_check.checks import Outcome, Skipped, is_tiny, require
from distTest.gpu_check.packing import FAMILIES, TINY
from distTest.gpu_check.runs import Run, save_model, train, write_chats, write_rows
from distTest.workloads.shapes import shape_of

# Runs at the same time: each mostly takes one core.
_AT_ONCE = max(2, min(8, len(os.sched_getaffinity(0)) // 2))
# Relative, of losses: sums have another order, and bfloat16 sends some tokens to other experts.
_TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}
_FAST = "optimizer.lr=3e-3"  # a high rate moves losses far enough to compare


def _settings(family: str, length: int, *more: str) -> list[str]:
    """Return the assignments of a run of a small model, in rows of `length` tokens."""
    model = save_model(family, family, FAMILIES[family] | (TINY if is_tiny() else {}))
    return [
        f"model.path={model}",
        "model.init=random",
        f"data.train={write_chats(8, length)}",
        f"data.max_length={length}",
        "train.epochs=99",
        "train.gradient_accumulation_steps=2",
        "scheduler.name=constant",
        "scheduler.warmup_ratio=0",
        *more,
    ]


def losses() -> Outcome:
    """Compare losses of a dense model and one with experts with the CPU's."""
    length = 128 if is_tiny() else 512
    settings = {name: _settings(name, length, "train.max_steps=8") for name in FAMILIES}
    pairs = list(product(FAMILIES, _TOLERANCE))
    if is_tiny():  # each run takes seconds for its imports, so fewer are tried
        pairs = pairs[::3]
    cases = [(*pair, device) for pair in pairs for device in ("cuda", "cpu")]

    def run(family: str, dtype: str, device: str) -> list[float]:
        more = [f"model.compute_dtype={dtype}", _FAST]
        name = f"{family}-{dtype}-{device}"
        return _losses(train(name, *settings[family], *more, on_cpu=device == "cpu"))

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        by_case = dict(zip(cases, pool.map(lambda case: run(*case), cases), strict=True))
    compared = _Compared()
    for family, dtype in pairs:
        here, there = (by_case[family, dtype, device] for device in ("cuda", "cpu"))
        compared.add(f"{family} in {dtype}", dtype, {"cuda": here, "cpu": there})
    return compared.outcome("losses of GPU and CPU")


def two_gpus() -> Outcome:
    """Compare losses of each mesh of two GPUs with the losses of one."""
    if torch.cuda.device_count() < 2:
        raise Skipped(f"needs 2 GPUs, and PyTorch sees {torch.cuda.device_count()}")
    settings = _settings("glm4_moe", 128 if is_tiny() else 512, "train.max_steps=6", _FAST)
    compared = _Compared()
    for dtype in ["float32"] if is_tiny() else _TOLERANCE:
        given = [*settings, f"model.compute_dtype={dtype}"]
        one = _losses(train(f"one-{dtype}", *given))
        for key, accumulation in {"expert": 1, "replicate": 1, "stages": 2, "tensor": 2}.items():
            # Two data ranks take two micro-batches at once, others take them in turn.
            mesh = f"parallel.{key}=2"
            more = [mesh, f"train.gradient_accumulation_steps={accumulation}"]
            two = _losses(train(f"{key}-{dtype}", *given, *more, ranks=2))
            compared.add(f"{mesh} in {dtype}", dtype, {"two GPUs": two, "one GPU": one})
    return compared.outcome("losses of two GPUs and one")


def _losses(run: Run) -> list[float]:
    return [step["loss"] for step in run.steps]


class _Compared:
    """Compares losses of pairs of runs, which must agree and move by more than they may differ."""

    def __init__(self) -> None:
        self._problems, self._texts = list[str](), list[str]()
        self._figures = dict[str, Any]()

    def add(self, name: str, dtype: str, losses: dict[str, list[float]]) -> None:
        """Compare the first losses, of a run, with the second, of its reference."""
        (here, there), tolerance = losses.values(), _TOLERANCE[dtype]
        apart = max(abs(a / b - 1) for a, b in zip(here, there, strict=True))
        moved = abs(there[-1] / there[0] - 1)
        self._figures[name] = {**losses, "apart": apart, "moved": moved}
        self._texts.append(f"{apart:.1e} ({name})")
        if not apart <= tolerance:
            self._problems.append(f"{name}: losses differ by {apart:.1e}")
        if moved < 5 * tolerance:
            self._problems.append(f"{name}: the loss moved by {moved:.1e}, which shows nothing")

    def outcome(self, what: str) -> Outcome:
        text = f"{what} differ by {', '.join(self._texts)}"
        return require(self._problems, text, self._figures)


def resume() -> Outcome:
    """Compare a repeated run, and one that stops and resumes, to the last bit."""
    length = 128 if is_tiny() else 1024
    settings = _settings("glm4_moe", length, "export.final=false", "optimizer.lr=1e-3")
    whole = [*settings, "train.max_steps=4"]
    once = train("once", *whole, saves=True)
    again = train("again", *whole, saves=True)
    train("halves", *settings, "train.max_steps=2", saves=True)
    resumed = train("halves", *whole, saves=True)
    expected, repeated, halves = (_bits(run) for run in (once, again, resumed))
    problems = []
    if repeated != expected:
        problems.append("the same run has other losses or norms the second time")
    if halves != expected:
        problems.append("the resumed run has other losses or norms")
    if not any(line.startswith("Resumed from checkpoint_0000002") for _, line in resumed.lines):
        problems.append("the second half did not resume")
    figures = {"once": expected, "again": repeated, "resumed": halves}
    summary = "4 steps, repeated and resumed after 2: losses and norms equal to the last bit"
    return require(problems, "see the figures" if problems else summary, figures)


def offload() -> Outcome:
    """Compare a run with layers' inputs and states in host memory with a run without."""
    length = 128 if is_tiny() else 4096
    more = ["model.compute_dtype=bfloat16", "optimizer.lr=1e-3", "train.max_steps=6"]
    settings = _settings("glm4_moe", length, *more)
    kept = train("kept", *settings, "model.activation_checkpointing=full")
    ways = ["model.activation_checkpointing=offload", "optimizer.offload=true"]
    offloaded = train("offloaded", *settings, *ways)
    here, there = _bits(offloaded), _bits(kept)
    problems = []
    if here != there:
        problems.append("the run with offload has other losses or norms")
    for part in ("Host memory: ", "Activation checkpointing: full, with the layers' inputs in "):
        if not any(line.startswith(part) for _, line in offloaded.lines):
            problems.append(f"the run does not say {part!r}")
    summary = "6 steps with and without offload: losses and norms equal to the last bit"
    text = "see the figures" if problems else summary
    return require(problems, text, {"kept": there, "offloaded": here})


def _bits(run: Run) -> list[tuple[str, str]]:
    return [(step["loss"].hex(), step["grad_norm"].hex()) for step in run.steps]


def async_save() -> Outcome:
    """Check that steps go on while a checkpoint is written."""
    every, length = (8, 32) if is_tiny() else (40, 4096)
    sizes, key_heads = ((128, 128, 1, 4), 2) if is_tiny() else ((2048, 6144, 12, 16), 8)
    more = {"vocab_size": 65536, "max_position_embeddings": 2 * length}
    shape = shape_of(*sizes, more | {"num_key_value_heads": key_heads})
    run = train(
        "saves",
        f"model.path={save_model('model', 'llama', shape)}",
        "model.init=random",
        f"data.train={write_rows(16, length)}",
        f"data.max_length={length}",
        "data.overflow=truncate",
        "train.epochs=9999",
        f"train.max_steps={2 * every}",
        f"checkpoint.every_steps={every}",
        "checkpoint.mode=async",
        "checkpoint.keep=1",
        "export.final=false",
        saves=True,
    )
    number = every + 1
    began, ended = run.time_of(f"Step {every}/"), run.time_of(f"Saved checkpoint_{every:07d}")
    steps = [run.time_of(f"Step {n}/") for n in range(number, 2 * every + 1)]
    meanwhile = sum(at < ended for at in steps)
    seconds = [step["seconds"] for step in run.steps]
    usual = median(seconds[every // 2 : every])
    files = (run.directory / "checkpoints").glob("*/rank_*.safetensors")
    figures = {
        "bytes": sum(file.stat().st_size for file in files),
        "seconds": ended - began,
        "loop_waited_s": max(0.0, steps[0] - began - seconds[every]),
        "steps_meanwhile": meanwhile,
        "step_s": usual,
        "step_while_saving_s": median(seconds[every : every + meanwhile]) if meanwhile else None,
    }
    summary = (
        f"{figures['bytes'] / 1e9:.2f} GB were durable after {figures['seconds']:.2f} s; the loop "
        f"waited {figures['loop_waited_s']:.2f} s and took {meanwhile} steps meanwhile"
    )
    problems = []
    if figures["loop_waited_s"] > 0.5 * figures["seconds"]:
        problems.append("the loop waited for more than half of the save")
    if not meanwhile and not is_tiny():  # a step of a pretended GPU takes as long as the disk
        problems.append("no step ended while the checkpoint was written")
    return require(problems, summary, figures)
