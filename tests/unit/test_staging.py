"""Saves that write from a copy which is allocated once, while training changes the tensors."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.thread_ranks import Run, on_threads, thread_worlds

from shardtune.checkpoint import saver


def test_a_save_writes_over_the_copy_only_after_the_save_before(tmp_path, monkeypatch):
    disk_answers, places = threading.Event(), []

    def write_slowly(path: Path, tensors: Mapping[str, torch.Tensor], *more: Any) -> Any:
        places.append({name: t.data_ptr() for name, t in tensors.items() if "random" not in name})
        assert disk_answers.wait(60)
        return write(path, tensors, *more)

    write = saver._write_rank_file
    monkeypatch.setattr(saver, "_write_rank_file", write_slowly)
    run = Run(tmp_path)
    run.save(1)
    run.weight.data.fill_(9)  # training goes on
    second = threading.Thread(target=run.save, args=(2,))
    second.start()
    second.join(0.5)
    assert second.is_alive()
    disk_answers.set()
    second.join(60)
    run.weight.data.fill_(9)
    run.finish()
    assert (run.saved(1) == 1).all()
    assert (run.saved(2) == 2).all()
    first, again = ({k: v for rank in places[i : i + 2] for k, v in rank.items()} for i in (0, 2))
    assert first == again
    assert len(first) == 8  # weight and bias with their states
    assert all(place % 64 == 0 for place in first.values())


def test_saves_are_synchronous_where_the_copy_does_not_fit(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(saver, "available_memory", lambda: 100)
    monkeypatch.setattr(saver.logger, "propagate", True)
    with caplog.at_level(logging.INFO):
        run = Run(tmp_path)
    assert caplog.messages[0].startswith("Checkpoint staging: checkpoint.mode=async needs 0.0 GB")
    run.save(1)
    assert (run.saved(1) == 1).all()  # before `finish`
    run.finish()


@pytest.mark.parametrize(("copies", "is_staged"), [(1.5, False), (2.5, True)])
def test_a_node_needs_memory_for_the_copies_of_all_its_ranks(copies, is_staged, monkeypatch):
    tensors = {"weight": torch.zeros(1000)}
    free = int(copies * saver.staged_bytes(tensors))
    monkeypatch.setattr(saver, "available_memory", lambda: free)
    worlds = [replace(world, node_rank=0) for world in thread_worlds(2)]
    made = on_threads(worlds, lambda world: saver.make_staging(tensors, world))
    assert [each is not None for each in made] == [is_staged] * 2
