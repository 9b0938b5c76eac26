"""The command line of a run, and how one is refused. Light: it can be read before torch is imported."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from shardtune.config import (
    Config,
    changed_keys,
    load_config,
    remarks,
    to_dict,
    write_config,
)
from shardtune.errors import UserError

__all__ = [
    "Parser",
    "changed_keys",
    "load_config",
    "read_run_arguments",
    "remarks",
    "to_dict",
    "write_config",
]


class Parser(argparse.ArgumentParser):
    """Refuses what it does not understand, so that it is said and ends as every other refusal."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} - see {self.prog} --help")


def read_run_arguments(arguments: Sequence[str], default_config: Path) -> Config:
    """The configuration that the arguments of train_fsdp.py name: [--config FILE] [section.key=value ...].

    Raises:
        UserError: with every problem found in them, in the file and in the environment.
    """
    parser = Parser(
        prog="train_fsdp.py",
        description="Fine-tune a causal language model with FSDP.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        type=Path,
        default=default_config,
        metavar="FILE",
        help="YAML file with the run's configuration (default: the config.yaml beside this script)",
    )
    parser.add_argument(
        "assignments",
        nargs="*",
        metavar="section.key=value",
        help="values that override the file's",
    )
    read = parser.parse_intermixed_args(arguments)  # an assignment may stand behind an option
    return load_config(read.config, read.assignments, os.environ)
