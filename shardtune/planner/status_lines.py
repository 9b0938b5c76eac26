"""Say on stderr what a command does, and that it still does it: it may take a minute."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

_SILENT_S = 8  # at most
Say = Callable[[str], None]


def silent(_: str) -> None:
    """Say nothing."""


class StatusLines:
    """Prints a line for each part of the work, and again while it takes long.

    Use it in a `with`: nothing is printed behind it.
    """

    def __init__(self) -> None:
        self._has_begun, self._began = False, time.monotonic()
        self._changed = threading.Condition()
        self._has_ended = False
        self._thread = threading.Thread(target=self._repeat, daemon=True)

    def __enter__(self) -> StatusLines:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._changed:
            self._has_ended = True
            self._changed.notify()
        self._thread.join()

    def say(self, doing: str) -> None:
        """Print that this part of the work begins."""
        with self._changed:
            self._has_begun, self._began = True, time.monotonic()
            self._changed.notify()
            print(f"Plan: {doing}", file=sys.stderr, flush=True)

    def _repeat(self) -> None:
        with self._changed:
            while not self._has_ended:
                is_new = self._changed.wait(_SILENT_S)
                if self._has_begun and not is_new:
                    seconds = time.monotonic() - self._began
                    print(f"Plan: still at it, {seconds:.0f} s", file=sys.stderr, flush=True)
