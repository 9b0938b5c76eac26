"""Sentences and tables of the results, in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.sides import TOLERANCE


def table(header: str, rows: Sequence[str]) -> list[str]:
    """Return the lines of a table, and an empty line."""
    return [header, "|---" * (header.count("|") - 1) + "|", *rows, ""]


def section(title: str, *paragraphs: str, header: str, rows: Sequence[str]) -> list[str]:
    between = [line for paragraph in paragraphs for line in (paragraph, "")]
    return [f"## {title}", "", *between, *table(header, rows)]


def spread(values: Sequence[float]) -> str:
    """Format median, smallest and largest, with three digits or more."""
    three = (median(values), min(values), max(values))
    middle, low, high = (f"{value:.0f}" if value >= 100 else f"{value:.3g}" for value in three)
    return f"{middle} ({low} to {high})"


def describe_count(rounds: int, steps: int) -> str:
    """Say how many figures each median has. `steps`: the counted steps of a run."""
    turns = "" if rounds > 1 else ", one round only, so that no side had its turn twice"
    return (
        f"Medians (smallest to largest) of {rounds * steps} figures a side: {rounds} x "
        f"{steps} steps{turns}."
    )


def describe_losses(dtype: str, rows: dict[str, dict[str, Any]], reference: str) -> str:
    """Say how near the losses are to the reference's, and how far the reference's moved."""
    expected = rows[reference]["losses"]
    furthest = max(
        abs(a - b) / abs(b)
        for row in rows.values()
        for a, b in zip(row["losses"], expected, strict=True)
    )
    return (
        f"At every step the losses of all sides are within {TOLERANCE[dtype]:.2%} of the "
        f"reference's, relative to it "
        f"(the furthest is {furthest:.4%} away), which goes from {expected[0]:.4f} to "
        f"{expected[-1]:.4f}."
    )
