"""`shardtune plan`: what a run would take, from its configuration and the model's config.json."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from shardtune.config_io import load_config
from shardtune.errors import DoesNotFit, UserError
from shardtune.log import quiet_libraries
from shardtune.model.files import read_model_config
from shardtune.planner.changes import helpful_changes
from shardtune.planner.extrapolate import Simulations
from shardtune.planner.machine import Machine
from shardtune.planner.plan import make_plan
from shardtune.planner.text import describe, describe_changes, verdict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, required=True, metavar="FILE")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--gpu-memory", type=float, default=80, metavar="GB", help="of 1e9 bytes")
    parser.add_argument("--nic-gbps", type=float, default=100, help="Gbit/s of a node, one way")
    parser.add_argument("--nvlink-gbps", type=float, default=3600, help="Gbit/s of a GPU, one way")
    parser.add_argument("--gpu-tflops", type=float, default=989, help="TFLOP/s of a GPU, bfloat16")
    parser.add_argument("assignments", nargs="*", metavar="section.key=value")


def plan_run(options: argparse.Namespace) -> None:
    """Print the plan, and what would help if it does not fit or the network bounds it.

    Raises:
        UserError: the run would be refused, or with code 3, it does not fit.
    """
    given = {
        "nodes": options.nodes,
        "gpus-per-node": options.gpus_per_node,
        "gpu-memory": options.gpu_memory,
        "nic-gbps": options.nic_gbps,
        "nvlink-gbps": options.nvlink_gbps,
        "gpu-tflops": options.gpu_tflops,
    }
    if too_small := [name for name, value in given.items() if not value > 0]:
        raise UserError(*(f"--{name} {given[name]:g} is not above 0" for name in too_small))
    config = load_config(options.config, options.assignments, os.environ)
    quiet_libraries(is_main=False)
    # Weights are not read, and a GPU computes in bfloat16.
    settings = config.model.model_copy(update={"init": "random"})
    if settings.compute_dtype == "auto":
        settings = settings.model_copy(update={"compute_dtype": "bfloat16"})
    config = config.model_copy(update={"model": settings})
    model_config = read_model_config(config.model, config.data.max_length)
    machine = Machine(
        nodes=options.nodes,
        ranks_per_node=options.gpus_per_node,
        memory_bytes=options.gpu_memory * 1e9,
        node_bytes_per_s=options.nic_gbps * 1e9 / 8,
        rank_bytes_per_s=options.nvlink_gbps * 1e9 / 8,
        flops_per_s=options.gpu_tflops * 1e12,
    )
    simulations = Simulations(model_config)
    plan = make_plan(config, model_config, machine, simulations)
    for line in describe(plan):
        print(line)
    floors = plan.floors_s
    if not plan.fits or floors["between nodes"] > 1.5 * floors.get("arithmetic", 0.0):
        for line in describe_changes(helpful_changes(plan, model_config, simulations)):
            print(line)
    if plan.fits:
        print(verdict(plan))
    else:
        remedy = "take what the table above says, or other GPUs"
        raise DoesNotFit(f"{verdict(plan)} - {remedy}")
