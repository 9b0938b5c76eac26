"""A step whose loss stands far above the others is named, with the command that shows it."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from helpers.data_run import log_lines

from shardtune.config import Config
from shardtune.training.observers.metrics import StepEnded
from shardtune.training.observers.step_log import LossSpikes

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
