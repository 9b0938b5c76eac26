"""The thread that makes the batches of the coming steps."""

import threading
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.ranks import world_of
from torch import distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from shardtune.data.schedule import Position, Schedule
from shardtune.distributed.rank_record import this_rank
from shardtune.model.flops import cost_of
from shardtune.training.data_and_schedule import prefetch


class Sequences:
    """60 sequences of 1 to 20 tokens; `effect` is called before each is read."""

    def __init__(self, effect: Any = lambda: None) -> None:
        self.lengths = np.random.default_rng(0).integers(1, 21, 60).astype(np.int32)
        self.trained_counts = self.trained_weights = self.lengths - 1
        self.source, self.begins_record = np.zeros(60, np.uint16), np.ones(60, np.bool_)
        self.effect, self.read = effect, 0

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        self.read += 1
        self.effect()
        return np.full(self.lengths[i], i), np.ones(self.lengths[i], np.bool_)


@pytest.fixture
def context(models: dict[str, Path]) -> Any:
    """That of rank 1 of 2, with one row in a micro-batch."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(models["llama"]))
    config = SimpleNamespace(train=SimpleNamespace(micro_batch_size=1))
    run = SimpleNamespace(world=world_of(1, 2, dist.HashStore()), config=config)
    return SimpleNamespace(run=run, model=model, row_cost=cost_of(model), is_flat=True)


def schedule_of(sequences: Sequences) -> Schedule:
    given: Any = {"max_length": 30, "packing": True, "seed": 1, "rows_per_step": 4}
    return Schedule(sequences, start=Position(), epochs=2, max_steps=None, **given)


def test_no_more_than_two_steps_are_made_ahead(context):
    sequences = Sequences()
    schedule = schedule_of(sequences)
    sequences_per_step = [
        sum(map(len, step.micro_batches(cost_of(context.model), 1, 2, 1)))
        for step in schedule.steps()
    ]
    steps = prefetch(context, schedule)
    for taken in range(1, 4):
        next(steps)
        time.sleep(0.2)
        assert sequences.read == sum(sequences_per_step[: taken + 2])


def test_an_error_in_the_thread_is_raised_in_the_loop_with_its_traceback(context):
    def fail_later() -> None:
        if sequences.read == 30:
            raise OSError("the disk is gone")

    sequences, taken = Sequences(fail_later), 0
    with pytest.raises(OSError, match="the disk is gone") as raised:
        for _ in prefetch(context, schedule_of(sequences)):
            taken += 1
    assert taken > 0
    assert {"fail_later", "build_batch", "__getitem__"} <= {
        frame.name for frame in traceback.extract_tb(raised.tb)
    }
    assert context.run.world.progress.record.place == f"step {taken + 1} (data)"


def test_while_the_loop_waits_the_rank_is_where_the_thread_is(context):
    go_on, waited_in, made_by = threading.Event(), [], []

    def make() -> None:
        made_by.append(threading.get_ident())
        go_on.wait()

    def note_thread() -> None:
        until = time.monotonic() + 10  # the loop may come to its wait later than the thread
        while this_rank().thread not in made_by and time.monotonic() < until:
            time.sleep(0.01)
        waited_in.append(this_rank().thread)
        go_on.set()

    threading.Timer(0.1, note_thread).start()
    next(prefetch(context, schedule_of(Sequences(make))))
    assert waited_in == made_by[:1] and this_rank().thread == threading.get_ident()
