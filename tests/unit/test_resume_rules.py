"""What a resume says of settings that may change."""

from __future__ import annotations

import logging
import re
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.configs import load
from helpers.data_run import write_dataset

from shardtune.checkpoint.resume_rules import log_changes
from shardtune.config_io import to_dict
from shardtune.data.schedule import Position, Schedule
from shardtune.distributed.layout import Layout
from shardtune.training.data_and_schedule import changed_rate

BATCH = "train.gradient_accumulation_steps"


@pytest.mark.parametrize(
    ("before", "ranks_before", "now", "ranks", "rows", "keeps"),
    [
        ([f"{BATCH}=2"], 16, [f"{BATCH}=2"], 8, (32, 16), f"{BATCH}=4 keeps 32"),
        (["train.micro_batch_size=2"], 16, [], 8, (32, 8), f"{BATCH}=4 keeps 32"),
        ([], 8, [], 16, (8, 16), f"no {BATCH} keeps 8: each step adds 16 rows"),
        ([f"{BATCH}=2"], 16, [], 6, (32, 6), f"no {BATCH} keeps 32: each step adds 6 rows"),
        (["parallel.context=2"], 8, [], 8, (4, 8), f"no {BATCH} keeps 4: each step adds 8 rows"),
        (
            [],
            2,
            ["parallel.stages=4", f"{BATCH}=4"],
            4,
            (2, 4),
            f"no {BATCH} keeps 2: each step adds 1 row",
        ),
        ([f"{BATCH}=2"], 16, [f"{BATCH}=4"], 8, (32, 32), None),
        (["parallel.context=2"], 16, [], 8, (8, 8), None),
        ([], 16, ["parallel.stages=2", f"{BATCH}=2"], 16, (16, 16), None),
    ],
)
def test_a_resume_warns_of_another_effective_batch(
    before, ranks_before, now, ranks, rows, keeps, tmp_path, caplog
):
    """With the value that keeps it, where there is one."""
    config = load(tmp_path, *now)
    world: Any = SimpleNamespace(size=ranks, layout=Layout.of(config, ranks))
    state = {"config": to_dict(load(tmp_path, *before))}
    state["config"]["parallel"]["of_another_version"] = 1
    resumed: Any = SimpleNamespace(name="step-7", state=state, world_size=ranks_before)
    with caplog.at_level(logging.WARNING, "shardtune"):
        log_changes(resumed, config, world)
    expected = [f"Effective batch was {rows[0]} rows, is {rows[1]}: {keeps}"] if keeps else []
    assert [message[: len(expected[0])] for message in caplog.messages] == expected


@pytest.mark.parametrize(
    ("now", "rates"),
    [
        ([], None),
        (["train.epochs=3"], ("0.0001", "0.000625")),
        (["train.max_steps=4"], None),
        (["train.epochs=3", "optimizer.lr=0"], ("0.0001", "0")),
        (["scheduler.name=constant", "train.epochs=2"], ("0.0001", "0.001")),
    ],
)
def test_a_resume_says_how_the_learning_rate_leaps(now, rates, tmp_path):
    before = ["train.epochs=1", "optimizer.lr=1e-3", "scheduler.name=linear"]
    before += ["scheduler.warmup_ratio=0.0"]
    state = {"config": to_dict(load(tmp_path, *before))}
    resumed = SimpleNamespace(name="step-4", step=4, state=state, world_size=1)
    config = load(tmp_path, *before, *now)
    dataset = write_dataset(tmp_path, [([1, 2], [False, True])] * 4)
    schedule = Schedule(
        dataset, 8, False, 0, 1, config.train.epochs, config.train.max_steps, Position(4, 1, 0)
    )
    run: Any = SimpleNamespace(config=config, resumed=resumed)
    said = [re.findall(r"\d[\de.-]*", line) for line in changed_rate(run, schedule)]
    assert [tuple(each[:3]) for each in said] == ([(*rates, "5")] if rates else [])
