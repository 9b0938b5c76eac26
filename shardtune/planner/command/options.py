"""The arguments of `shardtune plan`, and checks of them without the seconds of importing torch."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardtune.config import Config
from shardtune.config_io import load_config
from shardtune.errors import UserError
from shardtune.model.source.config_json import require_possible

RATES = {
    "--nic-gbps": (100.0, "Gbit/s of a node, one way"),
    "--nvlink-gbps": (3600.0, "Gbit/s of a GPU, one way"),
    "--gpu-tflops": (989.0, "TFLOP/s of a GPU, bfloat16"),
}


def add_arguments(
    parser: argparse.ArgumentParser, nodes: Callable[[str], Any] = int, default: Any = 2
) -> None:
    """Add the arguments of a run and its machine. `nodes`: the type of --nodes."""
    parser.add_argument("--config", type=Path, metavar="FILE")
    parser.add_argument("--nodes", type=nodes, default=default)
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--gpu-memory", type=float, default=80, metavar="GB", help="of 1e9 bytes")
    host_help = "of a node, beside its GPUs'"
    parser.add_argument("--host-memory", type=float, default=2000, metavar="GB", help=host_help)
    for name, (value, help_) in RATES.items():
        help_ = f"{help_}; if not given as the preflight has measured it, else {value:g}"
        parser.add_argument(name, type=float, help=help_)
    parser.add_argument("assignments", nargs="*", metavar="section.key=value")


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of one plan, or of a table for several numbers of nodes."""
    parser.usage = (
        "shardtune plan --config FILE [options] [section.key=value ...]\n"
        "       shardtune plan MODEL --nodes 1,2,4,8 [options] [section.key=value ...]"
    )
    parser.epilog = (
        "MODEL is a hub id or a folder with a config.json: a table says whether each number of "
        "nodes trains all its weights, or adapters. A FILE with several numbers of nodes gives a "
        "table, too."
    )
    add_arguments(parser, _numbers, [2])


def _numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(
            f"{text} is not a number of nodes - write a whole number from 1 on, or several with "
            "commas for a table: --nodes 1,2,4"
        )
    return [int(part) for part in parts]


def read_run_config(options: argparse.Namespace) -> Config:
    """Read the configuration of the run to plan.

    Raises:
        UserError: the configuration is refused, or a number of the machine is not above 0.
    """
    names = ["--nodes", "--gpus-per-node", "--gpu-memory", "--host-memory", *RATES]
    given = {name: vars(options)[name[2:].replace("-", "_")] for name in names}
    if wrong := [n for n, value in given.items() if value is not None and not 0 < value < math.inf]:
        raise UserError(*(f"{n} {given[n]:g}: no such machine - give more than 0" for n in wrong))
    config = load_config(options.config, options.assignments, os.environ)
    require_possible(config, options.nodes, options.gpus_per_node)
    return config


def split_nodes(options: argparse.Namespace) -> list[argparse.Namespace]:
    """Return the arguments for each number of nodes.

    Without --config, the word that is not an assignment is the model.

    Raises:
        UserError: neither a file nor a model is given, or several models.
    """
    assignments, config = list(options.assignments), options.config
    if config is None:
        models = [word for word in assignments if "=" not in word]
        if len(models) > 1:
            raise UserError(
                f"{len(models)} models are given: {', '.join(models)} - name one, and write "
                "settings as section.key=value"
            )
        if not models:
            raise UserError(
                "neither a configuration nor one model is given - write --config FILE, or a MODEL: "
                "a hub id or a folder with a config.json"
            )
        assignments.remove(models[0])
        config = {
            "model.path": models[0],
            "model.activation_checkpointing": "full",
            "data.train": "-",
        }
    given = vars(options) | {"config": config, "assignments": assignments}
    return [argparse.Namespace(**given | {"nodes": nodes}) for nodes in options.nodes]
