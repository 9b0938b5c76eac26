"""Define a measurement of each step: a class with `step_ended`, and a line in `observers`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from shardtune.data.schedule import Step
from shardtune.training.observers.metrics import StepStats


class StepEnded(NamedTuple):
    """A step whose weights are updated."""

    step: Step
    stats: StepStats
    lr: float
    seconds: float  # since the previous step ended, without evaluation and saves
    seconds_by_phase: Mapping[str, float]  # this rank's phases without their waits, and `waiting`
    is_due: bool  # by logging.every_steps, or the last one


class StepObserver:
    """A measurement of the steps. All ranks call every method of all observers in one order."""

    def step_begins(self, number: int) -> None:
        """Prepare to measure: the forward comes next."""

    def step_ended(self, ended: StepEnded) -> None:
        """Take the numbers of a step, before its evaluation and its save."""

    def between_steps(self) -> None:
        """Do long work after each step and its evaluation and save, while no clock runs."""
