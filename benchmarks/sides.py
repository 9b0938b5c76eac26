"""Run shardtune or a peer, and refuse figures unless both did the same work."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from distTest.workloads.script import REPOSITORY, environment, launch, train_command
from distTest.workloads.wrapped import CPU_LABEL
from shardtune.report.read_run import RunRecord, read_run

FAILED: list[str] = []  # one reason for each measurement of this process that failed
# A loss must change by this many tolerances, so that near losses show equal updates.
_MOVES = 10
# Relative, of losses. In float32 sides differ by 1e-6, in bfloat16 by 9e-4: some keep float32
# between layers.
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-3}
# Moves the loss by 15% in two updates, in bfloat16 too, in which smaller updates round away.
LR = 3e-4
_TIMEOUT_S = 3600  # the limit of one run
NAMES = {
    "ours": "shardtune",
    "trl_packed": "TRL, packed (bfd)",
    "hf_trainer": "HF Trainer (batches of 1, no padding)",
    "transformers_fsdp": "transformers' distributed_config (HF Trainer)",
}


@dataclass
class Side:
    """The figures of one run. Counts are of one step on all ranks."""

    losses: list[float]
    seconds: list[float]  # each step but the first, which also sets things up
    memory_bytes: int  # the largest of any rank
    tokens: int  # real ones
    trained_tokens: int
    cpu_seconds: list[float] = field(default_factory=list)  # of CPU time in these steps


def unequal_work(side: Side, reference: Side, tolerance: float) -> str:
    """Say how tokens, trained tokens or losses differ from the reference's, if they do."""
    for name in ("tokens", "trained_tokens"):
        count, expected = getattr(side, name), getattr(reference, name)
        if count != expected:
            return f"{name} of a step are {count} and {expected}"
    if len(side.losses) != len(reference.losses) or not side.losses:
        return f"{len(side.losses)} and {len(reference.losses)} steps have a loss"
    for step, (loss, expected) in enumerate(zip(side.losses, reference.losses, strict=True), 1):
        if not abs(loss - expected) <= tolerance * abs(expected):
            return f"the loss of step {step} is {loss:.6f} and {expected:.6f}"
    return ""


def still_loss(side: Side, tolerance: float) -> str:
    """Say if a run's loss moves so little that equal losses would show nothing."""
    first, last = side.losses[0], side.losses[-1]
    if abs(first - last) > _MOVES * tolerance * abs(first):
        return ""
    return f"the loss goes from {first:.4f} to {last:.4f} only, less than {_MOVES} tolerances"


def refusals(runs: dict[str, list[Side]], reference: str, tolerance: float) -> dict[str, str]:
    """Return why sides have no figure: all sides, if the reference's loss moves too little."""
    expected, reasons = runs.get(reference, []), dict[str, str]()
    still = [still_loss(side, tolerance) for side in expected]
    for name, sides in runs.items():
        problems = still
        if not (sides and expected):
            problems = [*still, f"{reference if sides else name} did not run to its end"]
        elif not any(still):
            problems = [unequal_work(side, expected[0], tolerance) for side in sides]
        if any(problems):
            reasons[name] = next(filter(None, problems))
    return reasons


def counted(runs: dict[str, list[Side]], reference: str, dtype: str) -> dict[str, list[Side]]:
    """Return the sides whose runs all did the reference's work; note in FAILED why others not."""
    reasons = refusals(runs, reference, TOLERANCE[dtype])
    FAILED.extend(f"no figure for {NAMES.get(name, name)}: {why}" for name, why in reasons.items())
    return {name: sides for name, sides in runs.items() if name not in reasons}


def in_turns(sides: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Yield the round and the side of each run; each round begins with another side."""
    for turn in range(rounds):
        first = turn % len(sides)
        yield from ((turn, side) for side in (*sides[first:], *sides[:first]))


def run_pinned(command: Sequence[Any], log: Path, cores: Sequence[int] | None = None) -> bool:
    """Run a command on these cores, one thread a process, with output in `log`; return success."""
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as stream:
        try:
            done = subprocess.run(
                list(map(str, command)),
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=environment(),
                preexec_fn=partial(os.sched_setaffinity, 0, cores) if cores else None,
                cwd=REPOSITORY,
                timeout=_TIMEOUT_S,
                check=False,
            )
            code: Any = done.returncode
        except subprocess.TimeoutExpired:
            code = f"after {_TIMEOUT_S} s without an end"
    took = f"  {log.stem}: {time.monotonic() - started:.0f} s"
    print(took + (f", exit {code}, see {log}" if code else ""), flush=True)
    if code:
        FAILED.append(f"{log.stem} ended with {code}, see {log}")
    return code == 0


@dataclass(frozen=True)
class Job:
    """The same training for either side: all of the chats are one optimizer step."""

    model: Path
    chats: Path
    max_length: int
    steps: int
    dtype: str  # forward and backward
    lr: float = LR

    def settings(self) -> dict[str, Any]:
        """Return the assignments of shardtune, without the run's directory."""
        return {
            "model.path": self.model,
            "model.compute_dtype": self.dtype,
            "model.compile": "false",
            "data.train": self.chats,
            "data.max_length": self.max_length,
            "data.overflow": "error",
            "train.epochs": self.steps,
            "train.micro_batch_size": 1,
            "train.gradient_accumulation_steps": 1 << 16,
            "optimizer.lr": self.lr,
            "scheduler.name": "constant",
            "scheduler.warmup_ratio": 0,
            "checkpoint.every_steps": 0,
            "checkpoint.mode": "sync",
        }

    def run(
        self,
        side: str,
        run: Path,
        python: Path | str,
        *,
        more: Mapping[str, Any] | None = None,
        ways: str | None = None,
        launcher: Sequence[str] = (),
        cores: Sequence[int] | None = None,
    ) -> Side | None:
        """Run shardtune, or peers.py in the peers' environment; return None if it failed.

        `run`: the path of the run's files, without suffixes. `more`, `ways`: assignments and ways
        of shardtune alone. `launcher`: the beginning of a command that runs another one.
        """
        log, out = Path(f"{run}.log"), Path(f"{run}.json")
        if side == "ours":
            place = {"run.dir": run, "run.resume": "never", "export.final": False}
            command = train_command(place | self.settings() | dict(more or {}), ways=ways)
        else:
            options = json.dumps(asdict(self) | {"side": side}, default=str)
            command = launch(["-m", "benchmarks.peers", options, out], 1, python)
        if not run_pinned([*launcher, *command], log, cores):
            return None
        if side != "ours":
            return Side(**json.loads(out.read_text(encoding="utf-8")))
        shutil.rmtree(run / "checkpoints", ignore_errors=True)
        return side_of(read_run(run))


def side_of(record: RunRecord) -> Side:
    steps = record.of_kind("step")
    ((tokens, trained),) = {(step["tokens"], step["trained_tokens"]) for step in steps}
    log = Path(f"{record.path}.log").read_text(encoding="utf-8").splitlines()
    ends = (line.removeprefix(CPU_LABEL) for line in log if line.startswith(CPU_LABEL))
    return Side(
        losses=[step["loss"] for step in steps],
        seconds=[step["seconds"] for step in steps[1:]],
        memory_bytes=max(step["memory_bytes"] for step in steps),
        tokens=tokens,
        trained_tokens=trained,
        cpu_seconds=[end - start for start, end in pairwise(json.loads(next(ends, "[]")))],
    )


def table(header: str, rows: Sequence[str]) -> list[str]:
    """Return the lines of a table, and an empty line."""
    return [header, "|---" * (header.count("|") - 1) + "|", *rows, ""]


def spread(values: Sequence[float]) -> str:
    """Format median, smallest and largest, with three digits or more."""
    three = (median(values), min(values), max(values))
    middle, low, high = (f"{value:.0f}" if value >= 100 else f"{value:.3g}" for value in three)
    return f"{middle} ({low} to {high})"


def describe_losses(dtype: str, losses: Mapping[str, Sequence[float]], reference: str) -> str:
    """Say how near the losses are to the reference's, and how far the reference's moved."""
    expected = losses[reference]
    furthest = max(
        abs(a - b) / abs(b)
        for of_side in losses.values()
        for a, b in zip(of_side, expected, strict=True)
    )
    return (
        f"At every step the losses of all sides are within {TOLERANCE[dtype]:.2%} of the "
        f"reference's, relative to it "
        f"(the furthest is {furthest:.4%} away), which goes from {expected[0]:.4f} to "
        f"{expected[-1]:.4f}."
    )
