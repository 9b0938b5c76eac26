"""Call several functions at the same time, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import zip_longest
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
    children: list[Child] = []
    with suppress(OSError):  # no memory for a fork: the rest runs here
        for work in forked:
            children.append(Child("a fork", _send_result, work))
    try:
        results = [work() for work in works[len(forked) :]]
        messages = [child.result() for child in children]
    finally:
        for child in children:
            child.end()
    done = [message.get("result", _UNDONE) for message in messages]
    pairs = zip_longest(forked, done, fillvalue=_UNDONE)
    return [work() if result is _UNDONE else result for work, result in pairs] + results


def _send_result(pipe: Pipe, work: Callable[[], object]) -> None:
    # A fork has none of OpenMP's threads, and would wait for them.
    torch.set_num_threads(1)
    # The work in the parent process prints the libraries' warnings already.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    with suppress(Exception):
        pipe.send({"result": work()})
