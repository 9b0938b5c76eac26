"""The checks, in order, and what a check may do. Imports the standard library alone."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Check:
    """`function` is `module.name` within this package; `seconds` is what it takes, about.

    `needs_project`: it imports shardtune, and so a PyTorch that is new enough.
    """

    name: str
    function: str
    seconds: int
    needs_project: bool = True


CHECKS = [
    Check("device", "device.device", 15, needs_project=False),
    Check("attention", "kernels.attention", 15),
    Check("loss-head", "kernels.loss_head", 15),
    Check("optimizer", "optimizer.optimizer", 60),
    Check("packing", "packing.packing", 20),
    Check("losses", "training.losses", 45),
    Check("resume", "training.resume", 50),
    Check("memory-dense-8b", "memory.dense_8b", 45),
    Check("memory-glm", "memory.glm", 45),
    Check("memory-lora", "memory.lora", 45),
    Check("async-save", "training.async_save", 45),
    Check("compile", "training.compiled_layers", 60),
    *(
        Check(f"speed-{shape}", f"speed.{shape.replace('-', '_').replace('.', '_')}", 75)
        for shape in ("qwen3-1.7b", "glm-4.5-air", "llama3-8b", "qwen3-4b")
    ),
]


class Outcome(NamedTuple):
    """What a check that passed has to say: a line for the table, and its figures."""

    summary: str
    figures: dict[str, Any]


class Failed(Exception):
    """The check found something wrong: a line for the table, and its figures."""

    def __init__(self, summary: str, figures: dict[str, Any] | None = None) -> None:
        super().__init__(summary)
        self.figures = figures or {}


class Skipped(Exception):
    """The check cannot be made here; the message says what it lacks."""


def is_tiny() -> bool:
    """Whether shapes are to be those of a GPU that is pretended."""
    return bool(os.environ.get("GPU_CHECK_TINY"))


def require(problems: list[str], summary: str, figures: dict[str, Any]) -> Outcome:
    """Return the outcome of a check without problems.

    Raises:
        Failed: with the problems.
    """
    if problems:
        raise Failed("; ".join([*problems, summary]), figures)
    return Outcome(summary, figures)
