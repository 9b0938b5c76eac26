"""Processes forked from this one: they die with it and report JSON messages."""

from __future__ import annotations

import json
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
_FORKS = multiprocessing.get_context("fork")


class Pipe:
    """One end of a connection between parent and child. Messages are JSON, never pickles."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def send(self, message: Message) -> None:
        self.connection.send_bytes(json.dumps(message).encode())

    def receive(self) -> Message:
        """Raises EOFError when the other end is gone."""
        return dict(json.loads(self.connection.recv_bytes()))


class Child:
    """Runs `work(pipe, *arguments)` in a fork.

    An exception of the work becomes a message with `problems`, in words that begin with `name`.
    """

    def __init__(self, name: str, work: Callable[..., None], *arguments: Any) -> None:
        self._name = name
        parent_end, child_end = _FORKS.Pipe()
        self._process = _FORKS.Process(
            target=_run,
            args=(os.getpid(), parent_end, child_end, name, work, arguments),
            daemon=False,
        )
        self._process.start()
        child_end.close()
        self.pipe = Pipe(parent_end)

    def result(self) -> Message:
        """Wait for the next message of the child."""
        try:
            return self.pipe.receive()
        except (EOFError, OSError):
            self._process.join(5)
            code = self._process.exitcode
            problem = f"{self._name} ended without a message (exit code {code}) - see above"
            return {"problems": [problem]}

    def end(self) -> None:
        """Kill the child, unless it has ended by itself."""
        self._process.kill()
        self._process.join()
        self.pipe.connection.close()


def results(
    children: list[Child], timeout_s: float, late: Callable[[int], str], more_s: float
) -> list[Message]:
    """Receive one message of each child, in their order, and end them.

    After the first message with `problems` the others have `more_s` seconds left. `late` names the
    problem of a child, by its index, that has reported nothing in time.
    """
    reports: dict[int, Message] = {}
    deadline = time.monotonic() + timeout_s
    while len(reports) < len(children) and (left_s := deadline - time.monotonic()) > 0:
        waiting = [number for number in range(len(children)) if number not in reports]
        readable = wait([children[number].pipe.connection for number in waiting], left_s)
        for number in waiting:
            if children[number].pipe.connection not in readable:
                continue
            reports[number] = children[number].result()
            if reports[number].get("problems"):
                deadline = min(deadline, time.monotonic() + more_s)
    is_late = not any(message.get("problems") for message in reports.values())
    for child in children:
        child.end()
    return [
        reports.get(number) or {"problems": [late(number)] if is_late else []}
        for number in range(len(children))
    ]


def _run(
    parent: int,
    parent_end: Connection,
    child_end: Connection,
    name: str,
    work: Callable[..., None],
    arguments: Any,
) -> None:
    die_with_parent(parent)
    # A Ctrl-C reaches this process too; the parent says what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
    parent_end.close()
    pipe = Pipe(child_end)
    try:
        work(pipe, *arguments)
    except Exception as error:
        traceback.print_exc()
        what = f"{name}: {type(error).__name__}: {first_line(error)}"
        pipe.send({"problems": [f"{what} - see the traceback there"]})
