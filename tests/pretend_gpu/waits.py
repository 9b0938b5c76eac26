"""The places at which the host waits for the device."""

import contextlib
import ctypes
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch


class HostWait(NamedTuple):
    """What waits, and the innermost place outside PyTorch: `file:line function`."""

    what: str
    where: str


listeners: list[Callable[[HostWait], None]] = []  # of the contexts that are open
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
_PACKAGES = sysconfig.get_paths()["purelib"]
_SKIPPED = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")


@contextlib.contextmanager
def host_waits() -> Iterator[list[HostWait]]:
    """Record the waits of the main thread, and of the backward passes that it runs.

    Other threads may wait: the one that writes checkpoints does so for its copies.
    """
    waits: list[HostWait] = []
    listeners.append(waits.append)
    try:
        yield waits
    finally:
        listeners.remove(waits.append)


def wait(what: str) -> None:
    """Note that the host waits here."""
    is_main = threading.get_native_id() == os.getpid()
    if listeners and (is_main or torch._C._current_graph_task_id() != -1):
        noted = HostWait(what, _where(sys._getframe(1)))
        for listener in listeners:
            listener(noted)


def _where(frame: FrameType | None) -> str:
    """Return the place that called PyTorch, not one of a mode through which all operators go."""
    while frame and (
        frame.f_code.co_filename.startswith(_SKIPPED)
        or frame.f_code.co_name == "__torch_dispatch__"
    ):
        frame = frame.f_back
    if frame is None:
        return "PyTorch"
    path = frame.f_code.co_filename.removeprefix(_PACKAGES + "/")
    return f"{path}:{frame.f_lineno} {frame.f_code.co_name}"


@_CALLBACK
def _from_device(what: bytes) -> None:
    wait(what.decode())


def listen(library: ctypes.CDLL) -> None:
    """Let the device tell its waits."""
    library.pretend_on_wait(_from_device)
