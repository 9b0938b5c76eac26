"""The checks in their order, and their outcomes. Imports the standard library alone."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

LIMIT_S = 510  # the limit of one command
WHOLE_S = 3000  # for all checks


@dataclass(frozen=True)
class Check:
    """`function` is `module.name` within this package.

    `seconds`: estimated for an H100. `needs_project`: the check imports shardtune, which needs a
    new PyTorch. `is_timed`: the check is skipped on a GPU that multiplies too slowly. Without
    `takes_all_gpus` the check sees the first GPU alone, since HF Trainer would take all.
    """

    name: str
    function: str
    seconds: int
    needs_project: bool = True
    is_timed: bool = False
    takes_all_gpus: bool = False


DEVICE = Check("device", "device.device", 15, needs_project=False)
# The most useful checks come first. LIMIT_S is enough for all of FIRST; with `--more`, which leaves
# them out, it is enough for SECOND up to `memory-lora`.
FIRST = [
    DEVICE,
    Check("smoke", "device.smoke", 45),
    Check("attention", "exactness.attention", 15),
    Check("experts", "exactness.experts", 15),
    Check("optimizer", "optimizer.optimizer", 50),
    Check("loss-head", "exactness.loss_head", 15),
    Check("losses", "training.losses", 60),
    Check("speed-glm-4.5-air", "glm.rows_of_4096", 140, is_timed=True),
    Check("speed-llama3-8b-lora", "speed.llama3_8b_lora", 130, is_timed=True),
]
SECOND = [
    Check("speed-llama3-8b", "speed.llama3_8b", 140, is_timed=True),
    Check("speed-qwen3-8b-lora", "speed.qwen3_8b_lora", 130, is_timed=True),
    Check("resume", "training.resume", 50),
    Check("offload", "training.offload", 30),
    Check("ceiling", "ceiling.ceiling", 25, is_timed=True),
    Check("packing", "packing.packing", 20),
    Check("memory-dense-8b", "memory.dense_8b", 45),
    Check("memory-lora", "memory.lora", 45),
    Check("async-save", "training.async_save", 45),
    Check("two-gpus", "training.two_gpus", 180, takes_all_gpus=True),
    Check("speed-glm-4.5-air-8192", "glm.rows_of_8192", 280, is_timed=True),
]
CHECKS = FIRST + SECOND


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
    """Return whether shapes are small, as a pretended GPU needs."""
    return bool(os.environ.get("GPU_CHECK_TINY"))


def require(problems: list[str], summary: str, figures: dict[str, Any]) -> Outcome:
    """Return the outcome of a check, or raise Failed if there are problems."""
    if problems:
        raise Failed("; ".join([*problems, summary]), figures)
    return Outcome(summary, figures)
