"""Garbage is collected at every fiftieth micro-batch, and not while a process imports."""

from __future__ import annotations

import gc
import weakref
from itertools import count

from shardtune import garbage_collection
from shardtune.garbage_collection import imports_without_gc


def test_garbage_is_collected_at_every_fiftieth_micro_batch_alone(monkeypatch):
    class Cycle:
        def __init__(self) -> None:
            self.me = self

    monkeypatch.setattr(garbage_collection, "_micro_batches", count(1))
    with garbage_collection.collected_by_micro_batch():
        assert not gc.isenabled() and gc.get_freeze_count() > 0
        lost = weakref.ref(Cycle())
        for _ in range(49):
            garbage_collection.collect_if_due()
            assert lost() is not None
        garbage_collection.collect_if_due()
        assert lost() is None
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_nothing_is_collected_during_imports_and_later_collections_leave_them_out():
    gc.unfreeze()
    with imports_without_gc():
        assert not gc.isenabled()
    assert gc.isenabled() and gc.get_freeze_count() > 0
    gc.unfreeze()
