"""Python's garbage collector, run at the same micro-batch on all ranks: while one pauses for it, the others wait."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from itertools import count

# With activation checkpointing each leaves some 12 kB a layer.
_EVERY_MICRO_BATCHES = 50
_micro_batches = count(1)  # of training and of evaluation


@contextlib.contextmanager
def collected_by_micro_batch() -> Iterator[None]:
    """Collect nothing but what `micro_batch_ended` does, and never look again at what is there now."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def micro_batch_ended() -> None:
    """Every rank calls it after each micro-batch; each fiftieth time it collects."""
    if next(_micro_batches) % _EVERY_MICRO_BATCHES == 0:
        gc.collect()
