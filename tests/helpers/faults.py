"""Faults of a disk. A save changes files only through durable_fs.os, which `DiskOs` replaces.

DiskOs makes each call as the real `os` does, except where a `Fault` applies:

    no_space = Fault("write", "*/rank_00001.safetensors", fails(errno.ENOSPC), rank=1, nth=2)
    done = on_ranks(2, run_with, [no_space], arguments, cwd=tmp_path)
    assert "No space left" in done.stdout

An effect is a function of a module that takes the real call and its arguments.
"""

import contextlib
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
from shardtune.checkpoint import durable_fs

OPERATIONS = ("open", "write", "fsync", "close", "mkdir", "rename", "unlink", "rmdir")
Effect = Callable[..., Any]
ALWAYS = math.inf


@dataclass(frozen=True)
class Fault:
    """An effect in place of the `nth` call (from 1) of an operation on a path.

    `operation` is one of OPERATIONS or `*`. `path` is a pattern of fnmatch, whose `*` matches `/`
    too; a descriptor stands for the path that was opened. `times` is the number of calls affected.
    `rank` None means every rank, each with its own count.
    """

    operation: str
    path: str
    effect: Effect
    rank: int | None = None
    nth: int = 1
    times: float = 1


@dataclass(frozen=True)
class Call:
    """A call that succeeded, on this path and with these other arguments."""

    operation: str
    path: str
    arguments: tuple[Any, ...]


def fails(error: int | Exception) -> Effect:
    """Raise OSError of this errno, or another error, in place of the call; close still closes."""
    return partial(_fail, OSError(error, os.strerror(error)) if isinstance(error, int) else error)


def writes_less(count: int) -> Effect:
    """Write at most `count` bytes."""
    return partial(_write_less, count)


def kills() -> Effect:
    """End this rank as `kill -9` does, before the call."""
    return partial(_send, partial(_signal, signal.SIGKILL))


def stops(seconds: float) -> Effect:
    """Stop this rank with all its threads, as `kill -STOP` does, and continue it after a while."""
    return partial(_send, partial(_stop, f"sleep {seconds}"))


def stops_until(path: str) -> Effect:
    """Stop this rank until there is a file of that name."""
    return partial(_send, partial(_stop, f"until [ -e {path} ]; do sleep 0.05; done"))


def waits_until(is_time: Callable[[], bool]) -> Effect:
    """Delay the call on this thread until a condition holds."""
    return partial(_send, partial(_wait, is_time))


def gets(*numbers: int) -> Effect:
    """Send this rank these signals before the call."""
    return partial(_send, partial(_get, numbers))


def leaves(path: str) -> Effect:
    """Create an empty file of that name before the call."""
    return partial(_send, partial(Path.touch, Path(path)))


def then(effect: Effect) -> Effect:
    """Apply the effect after the call."""
    return partial(_then, effect)


class DiskOs:
    """`os` with faults, and the list of the calls that succeeded.

    A recording also keeps the bytes of each write, and makes the calls of all threads one at a
    time: their order in the list is the order in which they happened.
    """

    def __init__(self, *faults: Fault, is_recording: bool = False) -> None:
        self.calls: list[Call] = []
        self._one_at_a_time = threading.Lock() if is_recording else None
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

    def _call(self, *call: Any) -> Any:
        with self._one_at_a_time or contextlib.nullcontext():
            return self._make(*call)

    def _make(self, operation: str, real: Callable[..., Any], target: Any, *arguments: Any) -> Any:
        path = self._opened[target] if isinstance(target, int) else os.fspath(target)
        do = real
        for effect in self._due(operation, path):
            do = partial(effect, do)
        result = do(target, *arguments)
        if operation == "open":
            self._opened[result] = path
        if operation == "write":
            arguments = (bytes(arguments[0][:result]),) if self._one_at_a_time else ()
        self.calls.append(Call(operation, path, arguments))
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


def run_with(faults: list[Fault], arguments: list[str]) -> None:
    """Run train_fsdp.py with faults, as work for ranks.on_ranks."""
    vars(durable_fs)["os"] = DiskOs(*faults)
    run_script(arguments)


def _fail(error: Exception, do: Callable[..., Any], *arguments: Any) -> Any:
    if do is os.close:
        os.close(*arguments)
    raise type(error)(*error.args)  # a new one: the traceback of a lasting one grows


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
    time.sleep(0.2)  # another thread may take the signal; this one must do nothing meanwhile


def _stop(wait: str) -> None:
    subprocess.Popen(["sh", "-c", f"{wait}; kill -CONT {os.getpid()}"])
    _signal(signal.SIGSTOP)


def _get(numbers: Sequence[int]) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


def _wait(is_time: Callable[[], bool]) -> None:
    while not is_time():
        time.sleep(0.01)
