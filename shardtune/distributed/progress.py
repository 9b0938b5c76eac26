"""Where this process is in the run, and how much of its time it waited for other ranks."""

from __future__ import annotations

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
    """The main thread says where it is, here and to the agent of its node.

    Ranks that do the same work have the same number of arrivals.
    """

    def __init__(self, device: torch.device) -> None:
        self._record = this_rank()
        self._is_timed_by_stream = device.type == "cuda"
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._entered = time.perf_counter()
        self._main = threading.get_ident()
        self._waits: list[tuple[str, Any, Any]] = []
        self._record.thread = self._main
        self._record.write()

    @property
    def step(self) -> int | None:
        """The step or the evaluation that runs; None before the first one."""
        return self._record.step

    @property
    def phase(self) -> Phase:
        return self._record.phase

    @property
    def place(self) -> str:
        return self._record.place

    @property
    def limits_steps(self) -> bool:
        return self._record.limits_steps

    def enter(self, phase: str, step: int | None = None) -> None:
        """From now on this rank is in `phase`; the step is the one before unless it is named."""
        now = time.perf_counter()
        self._seconds[self.phase] += now - self._entered
        self._entered, self._record.phase = now, Phase(phase)
        self._record.step = self.step if step is None else step
        self._record.write()

    def limit_steps(self) -> None:
        """Tell the agent that a step has ended: from now on none may take longer than its time
        limit."""
        self._record.limits_steps = True
        self._record.write()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Hold a collective: the first rank waits in it for the last."""
        self.arrive()
        with self.stalled():
            yield

    def arrive(self) -> None:
        """Count one more place at which this rank needs the others."""
        self._record.arrivals += 1
        self._record.write()

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        """Count the time inside as the other ranks': on a GPU the current stream's, else the
        host's."""
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
        """Wait for a thread of this process: its stack says where this rank is."""
        self._record.thread = thread.ident or self._main
        self._record.write()
        try:
            yield
        finally:
            self._record.thread = self._main
            self._record.write()

    def take_seconds(self) -> defaultdict[str, float]:
        """Return the seconds in each phase since the last call; `waiting` has those of the waits.

        The device must have finished all work that it was given.
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
        """Return the host's seconds in a finished phase since the last `take_seconds`."""
        return self._seconds[phase]

    def mark(self) -> Any:
        """Return the present moment, for `stalled_since`."""
        if not self._is_timed_by_stream:
            return time.perf_counter()
        event = torch.Event("cuda", enable_timing=True)
        event.record()
        return event
