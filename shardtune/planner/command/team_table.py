"""A table of the trainings of one model that fit on each number of nodes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from shardtune.config import Config
from shardtune.errors import DoesNotFit
from shardtune.planner.command.options import read_run_config
from shardtune.planner.command.plan_command import machine_of, read_planned_config
from shardtune.planner.command.text import table
from shardtune.planner.launch_arguments import as_arguments, mesh_arguments
from shardtune.planner.make_plan import bound_plan
from shardtune.planner.mesh import with_values
from shardtune.planner.plan import Plan
from shardtune.planner.search import Search
from shardtune.planner.settings import ADAPTERS
from shardtune.planner.simulation.extrapolate import Simulations
from shardtune.planner.status_lines import Say
from shardtune.units import gb

_ROWS = 32  # the fewest rows of a step
_ACCUMULATION = "train.gradient_accumulation_steps"
# Padded to the widest cell below it, since each row is printed as soon as it is known.
_HEAD = [
    *("nodes", f"{'trains':<11}", "fits", "peak, GB"),
    *("step, s at least", "tokens/s at most", "settings"),
]


def print_team_table(runs: Sequence[argparse.Namespace], say: Say) -> None:
    """Print what fits on each number of nodes: all weights, and adapters.

    Raises:
        UserError: the run would be refused, or nothing fits (code 3).
    """
    simulations = Simulations(read_planned_config(read_run_config(runs[0]), say))
    rows: list[list[str]] = []
    lines: list[str] = []
    print(*table(_HEAD, []), flush=True)
    for options in runs:
        config = read_run_config(options)
        adapters = {} if config.lora.rank else ADAPTERS
        for trains, values in {"all weights": {"lora.rank": None}, "LoRA": adapters}.items():
            say(f"looking for {trains} on {options.nodes} x {options.gpus_per_node} GPUs")
            search = _search(options, with_values(config, values), simulations, say)
            plan = search.fastest()
            rows.append([f"{options.nodes}", trains, *_cells(plan)])
            print([*table(_HEAD, rows[-1:])][1], flush=True)
            if not plan and options is runs[-1]:
                lines += _from_more_nodes(search, trains)
    print(*lines, *_assumptions(config), sep="\n")
    if all(row[2] == "no" for row in rows):
        raise DoesNotFit(f"nothing of {config.model.path} fits - take more or larger GPUs")


def _search(
    options: argparse.Namespace, config: Config, simulations: Simulations, say: Say
) -> Search:
    """Return the search for one row of the table."""
    machine = machine_of(options, config)
    if config.origins[_ACCUMULATION] == "default":
        rows = machine.layout(config).rows_per_micro_batch
        config = with_values(config, {_ACCUMULATION: max(1, _ROWS // rows)})
    # The search simulates the meshes that it finds; the one that it begins with may fit nowhere.
    plan = bound_plan(config, simulations.model_config, machine)
    return Search(plan, simulations, say=say)


def _cells(plan: Plan | None) -> list[str]:
    if not plan:
        return ["no", "-", "-", "-", "-"]
    tokens_per_s = float(f"{1 / plan.seconds_per_token:.3g}")
    speeds = [f"{plan.floor_s:.3g}", f"{tokens_per_s:,.0f}"]
    return ["yes", gb(plan.peak_bytes), *speeds, " ".join(mesh_arguments(plan))]


def _from_more_nodes(search: Search, trains: str) -> Iterator[str]:
    if mesh := search.fewest_nodes():
        yield (
            f"{trains[0].upper()}{trains[1:]}: from {mesh.machine.nodes} nodes, by arithmetic "
            f"(about {gb(mesh.peak_bytes)} GB with {' '.join(as_arguments(mesh.values))})"
        )


def _assumptions(config: Config) -> Iterator[str]:
    checkpointing = config.model.activation_checkpointing
    yield (
        f"Rows of {config.data.max_length:,} tokens, {_ROWS} or more of them a step where "
        f"{_ACCUMULATION} is not given, model.activation_checkpointing={checkpointing}"
    )
    how = "Each row that fits is simulated"
    yield f"{how}; a plan of its settings has the memory by phase and cause"
