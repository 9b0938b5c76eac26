"""`shardtune train`: the run that the launch scripts start, on this machine alone."""

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import NoReturn

from shardtune.cluster.environment import REPOSITORY
from shardtune.config import Config
from shardtune.config_io import add_run_arguments, load_config
from shardtune.distributed.rank_record import SHORT_START
from shardtune.errors import UserError

_CPU_PROCESSES = 2
_COUNT_GPUS = "import torch; print(torch.cuda.device_count())"
_COUNTED_WITHIN_S = 120.0
_SET_FOR_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_VALUES_OF_ONE_NODE = {"NNODES": "1", "NODE_RANK": "0"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser, REPOSITORY / "config.yaml")
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help=f"ranks (default: GPUS_PER_NODE, else one a GPU, or {_CPU_PROCESSES} CPU processes)",
    )
    parser.epilog = "MAX_RESTARTS and JOIN_TIMEOUT are read as by the launch scripts."


def train(options: argparse.Namespace) -> NoReturn:
    """Become the agent of a launch with one node. Raises UserError."""
    if options.processes is not None and options.processes < 1:
        raise UserError(f"--processes {options.processes} is less than 1 - start at least one")
    _require_no_other_launch(os.environ)
    config = load_config(options.config, options.assignments, os.environ)
    processes = options.processes or os.environ.get("GPUS_PER_NODE") or _processes(config)
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {"GPUS_PER_NODE": str(processes), "PYTHONPATH": os.pathsep.join(paths)}
    settings |= {"MASTER_PORT": "", SHORT_START: "1"}  # a free port
    command = [sys.executable, "-P", "-m", "shardtune.cluster", f"--config={options.config}"]
    # The agent forks, so it needs a process that has done nothing else.
    environment = os.environ | _VALUES_OF_ONE_NODE | settings
    os.execve(sys.executable, [*command, *options.assignments], environment)


def _require_no_other_launch(environ: Mapping[str, str]) -> None:
    problems = []
    if present := [name for name in _SET_FOR_RANKS if environ.get(name)]:
        problems.append(
            f"the environment has {', '.join(present)}, as torchrun and other launchers set for "
            "their processes, and this command starts processes of its own - run it by itself, or "
            "start train_fsdp.py with that launcher"
        )
    problems += [
        f"{name} is '{environ[name]}', and this command trains on this machine alone - unset it, "
        "or start ./launch_node0.sh on node 0 and ./launch_node1.sh on the others"
        for name, value in _VALUES_OF_ONE_NODE.items()
        if environ.get(name, "") not in ("", value)
    ]
    if problems:
        raise UserError(*problems)


def _processes(config: Config) -> int:
    """Return the number of GPUs, or of CPU processes. If it is wrong, the preflight says why."""
    if config.distributed.backend == "gloo":
        return _CPU_PROCESSES
    # This process's memory is the agent's, which needs no torch.
    command = [sys.executable, "-P", "-c", _COUNT_GPUS]
    try:
        counted = subprocess.run(
            command, capture_output=True, text=True, timeout=_COUNTED_WITHIN_S, check=True
        )
    except subprocess.SubprocessError:
        return _CPU_PROCESSES
    return int(counted.stdout) or _CPU_PROCESSES
