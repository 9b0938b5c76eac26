"""The thread that makes the batches of the coming steps."""

from __future__ import annotations

import threading
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.ranks import world_of
from torch import distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

import shardtune.training.prefetch
from shardtune.data.batch import build_batch
from shardtune.data.schedule import Position, Schedule, make_schedule
from shardtune.distributed.rank_record import this_rank
from shardtune.distributed.world import World
from shardtune.model.flops import cost_of
from shardtune.training.prefetch import prefetch


class Sequences:
    """60 sequences of 1 to 20 tokens; `effect` is called before each is read."""

    def __init__(self, effect: Any = lambda: None) -> None:
        self.lengths = np.random.default_rng(0).integers(1, 21, 60).astype(np.int32)
        self.trained_counts = self.lengths - 1
        self.effect, self.read = effect, 0

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        self.read += 1
        self.effect()
        return np.full(self.lengths[i], i), np.ones(self.lengths[i], np.bool_)


@pytest.fixture
def model(models: dict[str, Path]) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(models["llama"]))


@pytest.fixture
def world() -> World:
    return world_of(1, 2, dist.HashStore())


def schedule_of(sequences: Sequences) -> Schedule:
    given: Any = {
        "max_length": 30,
        "packing": True,
        "seed": 1,
        "rows_per_step": 4,
        "epochs": 2,
        "max_steps": None,
    }
    return make_schedule(sequences, start=Position(), **given)


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def test_the_loop_gets_each_step_with_its_batches_in_order(model, world):
    schedule = schedule_of(Sequences())
    with prefetch(schedule, model, 1, True, world) as steps:
        fed = [(step.number, world.progress.record.place, batches) for step, batches in steps]
        assert [(number, place) for number, place, _ in fed] == [
            (number, f"step {number} (data)") for number in range(1, schedule.total_steps + 1)
        ]
    for step, (_, _, batches) in zip(schedule.steps(), fed, strict=True):
        shares = step.micro_batches(cost_of(model), 1, 2, 1)
        assert len(shares) == len(batches)
        for share, batch in zip(shares, batches, strict=True):
            assert torch.equal(
                batch.input_ids, build_batch(schedule.dataset, share, True).input_ids
            )
    assert not prefetch_threads()


def test_no_more_than_two_steps_are_made_ahead(model, world):
    sequences = Sequences()
    schedule = schedule_of(sequences)
    sequences_per_step = [
        sum(map(len, step.micro_batches(cost_of(model), 1, 2, 1))) for step in schedule.steps()
    ]
    with prefetch(schedule, model, 1, True, world) as steps:
        for taken in range(3):
            time.sleep(0.2)
            assert sequences.read == sum(sequences_per_step[: taken + 2])
            next(steps)


def test_an_error_in_the_thread_is_raised_in_the_loop_with_its_traceback(model, world):
    def fail_later() -> None:
        if sequences.read == 30:
            raise OSError("the disk is gone")

    sequences, taken = Sequences(fail_later), 0
    with (
        pytest.raises(OSError, match="the disk is gone") as raised,
        prefetch(schedule_of(sequences), model, 1, True, world) as steps,
    ):
        for _ in steps:
            taken += 1
    assert taken > 0
    assert {"fail_later", "build_batch", "__getitem__"} <= {
        frame.name for frame in traceback.extract_tb(raised.tb)
    }
    assert world.progress.record.place == f"step {taken + 1} (data)"
    assert not prefetch_threads()


def test_the_thread_ends_with_a_loop_that_fails(model, world):
    with (
        pytest.raises(ZeroDivisionError),
        prefetch(schedule_of(Sequences()), model, 1, True, world) as steps,
    ):
        next(steps)
        raise ZeroDivisionError
    assert not prefetch_threads()


def test_while_the_loop_waits_the_rank_is_where_the_thread_is(model, world):
    go_on, threads = threading.Event(), []

    def note_thread() -> None:
        threads.append(this_rank().thread)
        go_on.set()

    with prefetch(schedule_of(Sequences(go_on.wait)), model, 1, True, world) as steps:
        (thread,) = prefetch_threads()
        threading.Timer(0.1, note_thread).start()
        next(steps)
        assert threads == [thread.ident] and this_rank().thread == threading.get_ident()


def test_a_thread_that_hangs_keeps_neither_the_loop_nor_the_process(model, world, monkeypatch):
    monkeypatch.setattr(shardtune.training.prefetch, "_JOIN_S", 0.1)
    go_on = threading.Event()
    sequences = Sequences(lambda: sequences.read == 1 or go_on.wait())
    with prefetch(schedule_of(sequences), model, 1, True, world):
        (thread,) = prefetch_threads()
        while sequences.read < 2:
            time.sleep(0.01)
        started = time.monotonic()
    assert time.monotonic() - started < 1
    assert thread.is_alive() and thread.daemon
    go_on.set()
    thread.join(10)
    assert not thread.is_alive() and sequences.read < 20
