"""Bandwidths and rates that the preflight measured, kept in run.dir for the plan."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_FILE = "preflight.json"


@dataclass(frozen=True)
class MeasuredMachine:
    """Ranks of each node, and figures of the slowest node; None: not measured."""

    ranks: list[int]
    node_bytes_per_s: float | None  # all-reduce of all nodes, bus bandwidth as in nccl-tests
    rank_bytes_per_s: float | None  # all-reduce inside a node, bus bandwidth
    flops_per_s: float | None  # one rank's matrix products


def write_measured(
    run_dir: Path, ranks: list[int], figures: Sequence[Mapping[str, Any]]
) -> MeasuredMachine:
    """Write the figures that all nodes have measured. Raises OSError."""
    measured = MeasuredMachine(
        ranks,
        min(figure["between"] for figure in figures) or None,
        min(figure["inside"] for figure in figures) or None,
        min(value for figure in figures for value in figure["flops"]) or None,
    )
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / _FILE).write_text(json.dumps(asdict(measured)) + "\n", encoding="utf-8")
    return measured


def read_measured(run_dir: Path, nodes: int, ranks_per_node: int) -> MeasuredMachine:
    """Read the figures of a preflight on these nodes and ranks; all None if there was none."""
    nothing = MeasuredMachine([], None, None, None)
    try:
        measured = MeasuredMachine(**json.loads((run_dir / _FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return nothing
    return measured if measured.ranks == [ranks_per_node] * nodes else nothing
