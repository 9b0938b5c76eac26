"""Call several functions at the same time, each in a process of its own."""

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from multiprocessing.connection import wait
from typing import Any, TypeVar

import torch

from shardtune.cluster.child import Child, Pipe

T = TypeVar("T")
_UNDONE: Any = object()


def at_once(works: Sequence[Callable[[], T]]) -> list[T]:
    """Call functions that use no device, all but the last in forks, and return their results.

    A function that fails in a fork runs again here, and raises its error or works: PyTorch
    refuses a backward in a fork of a process that has GPUs.
    """
    # A process of a pool may not have children.
    forked = [] if multiprocessing.current_process().daemon else works[:-1]
    children = [_fork(work) for work in forked]
    try:
        results = [work() for work in works[len(forked) :]]
        done = [_result(child) for child in children]
    finally:
        for child in children:
            _end(child)
    pairs = zip(forked, done, strict=True)
    return [work() if result is _UNDONE else result for work, result in pairs] + results


def in_turn(works: Sequence[Callable[[], T]]) -> Iterator[T]:
    """Call functions as `at_once` does, but two at a time, and yield each result in its turn."""
    left, begun = iter(works), deque[tuple[Callable[[], T], Child | None]]()

    def running() -> list[Child]:
        return [child for _, child in begun if child and not child.pipe.poll()]

    try:
        while True:
            begun += [(work, _fork(work)) for work in islice(left, 2 - len(running()))]
            if not begun:
                return
            work, child = begun[0]
            if child in (unfinished := running()):
                wait([each.pipe for each in unfinished])
                continue
            result = _result(child)
            yield work() if result is _UNDONE else result
            _end(begun.popleft()[1])
    finally:
        for _, child in begun:
            _end(child)


def _fork(work: Callable[[], object]) -> Child | None:
    with suppress(OSError):  # no memory for a fork: the caller calls the function itself
        return Child("a fork", _send_result, work)
    return None


def _result(child: Child | None) -> Any:
    return child.result().get("result", _UNDONE) if child else _UNDONE


def _end(child: Child | None) -> None:
    if child:
        child.end()


def _send_result(pipe: Pipe, work: Callable[[], object]) -> None:
    # A fork has one core, and forks no further.
    multiprocessing.current_process().daemon = True
    # A fork has none of OpenMP's threads, and would wait for them.
    torch.set_num_threads(1)
    # The work in the parent process prints the libraries' warnings already.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    with suppress(Exception):
        pipe.send({"result": work()})
