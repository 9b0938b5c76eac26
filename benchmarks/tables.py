"""Sentences and tables of the results, in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from benchmarks.sides import TOLERANCE


def table(header: str, rows: Sequence[str]) -> list[str]:
    """Return the lines of a table, and an empty line."""
    return [header, "|---" * (header.count("|") - 1) + "|", *rows, ""]


def spread(values: Sequence[float]) -> str:
    """Format median, smallest and largest, with three digits or more."""
    three = (median(values), min(values), max(values))
    middle, low, high = (f"{value:.0f}" if value >= 100 else f"{value:.3g}" for value in three)
    return f"{middle} ({low} to {high})"


def describe_losses(dtype: str, losses: Mapping[str, Sequence[float]], reference: str) -> str:
    """Say how near the losses are to the reference's, and how far the reference's moved."""
    expected = losses[reference]
    furthest = max(
        abs(a - b) / abs(b)
        for of_side in losses.values()
        for a, b in zip(of_side, expected, strict=True)
    )
    return (
        f"At every step the losses of all sides are within {TOLERANCE[dtype]:.2%} of the "
        f"reference's, relative to it "
        f"(the furthest is {furthest:.4%} away), which goes from {expected[0]:.4f} to "
        f"{expected[-1]:.4f}."
    )
