"""Python's garbage collector, run at the same step on all ranks: whenever one rank pauses for it, the others wait."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_EVERY_STEPS = 50


@contextlib.contextmanager
def collected_by_step() -> Iterator[None]:
    """Collect nothing but what `collect_at` does, and never look again at what is there now."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def collect_at(step: int) -> None:
    """Every rank calls it after each step; each fiftieth time it collects."""
    if step % _EVERY_STEPS == 0:
        gc.collect()
