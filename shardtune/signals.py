"""Stopping on request: a signal sets a flag, and all ranks act on it together at the end of a step."""

from __future__ import annotations

import os
import signal
from types import FrameType


class StopRequest:
    """Whether SIGTERM, SIGINT, SIGHUP or SIGUSR1 has come since this was made; a second one ends the process at once.

    The handler only takes a note: signals reach the ranks at different steps, and a save needs all of them.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            os._exit(128 + number)
        self.received = signal.Signals(number).name
