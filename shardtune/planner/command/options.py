"""The arguments of `shardtune plan`, and checks of them without the seconds of importing torch."""

import argparse
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardtune.cards import CARDS, Card, card_named
from shardtune.config import Config
from shardtune.config_io import load_config
from shardtune.errors import UserError
from shardtune.model.facts.of_config import require_possible

# The figure of a card that each option gives in its place, the option's unit, and its help.
OF_CARD = {
    "--gpu-memory": ("memory_bytes", 1e9, "GB of 1e9 bytes"),
    "--gpu-tflops": ("flops_per_s", 1e12, "TFLOP/s in bfloat16"),
    "--nvlink-gbps": ("link_bytes_per_s", 1e9 / 8, "Gb/s inside a node, one way"),
}
NIC_GBPS = 100.0


def add_arguments(
    parser: argparse.ArgumentParser, nodes: Callable[[str], Any] = int, default: Any = 2
) -> None:
    """Add the arguments of a run and its machine. `nodes`: the type of --nodes."""
    parser.add_argument("--config", type=Path, metavar="FILE")
    parser.add_argument("--nodes", type=nodes, default=default)
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--gpu", metavar="NAME", help=f"a card: {', '.join(CARDS)}")
    host_help = "of a node, beside its GPUs'"
    parser.add_argument("--host-memory", type=float, default=2000, metavar="GB", help=host_help)
    nic_help = f"Gbit/s of a node, one way; as the preflight has measured it, else {NIC_GBPS:g}"
    parser.add_argument("--nic-gbps", type=float, help=nic_help)
    for name, (*_, help_) in OF_CARD.items():
        parser.add_argument(name, type=float, help=f"{help_}; if not given, that of --gpu")
    parser.add_argument("assignments", nargs="*", metavar="section.key=value")


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of one plan, or of a table for several numbers of nodes."""
    parser.usage = (
        "shardtune plan --config FILE [options] [section.key=value ...]\n"
        "       shardtune plan MODEL [MODEL ...] --nodes 1,2,4,8 [options] [section.key=value ...]"
    )
    parser.epilog = (
        "MODEL is a hub id or a folder with a config.json: a table says whether each number of "
        "nodes trains all weights of each MODEL, or adapters. A FILE with several numbers of nodes "
        "gives a table, too."
    )
    add_arguments(parser, _numbers, [2])
    parser.add_argument("--tokens", type=float, help="to train, in place of the run's data")
    parser.add_argument("--price", type=float, help="money for an hour of one GPU")


def _numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(
            f"{text} is not a number of nodes - write a whole number from 1 on, or several with "
            "commas for a table: --nodes 1,2,4"
        )
    return [*dict.fromkeys(map(int, parts))]


def read_run_config(options: argparse.Namespace) -> Config:
    """Read the configuration of the run to plan.

    Raises:
        UserError: the configuration is refused, a number of the machine is not above 0, or the
            card is not known.
    """
    names = ["--nodes", "--gpus-per-node", "--host-memory", "--nic-gbps", *OF_CARD]
    given = {name: _given(options, name) for name in [*names, "--tokens", "--price"]}
    wrong = [n for n, value in given.items() if value is not None and not 0 < value < math.inf]
    kinds = {"--tokens": "number", "--price": "price"}
    problems = [
        f"{n} {given[n]:g}: no such {kinds.get(n, 'machine')} - give more than 0" for n in wrong
    ]
    try:
        card_of_options(options)
    except UserError as error:
        problems += error.problems
    if problems:
        raise UserError(*problems)
    config = load_config(options.config, options.assignments, os.environ)
    require_possible(config, options.nodes, options.gpus_per_node)
    return config


def split_runs(options: argparse.Namespace) -> list[argparse.Namespace]:
    """Return the arguments for each model and number of nodes.

    Without --config, the words that are not assignments are the models.

    Raises:
        UserError: neither a file nor a model is given.
    """
    configs, assignments = [options.config], list(options.assignments)
    if options.config is None:
        models = [*dict.fromkeys(word for word in assignments if "=" not in word)]
        if not models:
            raise UserError(
                "neither a configuration nor one model is given - write --config FILE, or a MODEL: "
                "a hub id or a folder with a config.json"
            )
        assignments = [word for word in assignments if "=" in word]
        configs = [
            {
                "model.path": model,
                "model.activation_checkpointing": "full",
                "data.train": "-",
            }
            for model in models
        ]
    given = vars(options) | {"assignments": assignments}
    return [
        argparse.Namespace(**given | {"config": config, "nodes": nodes})
        for config in configs
        for nodes in options.nodes
    ]


def card_of_options(options: argparse.Namespace) -> Card:
    """Return the card, with the numbers that are given in place of its own.

    Raises:
        UserError: the card is not known.
    """
    # No H100 has such memory.
    is_larger = (_given(options, "--gpu-memory") or 0) > 110
    card = card_named(("H200" if is_larger else "H100") if options.gpu is None else options.gpu)
    given = {field: (_given(options, name), unit) for name, (field, unit, _) in OF_CARD.items()}
    values: dict[str, Any] = {
        field: value * unit for field, (value, unit) in given.items() if value is not None
    }
    return replace(card, **values)


def _given(options: argparse.Namespace, name: str) -> float | None:
    return vars(options).get(name[2:].replace("-", "_"))
