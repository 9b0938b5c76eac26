"""Where this process is in the run, and how much of its time it waited for other ranks."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

STEP_PHASES = ("data", "forward and backward", "optimizer")


class Progress:
    """The main thread says where it is; a watchdog reads it. Ranks that do the same work have the same `arrivals`."""

    def __init__(self, device: torch.device) -> None:
        self.step: int | None = None  # None before the first evaluation or step
        self.phase = "start-up"
        self.arrivals = 0  # how often this rank has come to a place where it needs the others
        self._is_timed_by_stream = device.type == "cuda"
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._entered = time.perf_counter()
        self._worker = self._main = threading.get_ident()
        self._waits: list[tuple[str, Any, Any]] = []

    @property
    def place(self) -> str:
        return self.phase if self.step is None else f"step {self.step} ({self.phase})"

    def enter(self, phase: str, step: int | None = None) -> None:
        """From now on this rank is in `phase`; the step is the one before unless it is named."""
        now = time.perf_counter()
        self._seconds[self.phase] += now - self._entered
        self._entered, self.phase = now, phase
        self.step = self.step if step is None else step

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """What this holds needs all ranks, so the first of them waits in it for the last."""
        self.arrive()
        with self.stalled():
            yield

    def arrive(self) -> None:
        self.arrivals += 1

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        """Count what this holds as time that the others take: on a GPU that of the current stream, else the host's."""
        start = self.mark()
        try:
            yield
        finally:
            self.stalled_since(start)

    def stalled_since(self, start: Any) -> None:
        """Count the time since a `mark` in the same way."""
        self._waits.append((self.phase, start, self.mark()))

    @contextlib.contextmanager
    def working_in(self, thread: threading.Thread) -> Iterator[None]:
        """What this holds waits for a thread of this process: where that is, is where this rank is."""
        self._worker = thread.ident or self._main
        try:
            yield
        finally:
            self._worker = self._main

    def frame(self) -> FrameType:
        """What this rank executes."""
        # No name for these frames: this one is among them, and with it in a cycle all would keep their tensors.
        return sys._current_frames().get(self._worker) or sys._current_frames()[self._main]

    def take_seconds(self) -> defaultdict[str, float]:
        """The seconds in each phase since the last call, without those that `waiting` has.

        A GPU must have come to the end of what it was given.
        """
        self.enter(self.phase)
        seconds = self._seconds.copy()
        for phase, start, end in self._waits:
            waited = start.elapsed_time(end) / 1e3 if self._is_timed_by_stream else end - start
            seconds[phase] -= waited
            seconds["waiting"] += waited
        self._seconds.clear()
        self._waits.clear()
        return seconds

    def seconds_in(self, phase: str) -> float:
        """The host's seconds in a phase that is over, since the last `take_seconds`."""
        return self._seconds[phase]

    def mark(self) -> Any:
        """Now, for `stalled_since`."""
        if not self._is_timed_by_stream:
            return time.perf_counter()
        event = torch.Event("cuda", enable_timing=True)
        event.record()
        return event
