"""The processes of several nodes on this machine: start them, show their output, kill a node's."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import psutil

T = TypeVar("T")

# Marks the environment of every process of a node, even of one that leaves the node's session.
_MARK = "SHARDTUNE_REHEARSED_NODE"
_TIMEOUT_S = 600  # a few seconds suffice on an idle machine


class CheckFailed(Exception):
    """A check of the rehearsal failed."""


@contextlib.contextmanager
def launched(commands: Sequence[list[str]], folder: Path) -> Iterator[NodeProcesses]:
    try:
        yield NodeProcesses(commands, folder)
    finally:
        for node in range(len(commands)):
            kill(node)


def kill(node: int) -> None:
    """End every process of the node with SIGKILL, as a power cut does."""
    while processes := processes_of(os.getpid(), node):
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.01)


def processes_of(rehearsal_pid: int, node: int) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["environ"])
        if (process.info["environ"] or {}).get(_MARK) == f"{rehearsal_pid}.{node}"
    ]


class NodeProcesses:
    """The processes of each node. `outputs[k]`: the output of node k so far, in whole lines."""

    def __init__(self, commands: Sequence[list[str]], folder: Path) -> None:
        folder.mkdir()
        self._logs = [folder / f"node{node}.log" for node in range(len(commands))]
        self.outputs = ["" for _ in commands]
        self._processes = [
            subprocess.Popen(
                command,
                cwd=folder,
                env=os.environ | {_MARK: f"{os.getpid()}.{node}"},
                stdin=subprocess.DEVNULL,
                stdout=os.open(self._logs[node], os.O_CREAT | os.O_WRONLY),
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C reaches this process alone, which ends them
            )
            for node, command in enumerate(commands)
        ]

    def find(self, node: int, pattern: str) -> list[str]:
        """Return all matches in the node's output; `^` and `$` match at each line."""
        return re.findall(pattern, self.outputs[node], re.MULTILINE)

    def exit_codes(self) -> list[int]:
        codes = [process.poll() for process in self._processes]
        return [code for code in codes if code is not None] if None not in codes else []

    def read_until(self, what: str, result: Callable[[], T]) -> T:
        """Print the nodes' output, each line after `[node k] `, until `result` returns something.

        Raises CheckFailed.
        """
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            exit_codes = self.exit_codes()
            for node, log in enumerate(self._logs):
                output = log.read_text(encoding="utf-8", errors="backslashreplace")
                *lines, rest = output[len(self.outputs[node]) :].split("\n")
                for line in lines:
                    print(f"[node {node}] {line}", flush=True)
                self.outputs[node] = output.removesuffix(rest)
            if reached := result():
                return reached
            if exit_codes or time.monotonic() > deadline:
                ends = f": the nodes ended with {exit_codes}" if exit_codes else ""
                raise CheckFailed(f"{what} did not come within {_TIMEOUT_S} s{ends}")
            time.sleep(0.02)
