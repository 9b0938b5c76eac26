"""The numbers of each step: gathered from all ranks, logged as a line, kept in `metrics.jsonl`."""

from __future__ import annotations

import datetime
import json
import math
import os
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from shardtune.checkpoint import durable_fs
from shardtune.config import Config
from shardtune.data.schedule import Schedule, Step
from shardtune.distributed.progress import Phase
from shardtune.distributed.world import World
from shardtune.log import logger
from shardtune.model.build import compute_dtype
from shardtune.model.flops import MfuMeter


class StepStats(NamedTuple):
    """The numbers of a step that all ranks have."""

    loss: float  # nats per trained token
    grad_norm: float  # of the whole model, before clipping
    must_stop: bool  # a signal asked some rank to stop
    peak_memory_bytes: int  # of the rank with the most; step 1 lacks the optimizer's state
    data_seconds: float  # of the rank that waited longest for its batches
    straggler_seconds: list[list[float]]  # [rank][phase], see Stragglers; empty in most steps


def all_gather_step_stats(
    nll_sum: torch.Tensor,
    squared_grad_norm: torch.Tensor,
    trained_tokens: int,
    must_stop: bool,
    straggler_seconds: Sequence[float],
    world: World,
) -> StepStats:
    """Gather this rank's numbers of a step from all ranks. Collective.

    The host waits for the device here, and nowhere else in a step.

    nll_sum, squared_grad_norm: float64 scalars on the device.
    trained_tokens: of the global batch.
    """
    per_rank = world.all_gather_scalars(
        nll_sum,
        squared_grad_norm,
        must_stop,
        peak_memory_bytes(world.device),
        world.progress.seconds_in(Phase.DATA),
        *straggler_seconds,
    )
    nll_sums, squared_norms, stops, memory, data, *phases = per_rank.unbind(dim=1)
    reduced = torch.stack(
        [
            nll_sums.sum() / max(1, trained_tokens),
            # Each replica has all gradients.
            (squared_norms.sum() / world.replicas).sqrt(),
            stops.amax(),
            memory.amax(),
            data.amax(),
        ]
    )
    loss, grad_norm, any_stop, peak, waited, *seconds = torch.cat([reduced, *phases]).tolist()
    by_rank = np.reshape(seconds, (-1, world.size)).T.tolist() if seconds else []
    return StepStats(loss, grad_norm, any_stop > 0, int(peak), waited, by_rank)


class Metrics:
    """`metrics.jsonl` of the run, written by rank 0.

    Opening it after a resume drops the lines of later steps. Lines that cannot be written, as on a
    full disk, wait in memory for the next one.
    """

    def __init__(self, path: Path, world: World, resumed_step: int | None) -> None:
        self._file: IO[bytes] | None = None
        self._lock = threading.Lock()
        self._unwritten, self._has_warned = b"", False
        if not world.is_main:
            return
        kept = _lines_up_to(path, resumed_step) if resumed_step is not None else []
        temporary = path.with_suffix(".tmp")
        self._file = temporary.open("wb", buffering=0)
        self._append(b"".join(kept))
        self.sync()
        temporary.replace(path)
        durable_fs.sync_directory(path.parent)

    def write(self, kind: str, **values: Any) -> None:
        """Append an object of this kind, with the time; None stands for NaN and infinity."""
        if self._file is None:
            return
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        entry = {"kind": kind, **values, "time": now}
        line = json.dumps({key: _finite(value) for key, value in entry.items()}) + "\n"
        try:
            self._append(line.encode())
        except OSError as error:
            if not self._has_warned:
                logger.info(
                    f"metrics.jsonl cannot be written now ({error.strerror}): "
                    "its lines wait in memory"
                )
            self._has_warned = True

    def sync(self) -> None:
        """Bring the lines to the disk, before a checkpoint of their steps.

        Raises:
            OSError: the disk does not take them.
        """
        if self._file is not None:
            self._append(b"")
            os.fsync(self._file.fileno())

    def _append(self, lines: bytes) -> None:
        assert self._file is not None
        with self._lock:
            self._unwritten += lines
            while self._unwritten:  # a write may be short
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]


def _finite(value: Any) -> Any:
    """Return `value`, or None for a float that JSON cannot hold."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _lines_up_to(path: Path, step: int) -> list[bytes]:
    """Return the lines of steps up to `step`, without those that a crash cut short or garbled."""
    kept: list[bytes] = []
    for line in path.read_bytes().splitlines(keepends=True) if path.is_file() else ():
        try:
            is_kept = line.endswith(b"\n") and json.loads(line)["step"] <= step
        except (ValueError, TypeError, KeyError):
            continue
        if is_kept:
            kept.append(line)
    return kept


def logged_kinds(path: Path, step: int) -> set[str]:
    """Return the kinds of the objects that `metrics.jsonl` holds of this step."""
    entries = map(json.loads, _lines_up_to(path, step))
    return {entry.get("kind") for entry in entries if entry["step"] == step}


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory that this rank has held so far: of its GPU, or of its process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Not ru_maxrss, which a process inherits from the one that started it.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) * 1024


class StepLog:
    """Write each step to `metrics.jsonl`; log a line every `logging.every_steps` and at the end.

    A line has the mean speed since the line before it. Making one is collective.
    """

    def __init__(
        self,
        metrics: Metrics,
        model: PreTrainedModel,
        schedule: Schedule,
        config: Config,
        world: World,
    ) -> None:
        self._metrics, self._schedule = metrics, schedule
        self._every_steps = config.logging.every_steps
        self._mfu = MfuMeter(model, compute_dtype(config.model.compute_dtype, world.device), world)
        self._started = time.perf_counter()
        self._clear_sums()

    def start_clock(self) -> None:
        """Let the seconds of the next step begin now."""
        self._started = time.perf_counter()

    def step_ended(self, step: Step, stats: StepStats, lr: float) -> None:
        seconds = time.perf_counter() - self._started
        mfu = self._mfu.per_step(step.lengths, step.trained_tokens, seconds)
        self._metrics.write(
            "step",
            step=step.number,
            epoch=step.epoch,
            loss=stats.loss,
            grad_norm=stats.grad_norm,
            lr=lr,
            tokens=step.tokens,
            trained_tokens=step.trained_tokens,
            tokens_per_second=step.tokens / seconds,
            seconds=seconds,
            mfu=mfu,
            memory_bytes=stats.peak_memory_bytes,
            data_seconds=stats.data_seconds,
        )
        self._steps += 1
        self._seconds += seconds
        self._tokens += step.tokens
        self._mfu_seconds += (mfu or 0.0) * seconds
        if not self._schedule.is_due(step.number, self._every_steps):
            return
        steps_left = self._schedule.total_steps - step.number
        fields = [
            f"Step {step.number}/{self._schedule.total_steps}",
            f"Loss: {stats.loss:.4f}",
            f"Grad Norm: {stats.grad_norm:.3f}",
            f"LR: {lr:.2e}",
            f"{three_digits(self._steps / self._seconds)} it/s",
            f"{self._tokens / self._seconds:.0f} tok/s",
            *([f"MFU {self._mfu_seconds / self._seconds:.1%}"] if mfu is not None else []),
            f"{stats.peak_memory_bytes / 1e9:.1f} GB",
            f"ETA {_duration(steps_left * self._seconds / self._steps)}",
            time.strftime("%H:%M:%S"),
        ]
        logger.info(" | ".join(fields))
        self._clear_sums()

    def _clear_sums(self) -> None:
        self._steps, self._seconds, self._tokens, self._mfu_seconds = 0, 0.0, 0, 0.0


def three_digits(value: float) -> str:
    """Return a positive number with three significant digits: 0.0312, 26.2."""
    exponent = int(f"{value:.2e}".partition("e")[2])
    return f"{value:.{max(0, 2 - exponent)}f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"
