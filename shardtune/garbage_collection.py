"""When Python's garbage collector runs: never while modules are imported, and at the same
micro-batches on all ranks, because all ranks wait in their next collective for one that collects.
"""

import contextlib
import gc
from collections.abc import Iterator
from itertools import count

# With activation checkpointing each micro-batch leaves some 12 kB a layer.
_EVERY_MICRO_BATCHES = 50
_micro_batches = count(1)  # both training and evaluation count


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


@contextlib.contextmanager
def collected_by_micro_batch() -> Iterator[None]:
    """Leave collecting to `collect_if_due`, and never scan again the objects that exist now."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def collect_if_due() -> None:
    """Count a micro-batch, and collect after every fiftieth. All ranks call this equally often."""
    if next(_micro_batches) % _EVERY_MICRO_BATCHES == 0:
        gc.collect()
