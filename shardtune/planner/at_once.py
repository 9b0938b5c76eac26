"""Compute several results at the same time, on as many cores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import torch

from shardtune.cluster.child import Child, Pipe

T = TypeVar("T")


def at_once(works: Sequence[Callable[[], T]]) -> list[T]:
    """Call functions that use no device, all but the last in forks, and return their results.

    What fails in a fork is called again here: it raises its error, or works, as a backward does
    that PyTorch refuses in a fork where GPUs are.
    """
    children = [Child("a fork", _send_result, work) for work in works[:-1]]
    try:
        last = [work() for work in works[-1:]]
        messages = [child.result() for child in children]
    finally:
        for child in children:
            child.end()
    pairs = zip(works, messages, strict=False)
    return [message["result"] if "result" in message else work() for work, message in pairs] + last


def _send_result(pipe: Pipe, work: Callable[[], object]) -> None:
    # The threads of OpenMP are not in a fork, which would wait for them.
    torch.set_num_threads(1)
    with suppress(Exception):
        pipe.send({"result": work()})
