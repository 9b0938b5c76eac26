"""What somebody with a terminal on each node does: start the commands, watch their output, cut a node's power."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

# In the environment of all that a node starts, wherever its processes move: to sessions of their own, or to init.
_MARK = "SHARDTUNE_REHEARSED_NODE"


class Failed(Exception):
    """What did not happen as it must."""


@dataclass(frozen=True)
class Place:
    """A node: what stands before its command, the command, and its whole environment."""

    prefix: list[str]
    script: Path
    environment: dict[str, str]


class Terminals:
    """One per node; what is said there is shown behind `[node k] `, and appended to `node<k>.log` of a folder.

    `said[k]`: the lines of node k. `codes[k]`: its exit code, once no process holds its output any more.
    """

    def __init__(self, places: Sequence[Place], arguments: list[str], folder: Path) -> None:
        self.said: list[list[str]] = [[] for _ in places]
        self.codes: dict[int, int] = {}
        self.shuffle_groups, self._arguments, self._folder = places, arguments, folder
        self._lines: queue.SimpleQueue[tuple[int, str | int]] = queue.SimpleQueue()

    def __enter__(self) -> Terminals:
        """Start node 0, and the others a second later."""
        try:
            for node in range(len(self.shuffle_groups)):
                self._start(node)
                if node == 0:
                    time.sleep(1)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._end()

    def _start(self, node: int) -> None:
        place = self.shuffle_groups[node]
        process = subprocess.Popen(
            [*place.prefix, str(place.script), *self._arguments],
            cwd=self._folder,
            env=place.environment | {_MARK: self._mark(node)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="backslashreplace",
            start_new_session=True,  # so that Ctrl-C ends the rehearsal, and not first what it watches
        )
        threading.Thread(target=self._listen, args=(node, process), daemon=True).start()

    def _listen(self, node: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with (self._folder / f"node{node}.log").open("a", encoding="utf-8") as log:
            for line in process.stdout:
                log.write(line)
                log.flush()
                self._lines.put((node, line.rstrip("\n")))
        self._lines.put((node, process.wait()))

    def _mark(self, node: int) -> str:
        return f"{os.getpid()}.{node}"

    @property
    def all_ended(self) -> bool:
        return len(self.codes) == len(self.shuffle_groups)

    @property
    def outcome(self) -> str:
        return ", ".join(
            f"node {node} ended with {self.codes[node]}"
            if node in self.codes
            else f"node {node} runs"
            for node in range(len(self.shuffle_groups))
        )

    def find(self, node: int, pattern: str) -> list[str]:
        """All that the pattern finds in what the node has said; `^` and `$` are a line's."""
        return re.findall(pattern, "\n".join(self.said[node]) + "\n", re.MULTILINE)

    def read_until(self, what: str, is_reached: Callable[[], object], within_s: float) -> None:
        """Show what comes until `is_reached()`.

        Raises:
            Failed: it is not within the time, or when every node has ended.
        """
        deadline = time.monotonic() + within_s
        while not is_reached():
            if self.all_ended:
                raise Failed(f"{what} did not come: {self.outcome}")
            try:
                node, said = self._lines.get(timeout=max(0, deadline - time.monotonic()))
            except queue.Empty:
                raise Failed(f"{what} did not come within {within_s} s: {self.outcome}") from None
            if isinstance(said, int):
                self.codes[node] = said
            else:
                self.said[node].append(said)
                print(f"[node {node}] {said}", flush=True)

    def kill(self, node: int) -> None:
        """End every process of the node with SIGKILL, as a power cut does."""
        while processes := _processes_with(f"{_MARK}={self._mark(node)}"):
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.01)

    def _end(self) -> None:
        for node in range(len(self.shuffle_groups)):
            self.kill(node)


def _processes_with(variable: str) -> list[int]:
    """Those that were started with `NAME=value` in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if variable.encode() in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
    return found
