"""The processes of several nodes on this machine: start them, read their output, kill a node's."""

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

# In the environment of all that a node starts, also of processes that leave its session.
_MARK = "SHARDTUNE_REHEARSED_NODE"


class CheckFailed(Exception):
    """Something did not happen as it must."""


@dataclass(frozen=True)
class NodeCommand:
    """How a node is launched: a prefix such as `ip netns exec`, script, whole environment."""

    prefix: list[str]
    script: Path
    environment: dict[str, str]


class NodeProcesses:
    """Runs a command for each node, shows its output behind `[node k] `, keeps it in `node<k>.log`.

    `lines[k]` are the lines of node k so far. `exit_codes[k]` comes when no process holds its
    output any more.
    """

    def __init__(self, commands: Sequence[NodeCommand], arguments: list[str], folder: Path) -> None:
        self.lines: list[list[str]] = [[] for _ in commands]
        self.exit_codes: dict[int, int] = {}
        self._commands, self._arguments, self._folder = commands, arguments, folder
        self._events: queue.SimpleQueue[tuple[int, str | int]] = queue.SimpleQueue()

    def __enter__(self) -> NodeProcesses:
        """Start node 0, and the others a second later."""
        try:
            for node in range(len(self._commands)):
                self._start(node)
                if node == 0:
                    time.sleep(1)
        except BaseException:
            self._kill_all()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._kill_all()

    def _start(self, node: int) -> None:
        command = self._commands[node]
        process = subprocess.Popen(
            [*command.prefix, str(command.script), *self._arguments],
            cwd=self._folder,
            env=command.environment | {_MARK: mark(os.getpid(), node)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="backslashreplace",
            start_new_session=True,  # a Ctrl-C reaches this process alone, which ends them
        )
        threading.Thread(target=self._read_output, args=(node, process), daemon=True).start()

    def _read_output(self, node: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with (self._folder / f"node{node}.log").open("a", encoding="utf-8") as log:
            for line in process.stdout:
                log.write(line)
                log.flush()
                self._events.put((node, line.rstrip("\n")))
        self._events.put((node, process.wait()))

    @property
    def have_all_ended(self) -> bool:
        return len(self.exit_codes) == len(self._commands)

    @property
    def outcome(self) -> str:
        return ", ".join(
            f"node {node} ended with {self.exit_codes[node]}"
            if node in self.exit_codes
            else f"node {node} runs"
            for node in range(len(self._commands))
        )

    def find(self, node: int, pattern: str) -> list[str]:
        """All matches in the node's lines, as of `re.findall`; `^` and `$` match at each line."""
        return re.findall(pattern, "\n".join(self.lines[node]) + "\n", re.MULTILINE)

    def read_until(self, what: str, is_reached: Callable[[], object], timeout_s: float) -> None:
        """Show the nodes' output until `is_reached()`.

        Raises:
            CheckFailed: it is not within the time, or every node has ended before.
        """
        deadline = time.monotonic() + timeout_s
        while not is_reached():
            if self.have_all_ended:
                raise CheckFailed(f"{what} did not come: {self.outcome}")
            try:
                node, event = self._events.get(timeout=max(0, deadline - time.monotonic()))
            except queue.Empty:
                raise CheckFailed(
                    f"{what} did not come within {timeout_s} s: {self.outcome}"
                ) from None
            if isinstance(event, int):
                self.exit_codes[node] = event
            else:
                self.lines[node].append(event)
                print(f"[node {node}] {event}", flush=True)

    def kill(self, node: int) -> None:
        """End every process of the node with SIGKILL, as a power cut does."""
        while pids := processes_with(f"{_MARK}={mark(os.getpid(), node)}"):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def _kill_all(self) -> None:
        for node in range(len(self._commands)):
            self.kill(node)


def mark(rehearsal_pid: int, node: int) -> str:
    return f"{rehearsal_pid}.{node}"


def processes_with(variable: str) -> list[int]:
    """The processes that were started with `NAME=value` in their environment."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if variable.encode() in entry.read_bytes().split(b"\0"):
                pids.append(int(entry.parent.name))
    return pids
