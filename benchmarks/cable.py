"""Train over a cable between two nodes; seconds and bytes of a step, by the cable's counters.

The nodes are network namespaces of this machine with two ranks each. It needs Linux, root and
iproute2, and is left out elsewhere.
"""

import json
import os
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.sides import NAMES, Job, Side, counted, describe_losses, spread, table
from distTest.rehearse.namespaces import FRAMED, LIMIT_TRIAL, obstacle
from distTest.workloads.cable import ADDRESSES, RANKS_PER_NODE, over_cable
from distTest.workloads.small_models import ROW_TOKENS, write_model, write_rows
from shardtune.config_io import load_config
from shardtune.log import quiet_libraries
from shardtune.model.flops import measure_matmul_rate
from shardtune.model.source.files import read_model_config
from shardtune.planner.arithmetic.machine import Machine
from shardtune.planner.make_plan import make_plan
from shardtune.planner.plan import Plan

RATE_BITS_PER_S = 250_000_000  # slow enough to bound a step of a small model
_ROWS = 8  # per step
_UNCOUNTED = 2  # first steps, which also set things up
_RANKS = RANKS_PER_NODE * len(ADDRESSES)
_REFERENCE = "transformers_fsdp"
# The meshes by name. Experts are spread over the ranks of a node.
_MESHES: dict[str, dict[str, int]] = {
    "plain": {},
    "replicate=2": {"parallel.replicate": 2},
    "stages=2": {"parallel.stages": 2},
}
_EXPERT = {"glm": {"parallel.expert": 2}, "llama": {}}
_NAMES = NAMES | {
    "plain": "shardtune, one copy over both nodes",
    "replicate=2": "shardtune, `parallel.replicate=2`",
    "stages=2": "shardtune, `parallel.stages=2`",
}
_HEADER = (
    "| | s a step | MB into a node | as planned | s at least, by the plan | step / plan "
    "| the Trainer takes |"
)


def variants(options: Namespace) -> Iterable[tuple[str]]:
    if reason := obstacle() or obstacle(LIMIT_TRIAL):
        print(f"cable: skipped, since it needs Linux, root and iproute2: {reason}", flush=True)
        return []
    return [(family,) for family in _EXPERT]


def measure(options: Namespace, family: str) -> dict[str, dict[str, Any]]:
    """Run each side over a limited cable twice: the longer run's further steps count."""
    quiet_libraries(is_main=False)
    model = options.work / f"cable-{family}"
    write_model(family, model)
    chats = write_rows(options.work / "rows.jsonl", _ROWS)
    job = Job(model, chats, ROW_TOKENS, _UNCOUNTED + options.steps, "float32")
    measure_matmul_rate(torch.float32, 0)
    rate = measure_matmul_rate(torch.float32, 1)
    sides: dict[str, list[Side]] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys((*_MESHES, _REFERENCE)):
        more = _assignments(family, _MESHES.get(name, {}))
        (side, most), (shorter, fewer) = (
            _run(replace(job, steps=steps), name, more, options)
            for steps in (job.steps, _UNCOUNTED)
        )
        sides[name] = [side] if side and shorter else []
        if not (side and shorter):
            continue
        # Setting up and the first steps cost both runs the same bytes.
        received = max((a - b) / options.steps for a, b in zip(most, fewer, strict=True))
        # A side has left out its first step.
        rows[name] = {"seconds": side.seconds[_UNCOUNTED - 1 :], "losses": side.losses}
        rows[name]["bytes"] = received
        if name in _MESHES:
            plan = _plan(job, more, rate)
            between, _ = plan.received  # what enters a node in a step, by kind
            rows[name] |= {"planned_bytes": sum(between.values()), "floor_s": plan.floor_s}
    equal = counted(sides, _REFERENCE, "float32")
    return {name: row for name, row in rows.items() if name in equal}


def _assignments(family: str, mesh: Mapping[str, int]) -> dict[str, int]:
    data_ranks = _RANKS // mesh.get("parallel.stages", 1)
    return {**mesh, **_EXPERT[family], "train.gradient_accumulation_steps": _ROWS // data_ranks}


def _run(
    job: Job, name: str, more: Mapping[str, int], options: Namespace
) -> tuple[Side | None, Sequence[int]]:
    """Return a run, and the bytes that each node received in it."""
    run = options.work / f"{job.model.name}-{name}-{job.steps}"
    out = Path(f"{run}.cable.json")
    side = job.run(
        "ours" if name in _MESHES else name,
        run,
        options.peers,
        more=more,
        launcher=over_cable(out, RATE_BITS_PER_S),
    )
    return side, json.loads(out.read_text(encoding="utf-8")) if side else []


def _plan(job: Job, more: Mapping[str, int], flops_per_s: float) -> Plan:
    """Plan the run for this machine, whose ranks share its cores."""
    assignments = [f"{key}={value}" for key, value in (job.settings() | dict(more)).items()]
    config = load_config(Path(os.devnull), assignments, {})
    machine = Machine(
        nodes=len(ADDRESSES),
        ranks_per_node=RANKS_PER_NODE,
        memory_bytes=1e12,
        node_bytes_per_s=RATE_BITS_PER_S / 8 / FRAMED,
        rank_bytes_per_s=float("inf"),
        flops_per_s=flops_per_s * min(_RANKS, len(os.sched_getaffinity(0))) / _RANKS,
        is_gpu=False,
    )
    return make_plan(config, read_model_config(config.model), machine)


def lines(options: Namespace, rows: dict[str, dict[str, Any]], family: str) -> list[str]:
    expert = " Experts are spread over the ranks of a node." if family == "glm" else ""
    losses = {name: row["losses"] for name, row in rows.items()}
    return [
        f"## Two nodes, a cable of {RATE_BITS_PER_S / 1e6:.0f} Mbit/s, a small {family}, float32",
        "",
        f"Two network namespaces of this machine, two ranks each, on its shared cores. A step has "
        f"{_ROWS} rows of {ROW_TOKENS} tokens, one a micro-batch.{expert} "
        f"{describe_losses('float32', losses, _REFERENCE)} Medians (smallest to largest) of "
        f"{options.steps} steps of one run, behind {_UNCOUNTED} others; bytes by the cable's "
        "counters without headers of frames, of a run less a shorter one.",
        "",
        *table(_HEADER, [_row(name, rows) for name in rows]),
    ]


def _row(name: str, rows: dict[str, dict[str, Any]]) -> str:
    row, planned = rows[name], ["", "", ""]
    step_s = median(row["seconds"])
    if "planned_bytes" in row:
        share = row["planned_bytes"] / row["bytes"]
        planned = [f"{row['planned_bytes'] / 1e6:.2f} MB, {share:.3f} of it"]
        planned += [f"{row['floor_s']:.3g}", f"{step_s / row['floor_s']:.2f}"]
    ratio = f"{median(rows[_REFERENCE]['seconds']) / step_s:.2f} x"
    cells = [_NAMES[name], spread(row["seconds"]), f"{row['bytes'] / 1e6:.2f}", *planned, ratio]
    return f"| {' | '.join(cells)} |"
