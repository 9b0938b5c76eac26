"""Faults of a disk, for tests: whatever a save does to its files goes through shardtune.checkpoint.durable_fs's `os`, and
`install` puts a stand-in there that calls the real one, except where a `Fault` says otherwise. To add one:

    no_space = Fault("write", "*/rank_00001.safetensors", fails(errno.ENOSPC), rank=1, nth=2)
    done = on_ranks(2, run_with, [no_space], arguments, cwd=tmp_path)
    assert "No space left" in done.stdout

An effect is any function of a module: it gets the real call and its arguments, and does instead what it likes.
"""

from __future__ import annotations

import fnmatch
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from helpers.ranks import run_script
from shardtune.checkpoint import durable_fs as disk

OPERATIONS = ("open", "write", "fsync", "close", "mkdir", "rename", "unlink", "rmdir")
Effect = Callable[..., Any]
ALWAYS = math.inf


@dataclass(frozen=True)
class Fault:
    """What happens instead of the `nth` call (from 1) of an operation on a path, and of `times` - 1 more that follow.

    `operation` is one of OPERATIONS or `*`. `path` is a pattern as of fnmatch, whose `*` matches `/` too; for calls
    that take a descriptor it is compared with what was opened. `rank` None: on every rank, each with its own count.
    """

    operation: str
    path: str
    effect: Effect
    rank: int | None = None
    nth: int = 1
    times: float = 1


@dataclass(frozen=True)
class Call:
    """One call that has succeeded: when it ended, on which path, and its other arguments."""

    ended_s: float
    operation: str
    path: str
    arguments: tuple[Any, ...]


def fails(error: int | Exception) -> Effect:
    """Raise OSError of this errno, or another error; the call is not made, but a descriptor is closed all the same."""
    return partial(_fail, OSError(error, os.strerror(error)) if isinstance(error, int) else error)


def writes_less(count: int) -> Effect:
    """Write no more than `count` bytes of what was asked."""
    return partial(_write_less, count)


def sleeps(seconds: float) -> Effect:
    """Make the call this much later, on this thread alone."""
    return partial(_send, partial(time.sleep, seconds))


def kills() -> Effect:
    """End this rank as `kill -9` does, before the call."""
    return partial(_send, partial(_signal, signal.SIGKILL))


def stops(seconds: float) -> Effect:
    """Stop this rank with all its threads, as `kill -STOP` does, and let it go on after a while."""
    return partial(_send, partial(_stop, f"sleep {seconds}"))


def stops_until(path: str) -> Effect:
    """The same until there is a file of that name."""
    return partial(_send, partial(_stop, f"until [ -e {path} ]; do sleep 0.05; done"))


def waits_until(is_time: Callable[[], bool]) -> Effect:
    """Make the call, on this thread alone, when something has come true."""
    return partial(_send, partial(_wait, is_time))


def gets(*numbers: int) -> Effect:
    """Send this rank these signals before the call."""
    return partial(_send, partial(_get, numbers))


def leaves(path: str) -> Effect:
    """Create an empty file of that name before the call."""
    return partial(_send, partial(Path.touch, Path(path)))


def then(effect: Effect) -> Effect:
    """The effect, but after the call has been made."""
    return partial(_then, effect)


class DiskOs:
    """`os`, with faults. It keeps a list of the calls that were made, if asked to with what they wrote."""

    def __init__(self, *faults: Fault, keeps_data: bool = False) -> None:
        self.calls: list[Call] = []
        self.keeps_data = keeps_data
        rank = int(os.environ.get("RANK", "0"))
        self._faults = [fault for fault in faults if fault.rank in (None, rank)]
        self._counts = [0] * len(self._faults)
        self._opened: dict[int, str] = {}
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return (
            partial(self._call, name, getattr(os, name))
            if name in OPERATIONS
            else getattr(os, name)
        )

    def _call(self, operation: str, real: Callable[..., Any], target: Any, *arguments: Any) -> Any:
        path = self._opened[target] if isinstance(target, int) else os.fspath(target)
        do = real
        for effect in self._due(operation, path):
            do = partial(effect, do)
        result = do(target, *arguments)
        if operation == "open":
            self._opened[result] = path
        if operation == "write":
            arguments = (bytes(arguments[0][:result]),) if self.keeps_data else ()
        self.calls.append(Call(time.monotonic(), operation, path, arguments))
        return result

    def _due(self, operation: str, path: str) -> list[Effect]:
        due = []
        with self._lock:
            for number, fault in enumerate(self._faults):
                if fault.operation in (operation, "*") and fnmatch.fnmatchcase(path, fault.path):
                    self._counts[number] += 1
                    if fault.nth <= self._counts[number] < fault.nth + fault.times:
                        due.append(fault.effect)
        return due


def install(*faults: Fault, keeps_data: bool = False) -> DiskOs:
    """Let these happen in this process from now on."""
    stand_in = DiskOs(*faults, keeps_data=keeps_data)
    vars(disk)["os"] = stand_in
    return stand_in


def run_with(faults: list[Fault], arguments: list[str]) -> None:
    """train_fsdp.py with faults, as work for ranks.on_ranks."""
    install(*faults)
    run_script(arguments)


def _fail(error: Exception, do: Callable[..., Any], *arguments: Any) -> Any:
    if do is os.close:
        os.close(*arguments)
    raise type(error)(
        *error.args
    )  # a new one: its traceback holds what the frames hold, and one that lasts grows


def _write_less(count: int, do: Callable[..., Any], handle: int, data: memoryview) -> Any:
    return do(handle, data[:count])


def _send(happen: Callable[[], Any], do: Callable[..., Any], *arguments: Any) -> Any:
    happen()
    return do(*arguments)


def _then(effect: Effect, do: Callable[..., Any], *arguments: Any) -> Any:
    result = do(*arguments)
    effect(lambda *_: None, *arguments)
    return result


def _signal(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(
        0.2
    )  # another thread may have taken it, and this one is to do nothing before it ends or stops as well


def _stop(wait: str) -> None:
    subprocess.Popen(["sh", "-c", f"{wait}; kill -CONT {os.getpid()}"])
    _signal(signal.SIGSTOP)


def _get(numbers: Sequence[int]) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


def _wait(is_time: Callable[[], bool]) -> None:
    while not is_time():
        time.sleep(0.01)
