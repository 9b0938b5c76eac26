"""The thread that makes the batches of the coming steps, the collector that waits for its micro-batch, and the one time
in a step that the host asks the device for numbers."""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
import traceback
import weakref
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import REPOSITORY, chats, read_metrics, write_jsonl
from helpers.ranks import on_ranks, run_script, world_of
from torch import distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from shardtune.data.batch import build_batch
from shardtune.data.schedule import Position, Schedule, make_schedule
from shardtune.distributed.world import World
from shardtune.model import loss
from shardtune.model.flops import cost_of
from shardtune.training import evaluate
from shardtune.training import garbage_collection as garbage
from shardtune.training import prefetch as feeding
from shardtune.training.metrics import Metrics
from shardtune.training.prefetch import prefetch as feed


class Sequences:
    """60 sequences of 1 to 20 tokens; `effect` comes before each is read."""

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


def feeders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def test_the_loop_gets_each_step_with_its_batches_in_order(model, world):
    schedule = schedule_of(Sequences())
    with feed(schedule, model, 1, True, world) as steps:
        fed = [(step.number, world.progress.place, batches) for step, batches in steps]
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
    assert not feeders()


def test_no_more_than_two_steps_are_made_ahead(model, world):
    sequences = Sequences()
    schedule = schedule_of(sequences)
    of_steps = [
        sum(map(len, step.micro_batches(cost_of(model), 1, 2, 1))) for step in schedule.steps()
    ]
    with feed(schedule, model, 1, True, world) as steps:
        for taken in range(3):
            time.sleep(0.2)
            assert sequences.read == sum(of_steps[: taken + 2])
            next(steps)


def test_what_fails_in_the_thread_is_raised_in_the_loop_with_its_traceback(model, world):
    def fail_later() -> None:
        if sequences.read == 30:
            raise OSError("the disk is gone")

    sequences, taken = Sequences(fail_later), 0
    with (
        pytest.raises(OSError, match="the disk is gone") as raised,
        feed(schedule_of(sequences), model, 1, True, world) as steps,
    ):
        for _ in steps:
            taken += 1
    assert taken > 0
    assert {"fail_later", "build_batch", "__getitem__"} <= {
        frame.name for frame in traceback.extract_tb(raised.tb)
    }
    assert world.progress.place == f"step {taken + 1} (data)"
    assert not feeders()


def test_the_thread_ends_with_a_loop_that_fails(model, world):
    with (
        pytest.raises(ZeroDivisionError),
        feed(schedule_of(Sequences()), model, 1, True, world) as steps,
    ):
        next(steps)
        raise ZeroDivisionError
    assert not feeders()


def test_where_the_thread_is_that_the_loop_waits_for_is_where_the_rank_is(model, world):
    go_on, seen = threading.Event(), []

    def look() -> None:
        seen.extend(frame.name for frame in traceback.extract_stack(world.progress.frame()))
        go_on.set()

    with feed(schedule_of(Sequences(go_on.wait)), model, 1, True, world) as steps:
        threading.Timer(0.1, look).start()
        next(steps)
        assert "build_batch" in seen and "wait" in seen
        assert world.progress.frame().f_back is sys._getframe()


def test_a_thread_that_hangs_keeps_neither_the_loop_nor_the_process(model, world, monkeypatch):
    monkeypatch.setattr(feeding, "_JOIN_S", 0.1)
    go_on = threading.Event()
    sequences = Sequences(lambda: sequences.read == 1 or go_on.wait())
    with feed(schedule_of(sequences), model, 1, True, world):
        (thread,) = feeders()
        while sequences.read < 2:
            time.sleep(0.01)
        started = time.monotonic()
    assert time.monotonic() - started < 1
    assert thread.is_alive() and thread.daemon
    go_on.set()
    thread.join(10)
    assert not thread.is_alive() and sequences.read < 20


def test_a_look_at_where_the_rank_is_keeps_nothing_alive(world):
    def look_at_tensor() -> weakref.ref[torch.Tensor]:
        tensor = torch.zeros(1)
        world.progress.frame()
        return weakref.ref(tensor)

    with garbage.collected_by_micro_batch():
        assert look_at_tensor()() is None


def test_garbage_is_collected_at_every_fiftieth_micro_batch_alone(monkeypatch):
    class Cycle:
        def __init__(self) -> None:
            self.me = self

    monkeypatch.setattr(garbage, "_micro_batches", count(1))
    with garbage.collected_by_micro_batch():
        assert not gc.isenabled() and gc.get_freeze_count() > 0
        lost = weakref.ref(Cycle())
        for _ in range(49):
            garbage.micro_batch_ended()
            assert lost() is not None
        garbage.micro_batch_ended()
        assert lost() is None
    assert gc.isenabled() and gc.get_freeze_count() == 0


def run_and_note_collections(arguments: list[str]) -> None:
    """Write to `collected<rank>` before which micro-batch of training or of evaluation garbage is collected."""
    vars(garbage)["_EVERY_MICRO_BATCHES"] = 3
    micro_batches: Counter[str] = Counter()
    original = loss.summed_loss

    def counted(phase: str) -> Any:
        def summed_loss(*given: Any) -> torch.Tensor:
            micro_batches[phase] += 1
            return original(*given)

        return summed_loss

    vars(loss)["summed_loss"], vars(evaluate)["summed_loss"] = (
        counted("training"),
        counted("evaluation"),
    )

    def note(when: str, _: Any) -> None:
        if when == "start" and not gc.isenabled():
            with Path(f"collected{os.environ['RANK']}").open("a", encoding="utf-8") as file:
                file.write(
                    json.dumps([micro_batches["training"], micro_batches["evaluation"]]) + "\n"
                )

    gc.callbacks.append(note)
    run_script(arguments)


def on_two_ranks(work: Any, folder: Path, model: Path, *assignments: str) -> None:
    """Run `work` with the arguments of a short run in this folder, which must succeed."""
    write_jsonl(folder / "train.jsonl", chats(30))
    (folder / "config.yaml").touch()
    arguments = [
        "--config",
        "config.yaml",
        f"model.path={model}",
        "data.train=train.jsonl",
        "run.dir=run",
    ]
    arguments += [
        "data.max_length=128",
        "export.final=false",
        "checkpoint.every_steps=0",
        *assignments,
    ]
    done = on_ranks(2, work, arguments, cwd=folder)
    assert done.returncode == 0, done.stderr


def test_every_rank_collects_garbage_at_the_same_micro_batches_of_training_and_evaluation(
    tmp_path, models
):
    each = ("data.eval=train.jsonl", "train.gradient_accumulation_steps=4", "train.max_steps=2")
    on_two_ranks(run_and_note_collections, tmp_path, models["llama"], *each)
    first, second = (
        (tmp_path / f"collected{rank}").read_text(encoding="utf-8").splitlines()
        for rank in range(2)
    )
    collected = [json.loads(line) for line in first]
    assert first == second and [sum(at) for at in collected] == [
        3 * (n + 1) for n in range(len(collected))
    ]
    assert {0, 8} < {of_training for of_training, _ in collected}, (
        "before and after the steps, and within them"
    )


def run_and_count(arguments: list[str]) -> None:
    """Write to `metrics.jsonl`, with each step, which of our functions asked a tensor for its numbers during it."""
    asked: Counter[str] = Counter()

    def counted(name: str) -> Any:
        original = getattr(torch.Tensor, name)

        def ask(tensor: torch.Tensor, *given: Any, **named: Any) -> Any:
            code = sys._getframe(1).f_code
            if (
                threading.current_thread() is threading.main_thread()
                and code.co_filename.startswith(
                    (str(REPOSITORY / "shardtune"), str(REPOSITORY / "train_fsdp.py"))
                )
            ):
                asked[code.co_name] += 1
            return original(tensor, *given, **named)

        return ask

    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__"):
        setattr(torch.Tensor, name, counted(name))
    write = Metrics.write

    def write_asked(metrics: Metrics, kind: str, **values: Any) -> None:
        if kind == "step":
            values["asked"] = dict(asked)
            asked.clear()
        write(metrics, kind, **values)

    Metrics.write = write_asked
    run_script(arguments)


def test_a_step_asks_the_device_for_numbers_once(tmp_path, models):
    each = ("train.gradient_accumulation_steps=2", "train.max_steps=13", "train.epochs=99")
    on_two_ranks(run_and_count, tmp_path, models["llama"], *each)
    steps = read_metrics(tmp_path / "run", "step")
    assert [step["asked"] for step in steps[1:]] == [{"all_gather_step_stats": 1}] * 12, (
        "also where the slowest rank is looked for"
    )
