"""Print to stderr each part of a command's work, and every few seconds that it goes on."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_EVERY_S = 8
Say = Callable[[str], None]


def silent(_: str) -> None:
    """Say nothing."""


def _print(text: str) -> None:
    print(f"Plan: {text}", file=sys.stderr, flush=True)


@contextmanager
def status_lines() -> Iterator[Say]:
    """Print each part that `say` gets, and until the end every 8 s that it goes on."""
    has_ended, began = threading.Event(), time.monotonic()
    last = began  # time of the last line

    def say(text: str) -> None:
        nonlocal began, last
        began = last = time.monotonic()
        _print(text)

    def repeat() -> None:
        nonlocal last
        while not has_ended.wait(_EVERY_S / 8):
            if (now := time.monotonic()) - last >= _EVERY_S:
                last = now
                _print(f"still at it, {now - began:.0f} s")

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield say
    finally:
        has_ended.set()
        thread.join()
