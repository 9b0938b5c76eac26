"""Processes forked from this one: they die with it and report messages."""

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from shardtune.distributed.signals import die_with_parent
from shardtune.errors import first_line

Message = dict[str, Any]
Pipe = Connection
_FORKS = multiprocessing.get_context("fork")


class Child:
    """Runs `work(pipe, *arguments)` in a fork.

    An exception of the work becomes a message with `problems`, in words that begin with `name`.
    """

    def __init__(self, name: str, work: Callable[..., None], *arguments: Any) -> None:
        self.name = name
        self.pipe, child_end = _FORKS.Pipe()
        forked = (self, os.getpid(), child_end, work, arguments)
        self._process = _FORKS.Process(target=_run, args=forked)
        self._process.start()
        child_end.close()

    def result(self) -> Message:
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self._process.join(5)
            code = self._process.exitcode
            problem = f"{self.name} ended without a message (exit code {code}) - see above"
            return {"problems": [problem]}

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self.pipe.close()


def results(children: list[Child], timeout_s: float, late: Callable[[int], str]) -> list[Message]:
    """Receive one message of each child, in their order, and end them.

    The first message with `problems` ends the others too. `late(index)` describes a child that has
    reported nothing in time.
    """
    reports: dict[int, Message] = {}
    deadline = time.monotonic() + timeout_s
    waiting = dict(enumerate(children))
    while waiting and not any(report.get("problems") for report in reports.values()):
        pipes = [child.pipe for child in waiting.values()]
        readable = wait(pipes, max(0.0, deadline - time.monotonic()))
        for number in [number for number, child in waiting.items() if child.pipe in readable]:
            reports[number] = waiting.pop(number).result()
        if not readable:
            reports[min(waiting)] = {"problems": [late(min(waiting))]}
    for child in children:
        child.end()
    return [reports.get(number, {"problems": []}) for number in range(len(children))]


def _run(child: Child, parent: int, pipe: Pipe, work: Callable[..., None], arguments: Any) -> None:
    die_with_parent(parent)
    # A Ctrl-C reaches this process too; the parent says what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        if signal.getsignal(number) != signal.SIG_IGN:  # it stays ignored, as SIGHUP by nohup
            signal.signal(number, signal.SIG_DFL)
    child.pipe.close()
    try:
        work(pipe, *arguments)
    except Exception as error:
        traceback.print_exc()
        what = f"{child.name}: {type(error).__name__}: {first_line(error)}"
        pipe.send({"problems": [f"{what} - see the traceback there"]})
