"""`shardtune plan`: what a run would take, from its configuration and the model's config.json."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedConfig

from shardtune.checkpoint.assets import SOURCE, list_source, model_assets
from shardtune.checkpoint.export.layout import require_exportable
from shardtune.config import Config
from shardtune.config_io import load_config
from shardtune.distributed.measured import read_measured
from shardtune.errors import DoesNotFit, UserError
from shardtune.log import quiet_libraries
from shardtune.model.attention_check import require_documents_apart
from shardtune.model.files import model_folder, read_model_config
from shardtune.model.quantised import describe_quantised, quantised_problems
from shardtune.model.stages import require_composable
from shardtune.model.text_model import describe_type
from shardtune.model.weight_files import weight_problems
from shardtune.planner.duration import run_length
from shardtune.planner.extrapolate import Simulations
from shardtune.planner.machine import Machine
from shardtune.planner.plan import Plan, make_plan
from shardtune.planner.search import Search, launch_command
from shardtune.planner.stand_in import stand_in
from shardtune.planner.text import describe, describe_changes
from shardtune.planner.verdict import lacking, verdict

_SHIPPED = Path(__file__).resolve().parents[2] / "config.yaml"  # of the launch scripts
_RATES = {
    "--nic-gbps": (100.0, "Gbit/s of a node, one way"),
    "--nvlink-gbps": (3600.0, "Gbit/s of a GPU, one way"),
    "--gpu-tflops": (989.0, "TFLOP/s of a GPU, bfloat16"),
}


def add_arguments(parser: argparse.ArgumentParser, needs_config: bool = True) -> None:
    parser.add_argument("--config", type=Path, required=needs_config, metavar="FILE")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--gpu-memory", type=float, default=80, metavar="GB", help="of 1e9 bytes")
    host_help = "of a node, beside its GPUs'"
    parser.add_argument("--host-memory", type=float, default=2000, metavar="GB", help=host_help)
    for name, (default, help_) in _RATES.items():
        help_ = f"{help_}; if not given as the preflight has measured it, else {default:g}"
        parser.add_argument(name, type=float, help=help_)
    parser.add_argument("assignments", nargs="*", metavar="section.key=value")


def plan_run(options: argparse.Namespace) -> None:
    """Print the plan, and the fastest mesh that fits as a command.

    Raises:
        UserError: the run would be refused, or with code 3, it does not fit.
    """
    made = plan_config(options)
    config, plan, model_config, simulations, _ = made
    print(*describe_config(made), sep="\n")
    changes = Search(plan, model_config).changes(simulations)
    arguments = [] if options.config.resolve() == _SHIPPED else [f"--config={options.config}"]
    arguments += options.assignments
    best = launch_command(changes[0].values if changes else {}, config, plan.machine, arguments)
    for line in describe_changes(plan, changes, best):
        print(line)
    if plan.fits:
        print(verdict(plan))
    else:
        remedy = "the command above" if changes else lacking(plan)
        raise DoesNotFit(f"{verdict(plan)} - take {remedy}")


class ConfigPlan(NamedTuple):
    """A plan, and what was read for it."""

    config: Config
    plan: Plan
    model_config: PreTrainedConfig
    simulations: Simulations
    notes: list[str]  # on the model


def plan_config(options: argparse.Namespace) -> ConfigPlan:
    """Plan the run of a configuration, a file or a mapping of keys, on the machine that is given.

    Raises:
        UserError: the run would be refused.
    """
    given = {
        "nodes": options.nodes,
        "gpus-per-node": options.gpus_per_node,
        "gpu-memory": options.gpu_memory,
        "host-memory": options.host_memory,
        "nic-gbps": options.nic_gbps,
        "nvlink-gbps": options.nvlink_gbps,
        "gpu-tflops": options.gpu_tflops,
    }
    if wrong := [n for n, value in given.items() if value is not None and not 0 < value < math.inf]:
        raise UserError(*(f"--{n} {given[n]:g}: no such machine - give more than 0" for n in wrong))
    config = load_config(options.config, options.assignments, os.environ)
    quiet_libraries(is_main=False)
    if config.model.compute_dtype == "auto":  # as a GPU takes it
        settings = config.model.model_copy(update={"compute_dtype": "bfloat16"})
        config = config.model_copy(update={"model": settings})
    if unknown := stand_in(config.model.path):
        model_config, reason = unknown
    else:
        without_weights = config.model.model_copy(update={"init": "random"})
        model_config, reason = read_model_config(without_weights, config.data.max_length), ""
        require_documents_apart(config, model_config)
        require_composable(config, model_config)
        if config.model.init == "pretrained":
            _require_fitting_files(config.model.path)
    simulations = Simulations(model_config)
    plan = make_plan(config, model_config, machine_of(options, config), simulations, reason)
    folder = None if reason else model_folder(config.model.path)
    notes = [describe_type(folder, model_config), describe_quantised(folder)] if folder else []
    return ConfigPlan(config, plan, model_config, simulations, [*filter(None, notes)])


def describe_config(made: ConfigPlan) -> Iterator[str]:
    """Yield the lines of a plan."""
    parallel = made.config.parallel
    data_ranks = made.plan.machine.ranks // parallel.stages // parallel.context
    yield from made.notes
    yield from describe(made.plan, run_length(made.config, data_ranks))


def _require_fitting_files(path: str) -> None:
    """Refuse weights that a run would refuse for their names, where they are on this node."""
    folder = model_folder(path)
    if folder and not weight_problems(folder):
        if problems := quantised_problems(folder):
            raise UserError(*problems)
        source = {SOURCE: json.dumps(list_source(path)).encode()}
        require_exportable(model_assets(folder) | source, folder)


def machine_of(options: argparse.Namespace, config: Config) -> Machine:
    """Return the machine that is given, with what its preflight has measured beside run.dir."""
    nodes, ranks = options.nodes, options.gpus_per_node
    measured = read_measured(Path(config.run.dir), nodes, ranks)
    if measured.ranks:
        print(f"Bandwidths: as the preflight of {config.run.dir} has measured them")
    nic, nvlink, tflops = (default for default, _ in _RATES.values())

    def rate(given: float | None, unit: float, measured: float | None, default: float) -> float:
        return given * unit if given is not None else measured or default * unit

    return Machine(
        nodes=nodes,
        ranks_per_node=ranks,
        memory_bytes=options.gpu_memory * 1e9,
        node_bytes_per_s=rate(options.nic_gbps, 1e9 / 8, measured.node_bytes_per_s, nic),
        rank_bytes_per_s=rate(options.nvlink_gbps, 1e9 / 8, measured.rank_bytes_per_s, nvlink),
        flops_per_s=rate(options.gpu_tflops, 1e12, measured.flops_per_s, tflops),
        host_bytes=options.host_memory * 1e9,
    )
