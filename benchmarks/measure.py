"""Shared by all benchmarks: pinned runs of either side, their measurements, and the gate before
any figure.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
FAILED: list[str] = []  # one reason for each measurement of this process that failed
# A loss must change by so many tolerances: a side that stays within one tolerance has then made the
# same updates.
_MOVES = 10
# Matmul rates around two runs that differ by more, relative, mean that they did not have the same
# core.
STEADY = 0.1
# Of losses, relative. Float32 sides differ by 1e-6. Bfloat16 sides differ by 9e-4: some keep
# float32 between layers.
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-3}
# Lines of output with figures in JSON behind them.
PROFILE_LABEL = "Seconds of a step by operation: "
CPU_LABEL = "CPU seconds of the process until the end of each step: "
# Moves the loss by 15% in two updates, in bfloat16 too, in which smaller updates round away.
LR = 3e-4


class Unequal(Exception):
    """Two sides did not do the same work; the message says what differs."""


def settings(
    options: argparse.Namespace, chats: Path, dtype: str, model: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the same run for either side: assignments of shardtune, and flags of peers.py."""
    ours = {
        "model.path": model.resolve(),
        "model.compute_dtype": dtype,
        "data.train": chats.resolve(),
        "data.max_length": options.max_length,
        "data.overflow": "error",
        "train.epochs": options.steps,
        "optimizer.lr": LR,
    }
    peer_flags = {
        "model": model.resolve(),
        "data": chats.resolve(),
        "dtype": dtype,
        "max-length": options.max_length,
        "steps": options.steps,
        "lr": LR,
    }
    return ours, peer_flags


# With changes to these files, the results are not those of a commit.
_SOURCES = ("*.py", "requirements.txt", "benchmarks/requirements-peers.txt")


def commit() -> str:
    """Return the commit of this tree, with `-dirty` where its code was changed since."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(REPOSITORY), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "-uno", "--", *_SOURCES)
    return git("describe", "--always") + ("-dirty" if changed else "")


@dataclass
class Side:
    """One run: the `seconds` of its steps from the second one on; counts are those of one step
    over all ranks.
    """

    losses: list[float]
    seconds: list[float]
    memory_bytes: int  # the largest of any rank
    tokens: int  # real ones
    trained_tokens: int
    computed_tokens: int  # padding included
    head_rows: int | None = None  # where they were counted
    attention: str = ""
    mfu: list[float] | None = None  # of the same steps as `seconds`, where the run itself says it
    # The part of these seconds for which the rank that waited most waited for its batches.
    data_share: float | None = None
    cpu_seconds: list[float] = field(default_factory=list)  # of the process, in these steps


def require_equal_work(side: Side, reference: Side, tolerance: float) -> None:
    """The gate: the same tokens, the same trained ones, and the same loss at every step.

    Raises:
        Unequal: not so, or one of them has taken no step that could be compared.
    """
    for name in ("tokens", "trained_tokens"):
        count, expected = getattr(side, name), getattr(reference, name)
        if count != expected:
            raise Unequal(f"{name} of a step are {count} and {expected}")
    require_equal_losses(side.losses, reference.losses, tolerance)


def require_equal_losses(
    losses: Sequence[float], reference: Sequence[float], tolerance: float
) -> None:
    """Raises Unequal where a step's losses differ, or there are none."""
    if len(losses) != len(reference) or not losses:
        raise Unequal(f"{len(losses)} and {len(reference)} steps have a loss")
    for step, (loss, expected) in enumerate(zip(losses, reference, strict=True), start=1):
        if not abs(loss - expected) <= tolerance * abs(expected):
            raise Unequal(f"the loss of step {step} is {loss:.6f} and {expected:.6f}")


def describe_count(rounds: int, steps: int) -> str:
    """Say how many figures each median has; `steps` are those that count."""
    turns = "" if rounds > 1 else ", one round only, so that no side had its turn twice"
    return (
        f"Medians (smallest to largest) of {rounds * steps} figures a side: {rounds} x "
        f"{steps} steps{turns}."
    )


def describe_losses(dtype: str, rows: dict[str, dict[str, Any]], reference: str) -> str:
    """Say how near the losses are to the reference's, and how far the reference's moved."""
    expected = rows[reference]["losses"]
    furthest = max(
        abs(a - b) / abs(b)
        for row in rows.values()
        for a, b in zip(row["losses"], expected, strict=True)
    )
    return (
        f"At every step the losses of all sides are within {TOLERANCE[dtype]:.2%} of the "
        f"reference's, relative to it "
        f"(the furthest is {furthest:.4%} away), which goes from {expected[0]:.4f} to "
        f"{expected[-1]:.4f}."
    )


def require_moving_loss(side: Side, tolerance: float) -> None:
    """Raises Unequal where the first and the last loss of a run are so near that equal losses
    would say nothing.
    """
    first, last = side.losses[0], side.losses[-1]
    if not abs(first - last) > _MOVES * tolerance * abs(first):
        raise Unequal(
            f"the loss goes from {first:.4f} to {last:.4f} only, less than {_MOVES} tolerances"
        )


def gated(
    runs: dict[str, list[Side]], reference: str, tolerance: float
) -> tuple[dict[str, list[Side]], dict[str, str]]:
    """Return the sides whose every run did the reference's work, and why the others did not.

    Where the reference's loss moves too little to tell, no side passes.
    """
    equal: dict[str, list[Side]] = {}
    refused: dict[str, str] = {}
    try:
        for side in runs.get(reference, []):
            require_moving_loss(side, tolerance)
    except Unequal as difference:
        return {}, dict.fromkeys(runs, str(difference))
    for name, sides in runs.items():
        if missing := next((each for each in (name, reference) if not runs.get(each)), None):
            refused[name] = f"{missing} did not run to its end"
            continue
        try:
            for side in sides:
                require_equal_work(side, runs[reference][0], tolerance)
            equal[name] = sides
        except Unequal as difference:
            refused[name] = str(difference)
    return equal, refused


def in_turns(sides: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Yield the round and the side of each run, rotated so that no side always follows the same
    other one.
    """
    for turn in range(rounds):
        first = turn % len(sides)
        yield from ((turn, side) for side in (*sides[first:], *sides[:first]))


def spread(values: Sequence[float]) -> str:
    """Format median, smallest and largest, with three digits or more."""
    three = (median(values), min(values), max(values))
    middle, low, high = (f"{value:.0f}" if value >= 100 else f"{value:.3g}" for value in three)
    return f"{middle} ({low} to {high})"


def run_pinned(
    command: Sequence[str | Path], cores: Sequence[int] | None, log: Path, timeout_s: float
) -> bool:
    """Run a command on these cores, one thread a process, its output in `log`; return whether it
    ended well.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),  # of train_fsdp
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }

    def pin() -> None:
        if cores is not None:
            os.sched_setaffinity(0, cores)

    started = time.monotonic()
    with log.open("w", encoding="utf-8") as stream:
        try:
            done = subprocess.run(
                list(map(str, command)),
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=environment,
                preexec_fn=pin,
                cwd=REPOSITORY,
                timeout=timeout_s,
                check=False,
            )
            code: Any = done.returncode
        except subprocess.TimeoutExpired:
            code = f"after {timeout_s} s without an end"
    print(
        f"  {log.stem}: {time.monotonic() - started:.0f} s"
        + (f", exit {code}, see {log}" if code else ""),
        flush=True,
    )
    if code:
        FAILED.append(f"{log.stem} ended with {code}, see {log}")
    return code == 0


def launch(script: Sequence[str | Path], python: Path | str, ranks: int) -> list[str | Path]:
    """Return the command for one process, or for several under torchrun."""
    if ranks == 1:
        return [python, *script]
    return [
        python,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={ranks}",
        *script,
    ]


def run_ours(
    name: str,
    folder: Path,
    assignments: dict[str, Any],
    *,
    ranks: int = 1,
    cores: Sequence[int] | None = None,
    timeout_s: float = 3600,
    script: Sequence[str | Path] = (REPOSITORY / "train_fsdp.py",),
) -> Side | None:
    """Run train_fsdp.py as users do, every step on all of the data; return None where it failed."""
    run_dir = folder / name
    settings = {
        "run.dir": run_dir,
        "run.resume": "never",
        "train.micro_batch_size": 1,
        "train.gradient_accumulation_steps": 1 << 16,
        "scheduler.name": "constant",
        "scheduler.warmup_ratio": 0,
        "checkpoint.every_steps": 0,
        "checkpoint.mode": "sync",
        "export.final": "false",
        **assignments,
    }
    empty = folder / "empty.yaml"
    empty.touch()
    command: list[str | Path] = [*script, "--config", empty]
    command += [f"{key}={value}" for key, value in settings.items()]
    is_done = run_pinned(
        launch(command, sys.executable, ranks), cores, folder / f"{name}.log", timeout_s
    )
    return read_ours(run_dir, folder / f"{name}.log") if is_done else None


def read_ours(run_dir: Path, log: Path) -> Side:
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [entry for entry in map(json.loads, lines) if entry["kind"] == "step"]
    tokens, trained = ({step[key] for step in steps} for key in ("tokens", "trained_tokens"))
    assert len(tokens) == len(trained) == 1, "a step is the whole of the data"
    count, trained_count = tokens.pop(), trained.pop()
    log_lines = log.read_text(encoding="utf-8").splitlines()
    attention = next(
        line.removeprefix("Attention: ") for line in log_lines if line.startswith("Attention: ")
    )
    mfu = [step["mfu"] for step in steps[1:]]
    ends = next((line for line in log_lines if line.startswith(CPU_LABEL)), None)
    waited, took = (sum(step[key] for step in steps[1:]) for key in ("data_seconds", "seconds"))
    # Packed rows are flattened, so nothing is padded.
    return Side(
        losses=[step["loss"] for step in steps],
        seconds=[step["seconds"] for step in steps[1:]],
        memory_bytes=max(step["memory_bytes"] for step in steps),
        tokens=count,
        trained_tokens=trained_count,
        computed_tokens=count,
        attention=attention,
        mfu=None if None in mfu else mfu,
        data_share=waited / took if took else None,
        cpu_seconds=differences(json.loads(ends.removeprefix(CPU_LABEL))) if ends else [],
    )


def differences(ends: Sequence[float]) -> list[float]:
    """Return how long each step took, of all but the first."""
    return [end - start for start, end in pairwise(ends)]


def run_peer(
    side: str,
    name: str,
    folder: Path,
    python: Path,
    options: dict[str, Any],
    *,
    ranks: int = 1,
    cores: Sequence[int] | None = None,
    timeout_s: float = 3600,
) -> Side | None:
    """Run peers.py once in its own environment; return None where it failed."""
    out = folder / f"{name}.json"
    flags = [
        part
        for key, value in options.items()
        for part in ([f"--{key}"] if value is True else [f"--{key}", value])
    ]
    script = ["-m", "benchmarks.peers", "--side", side, "--out", out, *flags]
    if not run_pinned(launch(script, python, ranks), cores, folder / f"{name}.log", timeout_s):
        return None
    return Side(**json.loads(out.read_text(encoding="utf-8")))
