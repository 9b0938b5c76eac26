"""Processes forked from this one, which die with it and report in JSON lines."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

import psutil

from shardtune.cluster.control import ConnectionLost, Link, Message, readable

_FORKS = multiprocessing.get_context("fork")
_PR_SET_PDEATHSIG = 1  # prctl(2)


def die_with_parent(parent: int) -> None:
    """Have the system kill this process when `parent`, which started it, has ended, however that happened."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os._exit(1)


def is_running(pid: int) -> bool:
    """Whether it has not ended; one that waits for its parent to hear of its end has."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


class Child:
    """Runs `work(link, *arguments)` in a fork; `link` is its end of a connection to this process.

    What the work raises becomes a message with `problems`, in words that begin with `name`.
    """

    def __init__(self, name: str, work: Callable[..., None], *arguments: Any) -> None:
        self._name = name
        ours, theirs = socket.socketpair()
        self._process = _FORKS.Process(
            target=_run, args=(os.getpid(), ours, theirs, name, work, arguments), daemon=False
        )
        self._process.start()
        theirs.close()
        self.link = Link(ours, name, None)
        self.link.trust()
        self._unread: list[Message] = []

    def fileno(self) -> int:
        return self.link.fileno()

    def result(self) -> Message | None:
        """The next that it has reported, once it is readable; None if that is not whole yet."""
        try:
            self._unread += [] if self._unread else self.link.messages()
        except ConnectionLost:
            self._process.join(5)
            return {
                "problems": [
                    f"{self._name} ended without a word (exit code {self._process.exitcode}) - see above"
                ]
            }
        return self._unread.pop(0) if self._unread else None

    @property
    def has_unread(self) -> bool:
        """Whether `result` has something at once, which the connection does not show."""
        return bool(self._unread)

    def end(self) -> None:
        """With SIGKILL, if it has not ended by itself."""
        self._process.kill()
        self._process.join()
        self.link.close()


def results(
    children: list[Child], timeout_s: float, late: Callable[[int], str], more_s: float
) -> list[Message]:
    """One message of each child, in their order; they are ended then.

    After the first with `problems` the others have `more_s` seconds left. `late` names the problem of a child, by its
    index, that has reported nothing in time.
    """
    found: dict[int, Message] = {}
    deadline = time.monotonic() + timeout_s
    while len(found) < len(children) and (left_s := deadline - time.monotonic()) > 0:
        open_ones = [child for number, child in enumerate(children) if number not in found]
        for child in readable(open_ones, left_s):
            if (message := child.result()) is not None:
                found[children.index(child)] = message
                if message.get("problems"):
                    deadline = min(deadline, time.monotonic() + more_s)
    is_late = not any(message.get("problems") for message in found.values())
    for child in children:
        child.end()
    return [
        found.get(number) or {"problems": [late(number)] if is_late else []}
        for number in range(len(children))
    ]


def _run(
    parent: int,
    ours: socket.socket,
    theirs: socket.socket,
    name: str,
    work: Callable[..., None],
    arguments: Any,
) -> None:
    die_with_parent(parent)
    # A Ctrl-C reaches it too; the parent says what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    ours.close()
    link = Link(theirs, "parent", None)
    link.trust()
    try:
        work(link, *arguments)
    except Exception as error:
        traceback.print_exc()
        first_line = (str(error).splitlines() or [""])[0]
        link.send(
            {
                "problems": [
                    f"{name}: {type(error).__name__}: {first_line} - see the traceback there"
                ]
            }
        )
