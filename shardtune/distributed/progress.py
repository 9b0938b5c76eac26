"""Where this process is in the run, and how much of its time it waited for other ranks."""

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from shardtune.distributed.rank_record import STEP_PHASES, Phase, this_rank

__all__ = ["STEP_PHASES", "Phase", "Progress"]


class Progress:
    """Tells the agent of this node where the main thread is, and times its phases.

    Ranks of a stage count equal `arrivals`, and all ranks count equal `meetings`.
    """

    def __init__(self, device: torch.device) -> None:
        self.record = this_rank()
        self.record.thread = threading.get_ident()
        self._is_timed_by_stream = device.type == "cuda"
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._entered = time.perf_counter()
        self._waits: list[tuple[str, Any, Any]] = []

    def enter(self, phase: Phase, step: int | None = None) -> None:
        """Say that this rank is in `phase` from now on, in the same step unless one is named."""
        now = time.perf_counter()
        self._seconds[self.record.phase] += now - self._entered
        self._entered, self.record.phase = now, phase
        if step is not None:
            self.record.step = step

    def meet(self) -> None:
        """Count one more place at which this rank needs all others."""
        self.record.meetings += 1
        self.record.arrivals += 1

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Time a collective of this rank's stage, in which its first rank waits for the last.

        The clock is that of the current stream on a GPU, else the host's.
        """
        self.record.arrivals += 1
        start = self._mark()
        try:
            yield
        finally:
            self._waits.append((self.record.phase, start, self._mark()))

    @contextlib.contextmanager
    def message(self) -> Iterator[None]:
        """Mark the current wait as one for another stage; call within `waiting`."""
        self.record.waits_for_stage = True
        try:
            yield
        finally:
            self.record.waits_for_stage = False

    def _mark(self) -> Any:
        if not self._is_timed_by_stream:
            return time.perf_counter()
        event = torch.Event("cuda", enable_timing=True)
        event.record()
        return event

    @contextlib.contextmanager
    def working_in(self, thread: threading.Thread) -> Iterator[None]:
        """Wait for a thread of this process: its stack says where this rank is."""
        main, self.record.thread = self.record.thread, thread.ident
        try:
            yield
        finally:
            self.record.thread = main

    def take_seconds(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call without its waits, and all waits as
        `waiting`.

        The device must have finished all work that it was given.
        """
        self.enter(self.record.phase)
        seconds = self._seconds.copy()
        for phase, start, end in self._waits:
            waited = start.elapsed_time(end) / 1e3 if self._is_timed_by_stream else end - start
            seconds[phase] -= waited
            if phase in STEP_PHASES:  # waits of an evaluation do not count
                seconds["waiting"] += waited
        self._seconds.clear()
        self._waits.clear()
        return {phase: seconds[phase] for phase in (*STEP_PHASES, "waiting")}

    def seconds_in(self, phase: Phase) -> float:
        return self._seconds[phase]
