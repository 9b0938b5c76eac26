"""What stays from Python: `shardtune.read_run` and `shardtune.plan`."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

from shardtune.errors import UserError
from shardtune.report import read_run as report

if TYPE_CHECKING:
    import pandas


class Records(list[dict[str, Any]]):
    """A list of dicts, which `to_pandas` makes a DataFrame of. A slice is one, too."""

    @overload
    def __getitem__(self, index: SupportsIndex) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Records: ...
    def __getitem__(self, index: SupportsIndex | slice) -> dict[str, Any] | Records:
        found = super().__getitem__(index)
        return Records(found) if isinstance(found, list) else found

    def to_pandas(self) -> pandas.DataFrame:
        """Return a row for each record. None becomes NaN in a column of numbers.

        Raises:
            UserError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise UserError(
                "pandas is not installed - pip install pandas, or use the records as they are"
            ) from error
        return pandas.DataFrame(self)


@dataclass(frozen=True)
class Run:
    """A run's metrics.jsonl by kind, in the order of the steps. Fields: docs/metrics.md.

    `unread`: how many of its lines cannot be read and are left out.
    """

    steps: Records
    evaluations: Records
    plan: Records
    unread: int


@dataclass(frozen=True)
class Plan:
    """A plan of the fullest rank. Sizes are in bytes, times in seconds, traffic that of a step."""

    fits: bool
    verdict: str
    parameters: int
    trained_parameters: int
    states: dict[str, int]  # parameters, gradients, optimizer; host_...: in host memory
    peak_bytes: int
    memory: Records  # by phase: total, and by cause
    traffic: Records  # by collective: between_nodes, into a node; inside_node, into a rank
    step_seconds: float | None  # at least; None where it is not known
    bound_by: str | None  # what takes that time
    # The lines of `shardtune plan`, without changes that would help.
    text: str = field(repr=False)


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read the run in `path`, its `run.dir`; it may be unfinished.

    Raises:
        UserError: there is no run.
    """
    run = report.read_run(Path(path))
    steps, evaluations, plans = (Records(run.of_kind(kind)) for kind in ("step", "eval", "plan"))
    return Run(steps, evaluations, plans, run.unread)


def plan(
    config: str | os.PathLike[str] | Mapping[str, Any],
    *assignments: str,
    nodes: int = 2,
    gpus_per_node: int = 8,
    gpu_memory: float = 80,
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
    from shardtune.planner.command import describe_config, plan_config
    from shardtune.planner.tracker import Cause
    from shardtune.planner.verdict import verdict

    options = Namespace(
        config=config if isinstance(config, Mapping) else Path(config),
        assignments=assignments,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        gpu_memory=gpu_memory,
        host_memory=host_memory,
        nic_gbps=nic_gbps,
        nvlink_gbps=nvlink_gbps,
        gpu_tflops=gpu_tflops,
    )
    made = plan_config(options)
    run, (between, inside) = made.plan, made.plan.received
    return Plan(
        fits=run.fits,
        verdict=verdict(run),
        parameters=run.parameters,
        trained_parameters=run.trained_parameters,
        states=asdict(run.states),
        peak_bytes=run.peak_bytes,
        memory=Records(
            {"phase": phase, "total": peak.n_bytes} | {f"{c}": peak.by_cause[c] for c in Cause}
            for phase, peak in run.peaks.items()
        ),
        traffic=Records(
            {"collective": kind, "between_nodes": between[kind], "inside_node": inside[kind]}
            for kind in between
        ),
        step_seconds=run.floor_s or None,
        bound_by=run.bound_by,
        text="\n".join([*describe_config(made), verdict(run)]),
    )
