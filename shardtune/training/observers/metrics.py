"""The numbers of each step, gathered from all ranks, and `metrics.jsonl`, which keeps them."""

from __future__ import annotations

import datetime
import json
import math
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from shardtune.checkpoint import durable_fs
from shardtune.data.schedule import Step
from shardtune.distributed.progress import Phase
from shardtune.distributed.world import World
from shardtune.log import logger
from shardtune.metrics_schema import Entry
from shardtune.run_files import read_entries
from shardtune.training.observers.sinks import Sink


class StepStats(NamedTuple):
    """The numbers of a step that all ranks have."""

    loss: float  # nats per trained token
    grad_norm: float  # the whole model's, before clipping
    must_stop: bool  # a signal asked some rank to stop
    peak_memory_bytes: int  # the largest of all ranks; step 1 lacks the optimizer's state
    reserved_memory_bytes: int  # the most that a GPU's allocator has taken; 0 on CPUs
    data_seconds: float  # the longest wait of a rank for its batches
    expert_tokens: np.ndarray  # [groups of ranks that share experts, experts of all layers]


class StepEnded(NamedTuple):
    """A step whose weights are updated."""

    step: Step
    stats: StepStats
    lr: float
    seconds: float  # since the previous step ended, without evaluation and saves
    seconds_by_phase: Mapping[str, float]  # this rank's phases without their waits, and `waiting`
    is_due: bool  # by logging.every_steps, or the last one


class StepObserver:
    """A measurement of each step, which has a line in `observers` of build_context.py.

    All ranks call every method of all observers in one order.
    """

    def step_begins(self, number: int) -> None:
        """Prepare to measure: the forward comes next."""

    def step_ended(self, ended: StepEnded) -> None:
        """Take the numbers of a step, before its evaluation and its save."""

    def between_steps(self) -> None:
        """Do long work after each step and its evaluation and save, while no clock runs."""


def all_gather_step_stats(
    nll_sum: torch.Tensor,  # float64, scalar, on the device
    squared_grad_norm: torch.Tensor,  # float64, scalar, on the device
    trained_weight: float,  # the sum of the weights of trained tokens in the global batch
    must_stop: bool,
    expert_tokens: torch.Tensor,  # float64 [experts of all layers]
    world: World,
) -> StepStats:
    # One collective has all numbers, the wish to stop among them. `tolist` is the only place of a
    # step where the host waits for the device, and all arithmetic before it runs there in float64.
    per_rank = world.all_gather_scalars(
        nll_sum,
        squared_grad_norm,
        must_stop,
        peak_memory_bytes(world.device),
        reserved_memory_bytes(world.device),
        world.progress.seconds_in(Phase.DATA),
        vector=expert_tokens,
    )
    nll_sums, squared_norms, stops, memory, reserved, data = per_rank[:, :6].unbind(dim=1)
    group_size = world.expert_mesh["expert"].size() if world.expert_mesh else world.size
    per_group = per_rank[:, 6:].unflatten(0, (-1, group_size)).sum(dim=1)
    loss = nll_sums.sum() / (trained_weight or 1)
    grad_norm = squared_norms.sum().sqrt()
    # Each rank sums the same numbers in the same order, so that all have the same loss to the bit.
    largest = [each.amax() for each in (stops, memory, reserved, data)]
    numbers = torch.cat([torch.stack([loss, grad_norm, *largest]), per_group.flatten()])
    loss, grad_norm, any_stop, peak, reserved, waited, *tokens = numbers.tolist()
    return StepStats(
        loss,
        grad_norm,
        any_stop > 0,
        int(peak),
        int(reserved),
        waited,
        np.array(tokens).reshape(len(per_group), -1),
    )


class Metrics:
    """Writes `metrics.jsonl` on rank 0. After a resume, the lines of later steps are dropped.

    Lines that cannot be written, as on a full disk, wait in memory for the next line. `open_sinks`
    starts trackers, which get each object, too; leaving this context waits a while for them.
    """

    def __init__(
        self,
        path: Path,
        world: World,
        resumed_step: int | None,
        open_sinks: Callable[[], list[Sink]] = list,
    ) -> None:
        self._file: durable_fs.AppendedFile | None = None
        self._sinks: list[Sink] = []
        self._lock = threading.Lock()
        self._unwritten, self._has_warned = b"", False
        if not world.is_main:
            return
        kept = read_entries(path, resumed_step) if resumed_step is not None else ()
        durable_fs.replace_file(path, b"".join(line for _, line in kept))
        self._file = durable_fs.AppendedFile(path)
        self._sinks = open_sinks()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        for sink in self._sinks:
            sink.close()

    def write(self, *entries: Entry) -> None:
        """Append objects, with the time; None stands for NaN and infinity."""
        # One write has all objects of a call: a kill leaves all of them or none.
        if self._file is None:
            return
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        stamped = [{**_without_infinities(entry), "time": now} for entry in entries]
        lines = "".join(json.dumps(entry) + "\n" for entry in stamped)
        for sink in self._sinks:
            for entry in stamped:
                sink.put(entry)
        try:
            self._append(lines.encode())
        except OSError as error:
            if not self._has_warned:
                reason = f"cannot be written now ({error.strerror})"
                logger.info(f"metrics.jsonl {reason}: its lines wait in memory")
            self._has_warned = True

    def sync(self) -> None:
        """Bring the lines to the disk, before a checkpoint of their steps. Raises OSError."""
        if self._file is not None:
            self._append(b"")
            self._file.sync()

    def _append(self, lines: bytes) -> None:
        assert self._file is not None
        with self._lock:
            self._unwritten += lines
            while self._unwritten:  # a write may be short
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]


def _without_infinities(entry: Entry) -> dict[str, Any]:
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in entry.items()
    }


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory that this rank has held so far: of its GPU, or of its process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Not ru_maxrss, which a process inherits from its parent.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) * 1024


def reserved_memory_bytes(device: torch.device) -> int:
    """Return the most memory that the allocator has taken from the GPU so far, or 0 on a CPU."""
    # Other processes and NCCL lack this memory, the free blocks within it, too.
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0
