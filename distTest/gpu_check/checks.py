"""The checks in their order, and their outcomes. Imports the standard library alone."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

LIMIT_S = 510  # the limit of one command


@dataclass(frozen=True)
class Check:
    """`function` is `module.name` within this package.

    `seconds`: estimated for an H100. `is_timed`: the check is skipped on a GPU that multiplies too
    slowly.
    """

    name: str
    function: str
    seconds: int
    is_timed: bool = False


DEVICE = Check("device", "device.device", 15)
# The most useful checks come first. LIMIT_S is enough for all of them.
CHECKS = [
    DEVICE,
    Check("smoke", "device.smoke", 45),
    Check("attention", "exactness.attention", 15),
    Check("experts", "exactness.experts", 15),
    Check("optimizer", "optimizer.optimizer", 50),
    Check("loss-head", "exactness.loss_head", 15),
    Check("losses", "training.losses", 80),
    Check("speed-glm-4.5-air", "speed.glm", 140, is_timed=True),
    Check("speed-llama3-8b-lora", "speed.llama_lora", 130, is_timed=True),
]


class Outcome(NamedTuple):
    """The outcome of a check that passed: a line for the table, and its figures."""

    summary: str
    figures: dict[str, Any]


class Failed(Exception):
    """The check found something wrong: a line for the table, and its figures."""

    def __init__(self, summary: str, figures: dict[str, Any] | None = None) -> None:
        super().__init__(summary)
        self.figures = figures or {}


class Skipped(Exception):
    """The check cannot be made here; the message says what it lacks."""


def result_path() -> Path:
    """Return the file of this check's outcome, beside which its other files lie."""
    return Path(os.environ["GPU_CHECK_RESULT"])


def is_tiny() -> bool:
    return bool(os.environ.get("GPU_CHECK_TINY"))


def require(problems: list[str], summary: str, figures: dict[str, Any]) -> Outcome:
    if problems:
        raise Failed("; ".join([*problems, summary]), figures)
    return Outcome(summary, figures)
