"""Offer Python programs names that stay: `shardtune.read_run` and `shardtune.plan`."""

import os
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shardtune.report import read_run as report


@dataclass(frozen=True)
class Run:
    """A run's metrics.jsonl by kind, in the order of the steps. Fields: docs/metrics.md.

    `unread`: how many of its lines cannot be read and are left out.
    """

    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    plan: list[dict[str, Any]]
    scores: list[dict[str, Any]]
    unread: int


@dataclass(frozen=True)
class Plan:
    """A plan of the fullest rank. Sizes are in bytes, times in seconds, traffic is per step."""

    fits: bool
    verdict: str
    parameters: int
    trained_parameters: int
    states: dict[str, int]  # parameters, gradients, optimizer; host_...: in host memory
    peak_bytes: int
    memory: list[dict[str, Any]]  # by phase: total, and by cause
    # By collective: between_nodes, into a node; inside_node, into a rank.
    traffic: list[dict[str, Any]]
    step_seconds: float | None  # at least; None where it is not known
    about_seconds: float | None  # by the kernels of a GPU; None where they are not known
    bound_by: str | None  # what takes that time
    # The lines of `shardtune plan`, without changes that would help.
    text: str = field(repr=False)


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read the run in `path`, its `run.dir`; it may be unfinished. Raises UserError."""
    run = report.read_run(Path(path))
    steps, evaluations, plan, scores = map(run.of_kind, ("step", "eval", "plan", "score"))
    return Run(steps, evaluations, plan, scores, run.unread)


def plan(
    config: str | os.PathLike[str] | Mapping[str, Any],
    *assignments: str,
    nodes: int = 2,
    gpus_per_node: int = 8,
    gpu: str | None = None,
    gpu_memory: float | None = None,
    host_memory: float = 2000,
    nic_gbps: float | None = None,
    nvlink_gbps: float | None = None,
    gpu_tflops: float | None = None,
) -> Plan:
    """Plan a run as `shardtune plan` does, in this process.

    `config`: a file, or a mapping of its keys, by section or as `section.key`. `assignments`, such
    as "parallel.stages=2", override it. The machine is given as by the command's options.

    Raises:
        UserError: the run would be refused.
    """
    given = dict(locals())  # the arguments alone
    from shardtune.planner.arithmetic.figures import Cause
    from shardtune.planner.command.plan_command import plan_config
    from shardtune.planner.command.text import verdict

    if not isinstance(config, Mapping):
        given["config"] = Path(config)
    run, _, lines = plan_config(Namespace(**given, tokens=None, price=None))
    between, inside = run.received
    return Plan(
        fits=run.fits,
        verdict=verdict(run),
        parameters=run.parameters,
        trained_parameters=run.trained_parameters,
        states=asdict(run.states),
        peak_bytes=run.peak_bytes,
        memory=[
            {"phase": phase, "total": peak.n_bytes} | {f"{c}": peak.by_cause[c] for c in Cause}
            for phase, peak in run.peaks.items()
        ],
        traffic=[
            {"collective": kind, "between_nodes": between[kind], "inside_node": inside[kind]}
            for kind in between
        ],
        step_seconds=run.floor_s or None,
        about_seconds=run.about_s,
        bound_by=run.bound_by,
        text="\n".join(lines),
    )
