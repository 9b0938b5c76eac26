"""`shardtune plan`: plan a run from its configuration and the model's config.json."""

import argparse
import json
from functools import partial
from pathlib import Path

from transformers import PreTrainedConfig

from shardtune.cards import card_named, card_of
from shardtune.checkpoint.assets import SOURCE, list_source, model_assets
from shardtune.checkpoint.export.model_files import require_exportable
from shardtune.config import Config
from shardtune.config_io import remarks
from shardtune.distributed.layout import Layout
from shardtune.distributed.measured import CPU, read_measured
from shardtune.errors import DoesNotFit, UserError
from shardtune.log import quiet_libraries
from shardtune.model.facts.trial import require_exact_copy
from shardtune.model.source.files import model_folder, read_model_config
from shardtune.model.source.quantised import describe_quantised, quantised_problems
from shardtune.model.source.text_model import describe_type
from shardtune.model.source.weight_files import weight_problems
from shardtune.planner.arithmetic.machine import Machine
from shardtune.planner.arithmetic.run_length import run_length
from shardtune.planner.command.options import NIC_GBPS, card_of_options, read_run_config
from shardtune.planner.command.text import (
    by_arithmetic,
    describe,
    describe_changes,
    describe_room,
    lacking,
    verdict,
)
from shardtune.planner.make_plan import bound_plan, make_plan
from shardtune.planner.mesh import ADAPTERS, as_arguments, launch_command, with_values
from shardtune.planner.plan import Estimate, Plan
from shardtune.planner.search import Say, Search, silent
from shardtune.planner.simulation.extrapolate import Simulations

_SHIPPED = Path(__file__).resolve().parents[3] / "config.yaml"  # the default of the launch scripts


def plan_run(options: argparse.Namespace, say: Say = silent) -> None:
    """Print what arithmetic says, the verdict, the plan, and the fastest mesh that fits.

    Raises:
        UserError: the run would be refused, or does not fit (code 3).
    """
    plan, simulations, lines = plan_config(options, say, partial(print, flush=True))
    print(*lines, sep="\n")
    changes = Search(plan, simulations, say=say).changes()
    arguments = [] if options.config.resolve() == _SHIPPED else [f"--config={options.config}"]
    arguments += options.assignments
    command = launch_command([*changes, plan][0], arguments)
    for line in describe_changes(plan, changes, command):
        print(line)
    if plan.states.total > plan.machine.memory_bytes:
        say("counting the nodes that hold the states")
        print(*describe_room(plan, _nodes_needed(plan, simulations)), sep="\n")
    if not plan.fits:
        remedy = "the command above" if changes else lacking(plan)
        raise DoesNotFit(f"{verdict(plan)} - take {remedy}")


def _nodes_needed(plan: Plan, simulations: Simulations) -> dict[str, Estimate | None]:
    """Return the mesh on the fewest nodes for adapters and, unless they are given, all weights."""
    if plan.config.lora.rank:
        return {"adapters": Search(plan, simulations).fewest_nodes()}
    config = with_values(plan.config, ADAPTERS)
    adapters = bound_plan(config, simulations.model_config, plan.machine, simulations=simulations)
    settings = " ".join(as_arguments(ADAPTERS))
    return {
        "all weights": Search(plan, simulations).fewest_nodes(),
        f"adapters, {settings}": Search(adapters, simulations).fewest_nodes(),
    }


def plan_config(
    options: argparse.Namespace, say: Say = silent, show: Say = silent
) -> tuple[Plan, Simulations, list[str]]:
    """Plan a run: its configuration, a file or a mapping of keys, and its machine are `options`.

    Return the plan, the simulations for it, and its lines, the verdict first. `show` gets a line by
    arithmetic before that takes its time.

    Raises:
        UserError: the run would be refused.
    """
    config = read_run_config(options)
    model_config, machine = read_planned_config(config), machine_of(options, config)
    simulations = Simulations(model_config)
    bound = bound_plan(config, model_config, machine, simulations=simulations)
    show(by_arithmetic(Search(bound, simulations).configured))
    require_runnable(config, model_config, say)
    say("simulating a step as configured")
    plan = make_plan(config, model_config, machine, simulations)
    folder = model_folder(config.model.path)
    notes = [describe_type(folder, model_config), describe_quantised(folder)] if folder else []
    lines = describe(plan, run_length(config, plan.layout, options.tokens), options.price)
    return plan, simulations, [verdict(plan), *filter(None, notes), *remarks(config), *lines]


def read_planned_config(config: Config) -> PreTrainedConfig:
    """Return the model's configuration.

    Raises:
        UserError: it cannot be read, or transformers does not know the model.
    """
    quiet_libraries(is_main=False)
    without_weights = config.model.model_copy(update={"init": "random"})
    return read_model_config(without_weights)


def require_runnable(config: Config, model_config: PreTrainedConfig, say: Say) -> None:
    """Try a small copy of a model.

    Raises:
        UserError: a run of the model would be refused.
    """
    say(f"trying a small copy of {model_config.model_type}")
    require_exact_copy(Layout.of(config, ranks=1, is_gpu=True), model_config)
    if config.model.init == "pretrained":
        _require_fitting_files(config.model.path)


def _require_fitting_files(path: str) -> None:
    """Refuse weights on this node whose names a run would refuse."""
    folder = model_folder(path)
    if folder and not weight_problems(folder):
        if problems := quantised_problems(folder):
            raise UserError(*problems)
        source = {SOURCE: json.dumps(list_source(path)).encode()}
        require_exportable(model_assets(folder) | source, folder)


def machine_of(options: argparse.Namespace, config: Config) -> Machine:
    """Return the machine of `options`.

    It has the rates that a preflight of GPUs measured in run.dir; with `--gpu` that of the network
    alone, if the preflight's GPUs were the same card.
    """
    nodes, ranks = options.nodes, options.gpus_per_node
    card, nic = card_of_options(options), options.nic_gbps
    is_own = options.gpu is None  # a named card has rates of its own
    measured = read_measured(
        Path(config.run.dir),
        nodes,
        ranks,
        lambda device: device != CPU if is_own else card_of(device) == card_named(options.gpu),
    )
    between = measured.node_bytes_per_s if nic is None else None
    inside = measured.rank_bytes_per_s if is_own and options.nvlink_gbps is None else None
    flops = measured.flops_per_s if is_own and options.gpu_tflops is None else None
    return Machine(
        nodes=nodes,
        ranks_per_node=ranks,
        memory_bytes=card.memory_bytes,
        node_bytes_per_s=between or (nic or NIC_GBPS) * 1e9 / 8,
        rank_bytes_per_s=inside or card.link_bytes_per_s,
        flops_per_s=flops or card.flops_per_s,
        host_bytes=options.host_memory * 1e9,
        card=card,
        measured_in=config.run.dir if between or inside or flops else "",
    )
