"""Compute several results at the same time, on as many cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import torch

from shardtune.cluster.child import Child, Message, Pipe

T = TypeVar("T")


def at_once(works: Sequence[Callable[[], T]]) -> list[T]:
    """Call functions that use no device, all but the last in forks, and return their results.

    What fails in a fork, or gets none, is called here afterwards. It raises its error then, or
    works: PyTorch refuses a backward in a fork of a process that has GPUs.
    """
    children: list[Child] = []
    try:
        # No memory for a fork, or this process is one of a pool, which may have none.
        with suppress(OSError, AssertionError):
            for work in works[:-1]:
                children.append(Child("a fork", _send_result, work))
        last = [work() for work in works[-1:]]
        messages: list[Message] = [child.result() for child in children]
    finally:
        for child in children:
            child.end()
    messages += [{}] * (len(works) - len(last) - len(messages))
    pairs = zip(works[:-1], messages, strict=True)
    return [message["result"] if "result" in message else work() for work, message in pairs] + last


def _send_result(pipe: Pipe, work: Callable[[], object]) -> None:
    # The threads of OpenMP are not in a fork, which would wait for them.
    torch.set_num_threads(1)
    # What libraries say is said by the work that runs here.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    with suppress(Exception):
        pipe.send({"result": work()})
