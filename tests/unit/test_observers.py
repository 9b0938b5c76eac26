"""What observers of steps say: lines with their speed, spikes of the loss, the slowest rank."""

import random
import re
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from helpers.data_run import log_lines
from helpers.ranks import world_of
from torch import distributed as dist

from shardtune.config import Config
from shardtune.log import setup_logging
from shardtune.model.flops import DevicePeak, MfuMeter
from shardtune.training.observers.metrics import Metrics, StepEnded, StepStats
from shardtune.training.observers.step_log import LossSpikes, StepLog
from shardtune.training.observers.stragglers import slowest


def test_a_line_has_the_mean_speed_since_the_line_before_it(tmp_path, capsys):
    setup_logging(True, True)
    metrics = Metrics(tmp_path / "metrics.jsonl", world_of(0, 1, dist.HashStore()), None)
    mfu = MfuMeter(None, "no layer is known", DevicePeak(None, "known"), 1)
    saver: Any = SimpleNamespace(not_saved="")
    log = StepLog(metrics, mfu, 20, saver)
    stats = StepStats(1.5, 0.5, False, 10**9, 0, 0.0, np.empty(0))
    for number, seconds in enumerate([8.0, 2.0, 1.0, 1.0], 1):
        step: Any = SimpleNamespace(
            number=number, epoch=0, tokens=100, trained_tokens=9, lengths=np.array([100])
        )
        ended = StepEnded(step, stats, 1e-3, seconds, {}, is_due=number % 2 == 0)
        saver.not_saved = "checkpoint_0000002 was not saved: why" * (number == 4)
        log.step_ended(cast(StepEnded, ended))
    first, second = re.findall(r"^Step .*", capsys.readouterr().out, re.MULTILINE)
    assert first.startswith("Step 2/20 | Loss: 1.5000 | Grad Norm: 0.500 | LR: 1.00e-03 | ")
    assert " | 0.200 it/s | 20 tok/s | 1.0 GB | ETA 1m30s | " in first
    assert " | 1.00 it/s | 100 tok/s | 1.0 GB | ETA 0m16s | " in second
    assert second.endswith(" | checkpoint_0000002 was not saved: why") and "not saved" not in first


NOISE = random.Random(0)
FALLING = [3 - i / 100 + NOISE.gauss(0, 0.1) for i in range(100)]


def spikes(losses: list[float]) -> list[str]:
    config = cast(Config, SimpleNamespace(run=SimpleNamespace(dir="runs/mine")))
    observer = LossSpikes(config)
    with log_lines() as lines:
        for number, loss in enumerate(losses, start=1):
            step: Any = SimpleNamespace(number=number)
            stats: Any = SimpleNamespace(loss=loss)
            observer.step_ended(StepEnded(step, stats, 1e-3, 1.0, {}, False))
    return lines


@pytest.mark.parametrize(
    ("losses", "named"),
    [
        (FALLING, []),
        ([*FALLING[:60], 5.0, *FALLING[60:]], [61]),
        ([*FALLING[:19], 5.0], []),  # too few to tell
        ([*FALLING[:20], 5.0], [21]),
        ([1.0] * 30 + [1.1] + [1.0] * 9, []),  # little, where nothing scatters
        ([1.0] * 30 + [1.3, 1.0, 1.3], [31, 33]),
        ([3.0] * 30 + [1.0], []),  # downward
        ([1.0] * 60 + [2.0] * 60, list(range(61, 86))),  # until the median has followed
    ],
)
def test_a_spike_is_named_with_its_command(losses, named):
    lines = spikes(losses)
    assert [line.partition(" in step ")[2].partition(",")[0] for line in lines] == [
        *map(str, named)
    ]
    for number, line in zip(named, lines, strict=True):
        assert line.startswith("loss spike: ")
        command = "python -m shardtune inspect-data --config runs/mine/config.yaml --step"
        assert line.endswith(f": {command} {number}")


def test_the_slowest_rank_is_the_one_whose_phases_exceed_the_median():
    # The medians are 1.0 and 0.3, neither the least nor the most of the others.
    seconds = [[0.0, 0.1], [1.0, 0.9], [1.0, 0.2], [1.0, 0.3], [1.0, 0.4]]
    assert slowest(seconds, 5) == (1, pytest.approx(1.9 / 1.3), 1)
    assert slowest([[0.1, 1.0, 0.1], [1.1, 0.9, 0.1]], 2) == (1, pytest.approx(2.1 / 1.2), 0)
    # Not the longest phase, but the one that is longer than the others'.
    assert slowest([[3.0, 1.0, 0.1], [3.1, 2.0, 0.1], [3.0, 1.1, 0.1]], 3)[::2] == (1, 1)
    assert slowest([[1.0, 1.0, 1.0]], 1) == (0, 1.0, 0)


def test_a_rank_is_held_against_those_of_its_stage():
    """The second stage has more work, and the rank that is slow for its own is in it."""
    seconds = [[0.1, 1.0], [0.1, 1.1], [0.1, 3.0], [0.1, 6.1]]
    assert slowest(seconds, 2) == (3, pytest.approx(2.0), 1)
    assert slowest([*seconds[3:1:-1], *seconds[:2]], 2)[0] == 0
