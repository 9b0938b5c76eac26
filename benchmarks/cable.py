"""Train over a cable between two nodes; seconds and bytes of a step, by the cable's counters.

The nodes are network namespaces of this machine with two ranks each. It needs Linux, root and
iproute2, and is left out elsewhere.
"""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.one import matmul_rate
from benchmarks.sides import NAMES, Job, Side, counted
from benchmarks.tables import describe_losses, spread, table
from distTest.rehearse.namespaces import FRAMED, LIMIT_TRIAL, obstacle
from distTest.workloads.cable import ADDRESSES, RANKS_PER_NODE, over_cable
from distTest.workloads.small_models import ROW_TOKENS, write_model, write_rows
from shardtune.config_io import load_config
from shardtune.log import quiet_libraries
from shardtune.model.source.files import read_model_config
from shardtune.planner.arithmetic.machine import Machine
from shardtune.planner.make_plan import make_plan
from shardtune.planner.plan import Plan

RATE_BITS_PER_S = 250_000_000  # slow enough to bound a step of a small model
SLOW_BITS_PER_S = 40_000_000
_ROWS = 8  # per step
_UNCOUNTED = 2  # first steps, which also set things up
_RANKS = RANKS_PER_NODE * len(ADDRESSES)
_SHORT = "short_of_memory"
_REFERENCE = "transformers_fsdp"
_PEERS = (_REFERENCE, "trl_fsdp")
# The meshes by name. Experts are spread over the ranks of a node.
_MESHES: dict[str, dict[str, int]] = {
    "plain": {},
    _SHORT: {},
    "replicate=2": {"parallel.replicate": 2},
    "stages=2": {"parallel.stages": 2},
}
_SLOW = ("plain", "replicate=2", "stages=2")  # meshes that run on the slow cable, too
_EXPERT = {"glm": {"parallel.expert": 2}, "llama": {}}
_NAMES = NAMES | {
    "plain": "shardtune, one copy over both nodes",
    _SHORT: "the same without memory to keep weights and gradients",
    "replicate=2": "shardtune, `parallel.replicate=2`",
    "stages=2": "shardtune, `parallel.stages=2`",
}
_HEADER = (
    "| | s a step | MB into a node | as planned | s at least, by the plan | step / plan "
    "| the Trainer takes |"
)
_SLOW_HEADER = "| | s without a limit | s on the wire, by the plan | sum | s a step | step / sum |"


def variants(options: Namespace) -> Iterable[tuple[str, ...]]:
    if reason := obstacle() or obstacle(LIMIT_TRIAL):
        print(f"cable: skipped, since it needs Linux, root and iproute2: {reason}", flush=True)
        return []
    return [(family,) for family in options.families]


def measure(options: Namespace, family: str) -> dict[str, Any]:
    """Run each side over a limited cable twice: the longer run's further steps count."""
    quiet_libraries(is_main=False)
    model = options.work / f"cable-{family}"
    parameters = write_model(family, model)
    chats = write_rows(options.work / "rows.jsonl", _ROWS)
    job = Job(model, chats, ROW_TOKENS, _UNCOUNTED + options.steps, "float32")
    rate = matmul_rate(sorted(os.sched_getaffinity(0)), "float32")
    sides: dict[str, list[Side]] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name in (*_MESHES, *_PEERS):
        variant = replace(job, more=_assignments(family, _MESHES.get(name, {})))
        runs = [
            _run(replace(variant, steps=steps), name, options, RATE_BITS_PER_S)
            for steps in (job.steps, _UNCOUNTED)
        ]
        sides[name] = [side for side, _ in runs[:1] if side]
        if not all(side for side, _ in runs):
            continue
        (side, most), (_, fewer) = runs
        assert side
        # Setting up and the first steps cost both runs the same bytes.
        received = max((a - b) / options.steps for a, b in zip(most, fewer, strict=True))
        rows[name] = {"seconds": _last_seconds(side), "losses": side.losses, "bytes": received}
        if name in _MESHES:
            plan = _plan(variant, name, RATE_BITS_PER_S, rate)
            rows[name] |= {"planned_bytes": _between(plan), "floor_s": plan.floor_s}
    equal, _ = counted(sides, _REFERENCE, "float32")
    counts = {"family": family, "parameters": parameters, "steps": options.steps}
    counts |= {"rate_bits_per_s": RATE_BITS_PER_S, "slow_bits_per_s": SLOW_BITS_PER_S}
    rows = {name: row for name, row in rows.items() if name in equal}
    return {"rows": rows, "slow": _measure_slow(job, family, options), "counts": counts}


def _measure_slow(job: Job, family: str, options: Namespace) -> dict[str, Any]:
    """Return seconds of a step without a limit, on a slow cable, and on the wire by the plan."""
    rows = {}
    for name in _SLOW:
        variant = replace(job, more=_assignments(family, _MESHES[name]))
        rates = (0, SLOW_BITS_PER_S)
        (free, _), (slow, _) = (_run(variant, name, options, rate) for rate in rates)
        if free and slow:
            sent_bytes = _between(_plan(variant, name, SLOW_BITS_PER_S)) * FRAMED
            seconds = {"free": _last_seconds(free), "slow": _last_seconds(slow)}
            rows[name] = seconds | {"wire_s": sent_bytes * 8 / SLOW_BITS_PER_S}
    return rows


def _assignments(family: str, mesh: Mapping[str, int]) -> dict[str, int]:
    data_ranks = _RANKS // mesh.get("parallel.stages", 1)
    return {**mesh, **_EXPERT[family], "train.gradient_accumulation_steps": _ROWS // data_ranks}


def _run(
    job: Job, name: str, options: Namespace, bits_per_s: int
) -> tuple[Side | None, Sequence[int]]:
    """Return a run, and the bytes that each node received in it."""
    run = options.work / f"{job.model.name}-{name}-{job.steps}-{bits_per_s}"
    out = Path(f"{run}.cable.json")
    over = replace(job, launcher=over_cable(out, bits_per_s))
    side = over.run(
        name if name in _PEERS else "ours",
        run,
        options.peers,
        ways=_SHORT if name == _SHORT else None,
    )
    return side, json.loads(out.read_text(encoding="utf-8")) if side else []


def _last_seconds(side: Side) -> list[float]:
    """Return the seconds of the counted steps; a side has left out its first step."""
    return side.seconds[_UNCOUNTED - 1 :]


def _plan(job: Job, name: str, bits_per_s: int, flops_per_s: float = 1.0) -> Plan:
    """Plan the run for this machine, whose ranks share its cores."""
    assignments = [f"{key}={value}" for key, value in job.settings().items()]
    config = load_config(Path(os.devnull), assignments, {})
    machine = Machine(
        nodes=len(ADDRESSES),
        ranks_per_node=RANKS_PER_NODE,
        memory_bytes=0.0 if name == _SHORT else 1e12,
        node_bytes_per_s=bits_per_s / 8 / FRAMED,
        rank_bytes_per_s=float("inf"),
        flops_per_s=flops_per_s * min(_RANKS, len(os.sched_getaffinity(0))) / _RANKS,
        is_gpu=False,
    )
    return make_plan(config, read_model_config(config.model, ROW_TOKENS), machine)


def _between(plan: Plan) -> float:
    """Return the bytes that a node receives from the other in a step."""
    between, _ = plan.received
    return sum(between.values())


def lines(figures: dict[str, Any]) -> list[str]:
    rows, counts = figures["rows"], figures["counts"]
    mbit = {key: counts[f"{key}_bits_per_s"] / 1e6 for key in ("rate", "slow")}
    expert = " Experts are spread over the ranks of a node." if counts["family"] == "glm" else ""
    losses = describe_losses("float32", rows, _REFERENCE) if _REFERENCE in rows else ""
    title = f"Two nodes, a cable of {mbit['rate']:.0f} Mbit/s, a small {counts['family']}, float32"
    return [
        f"## {title}",
        "",
        f"{counts['parameters']:,} weights; two network namespaces of this machine, two ranks "
        f"each, on its shared cores. A step has {_ROWS} rows of {ROW_TOKENS} tokens, one a "
        f"micro-batch.{expert} {losses} Medians (smallest to largest) of {counts['steps']} steps "
        f"of one run, behind {_UNCOUNTED} others; bytes by the cable's counters without headers of "
        "frames, of a run less a shorter one.",
        "",
        *table(_HEADER, [_row(name, rows) for name in rows]),
        f"At {mbit['slow']:.0f} Mbit/s, does a step take as long as with a cable without a limit, "
        "and the time of the planned bytes and their frames on the wire?",
        "",
        *table(_SLOW_HEADER, [_slow_row(name, row) for name, row in figures["slow"].items()]),
    ]


def _row(name: str, rows: dict[str, Any]) -> str:
    row, planned = rows[name], ["", "", ""]
    step_s, ratio = median(row["seconds"]), ""
    if "planned_bytes" in row:
        share = row["planned_bytes"] / row["bytes"]
        planned = [f"{row['planned_bytes'] / 1e6:.2f} MB, {share:.3f} of it"]
        planned += [f"{row['floor_s']:.3g}", f"{step_s / row['floor_s']:.2f}"]
    if _REFERENCE in rows:
        ratio = f"{median(rows[_REFERENCE]['seconds']) / step_s:.2f} x"
    cells = [_NAMES[name], spread(row["seconds"]), f"{row['bytes'] / 1e6:.2f}", *planned, ratio]
    return f"| {' | '.join(cells)} |"


def _slow_row(name: str, row: dict[str, Any]) -> str:
    total = median(row["free"]) + row["wire_s"]
    cells = [_NAMES[name], spread(row["free"]), f"{row['wire_s']:.3g}", f"{total:.3g}"]
    cells += [spread(row["slow"]), f"{median(row['slow']) / total:.2f}"]
    return f"| {' | '.join(cells)} |"
