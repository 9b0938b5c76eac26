"""How much memory a piece of work takes of this process."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import psutil


class PeakMemory:
    """The peak memory of this process above that at the start, in bytes; sampled at 200 Hz."""

    def __enter__(self) -> PeakMemory:
        ctypes.CDLL(None).malloc_trim(0)  # return the memory that earlier work freed
        self._process, self._ended = psutil.Process(), threading.Event()
        self._start, self.extra = self._process.memory_info().rss, 0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(0.005):
            self.extra = max(self.extra, self._process.memory_info().rss - self._start)

    def __exit__(self, *_: Any) -> None:
        self._ended.set()
        self._thread.join()
