"""What a process reads, and the memory that it takes meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any


class Usage:
    """The bytes that this process has read, and the most anonymous memory that it has held."""

    def __init__(self) -> None:
        self._of_samples, self._ended = 0, threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self.first_memory = self.most_memory = self._memory()
        self._first_read = self._read()

    def __enter__(self) -> Usage:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._ended.set()
        self._thread.join()
        self.bytes_read = self._read() - self._first_read
        self.growth = max(self.most_memory, self._memory()) - self.first_memory

    def _sample(self) -> None:
        while not self._ended.wait(0.005):
            self.most_memory = max(self.most_memory, self._memory())

    def _lines(self, file: str) -> dict[str, str]:
        content = Path("/proc/self", file).read_text(encoding="ascii")
        self._of_samples += len(content)
        return dict(line.split(":", 1) for line in content.splitlines())

    def _memory(self) -> int:
        return int(self._lines("status")["RssAnon"].split()[0]) * 1024

    def _read(self) -> int:
        of_samples = self._of_samples
        return int(self._lines("io")["rchar"]) - of_samples
