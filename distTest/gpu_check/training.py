"""Whole runs on the GPU: losses of the CPU, resumes, saves in the background, compiled layers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from itertools import product
from statistics import median
from typing import Any

from distTest.gpu_check.checks import Outcome, Skipped, is_tiny, require
from distTest.gpu_check.packing import FAMILIES, TINY
from distTest.gpu_check.runs import Run, save_model, train, write_chats, write_text
from distTest.workloads.shapes import shape_of

_AT_ONCE = 2  # runs: most of their time is that of one core
# Of losses, relative: sums in another order, and roundings of bfloat16, which send tokens to other
# experts.
_TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}


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
    """The losses of a dense model and one with experts, against the CPU's."""
    length = 128 if is_tiny() else 512
    settings = {name: _settings(name, length, "train.max_steps=8") for name in FAMILIES}
    pairs = list(product(FAMILIES, _TOLERANCE))
    if is_tiny():  # a run takes the seconds of its imports
        pairs = pairs[::3]
    cases = [(*pair, device) for pair in pairs for device in ("cuda", "cpu")]

    def run(family: str, dtype: str, device: str) -> list[float]:
        more = [f"model.compute_dtype={dtype}", "optimizer.lr=3e-3"]
        name = f"{family}-{dtype}-{device}"
        done = train(name, *settings[family], *more, on_cpu=device == "cpu")
        return [step["loss"] for step in done.steps]

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = dict(zip(cases, pool.map(lambda case: run(*case), cases), strict=True))
    problems, figures, texts = list[str](), dict[str, Any](), []
    for family, dtype in pairs:
        tolerance = _TOLERANCE[dtype]
        here, there = (found[family, dtype, device] for device in ("cuda", "cpu"))
        name = f"{family} in {dtype}"
        apart = max(abs(a / b - 1) for a, b in zip(here, there, strict=True))
        moved = abs(there[-1] / there[0] - 1)
        figures[name] = {"cuda": here, "cpu": there, "apart": apart, "moved": moved}
        texts.append(f"{apart:.1e} ({name})")
        if not apart <= tolerance:
            problems.append(f"{name}: losses differ by {apart:.1e}")
        if moved < 5 * tolerance:
            problems.append(f"{name}: the loss moved by {moved:.1e} only, which shows nothing")
    return require(problems, f"losses of GPU and CPU differ by {', '.join(texts)}", figures)


def resume() -> Outcome:
    """A run that is repeated, and one that is stopped and resumed, to the last bit."""
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


def _bits(run: Run) -> list[tuple[str, str]]:
    return [(step["loss"].hex(), step["grad_norm"].hex()) for step in run.steps]


def async_save() -> Outcome:
    """A checkpoint is written while steps go on."""
    every, length = (8, 32) if is_tiny() else (40, 4096)
    sizes, key_heads = ((128, 128, 1, 4), 2) if is_tiny() else ((2048, 6144, 12, 16), 8)
    more = {"vocab_size": 65536, "max_position_embeddings": 2 * length}
    shape = shape_of(*sizes, more | {"num_key_value_heads": key_heads})
    run = train(
        "saves",
        f"model.path={save_model('model', 'llama', shape)}",
        "model.init=random",
        f"data.train={write_text(16, length)}",
        f"data.max_length={length}",
        "data.overflow=split",
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


def compiled_layers() -> Outcome:
    """Compiled layers have the losses of those that are not; how much faster are they?"""
    if find_spec("triton") is None:
        raise Skipped("needs the package triton")
    settings = _settings("llama", 2048, "train.max_steps=6", "model.compute_dtype=bfloat16")
    run = partial(train, *("eager", *settings))
    eager, compiled = run(), train("compiled", *settings, "model.compile=true")
    pairs = zip(eager.steps, compiled.steps, strict=True)
    apart = max(abs(a["loss"] / b["loss"] - 1) for a, b in pairs)
    speed = [median(step["seconds"] for step in r.steps[3:]) for r in (eager, compiled)]
    figures = {"apart": apart, "eager_s": speed[0], "compiled_s": speed[1]}
    summary = (
        f"losses differ by {apart:.1e}; a step takes {speed[1] / speed[0]:.2f} x the eager one"
    )
    limit = _TOLERANCE["bfloat16"]
    return require([] if apart <= limit else [f"over {limit:.0e}"], summary, figures)
