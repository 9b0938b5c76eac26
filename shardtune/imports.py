"""How a process imports torch and transformers without a second lost to the garbage collector."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def imports_without_gc() -> Iterator[None]:
    """Import without looking for garbage: imports leave hardly any, and looking takes a second.

    Later collections leave out all that was imported, and so does the one when the process ends.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
