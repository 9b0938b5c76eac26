"""Bandwidths and rates that the preflight measured, kept in run.dir for the plan."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_FILE = "preflight.json"
MIRROR_SHARE = 0.2  # of the network between nodes goes to copies of checkpoints
CPU = "CPU process"  # the device of a rank without a GPU


@dataclass(frozen=True)
class MeasuredMachine:
    """Ranks of each node, their device, and figures of the slowest node; None: not measured."""

    ranks: list[int]
    device: str  # the name of the GPU, several joined by " and ", or `CPU`
    node_bytes_per_s: float | None  # all-reduce of all nodes, bus bandwidth as in nccl-tests
    rank_bytes_per_s: float | None  # all-reduce inside a node, bus bandwidth
    flops_per_s: float | None  # one rank's matrix products


def write_measured(
    run_dir: Path, ranks: list[int], device: str, figures: Sequence[Mapping[str, Any]]
) -> MeasuredMachine:
    measured = MeasuredMachine(
        ranks,
        device,
        # Ranks of one node measure "between" inside it.
        min(figure["between"] for figure in figures) if len(ranks) > 1 else None,
        min(figure["inside"] for figure in figures) or None,
        min(value for figure in figures for value in figure["flops"]) or None,
    )
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / _FILE).write_text(json.dumps(asdict(measured)) + "\n", encoding="utf-8")
    return measured


def read_measured(
    run_dir: Path, nodes: int, ranks_per_node: int, is_kind: Callable[[str], bool]
) -> MeasuredMachine:
    """Read the figures of a preflight on these nodes, ranks and devices; all None if none was."""
    nothing = MeasuredMachine([], "", None, None, None)
    try:
        measured = MeasuredMachine(**json.loads((run_dir / _FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return nothing
    is_same = measured.ranks == [ranks_per_node] * nodes and is_kind(measured.device)
    return measured if is_same else nothing
