"""A planned run as arguments of a command."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardtune.config import KEYS
from shardtune.planner.arithmetic.estimate import Estimate
from shardtune.planner.mesh import MESH, value_of


def launch_command(run: Estimate, given: Sequence[str]) -> str:
    """Return the command that launches a run: `given` arguments, then its own mesh and values."""
    named = mesh_arguments(run)
    keys = {argument.partition("=")[0] for argument in named}
    kept = [argument for argument in given if argument.partition("=")[0] not in keys]
    if run.machine.nodes == 1:
        processes = f"--processes={run.machine.ranks_per_node}"
        return shlex.join(["shardtune", "train", processes, *kept, *named])
    sizes = {"NNODES": (run.machine.nodes, 2), "GPUS_PER_NODE": (run.machine.ranks_per_node, 8)}
    environment = [f"{name}={n}" for name, (n, default) in sizes.items() if n != default]
    return shlex.join([*environment, "./launch_node0.sh", *kept, *named])


def mesh_arguments(run: Estimate) -> list[str]:
    """Return as arguments the keys of a run's mesh that are not defaults, then its values."""
    mesh = {key: value_of(run.config, key) for key in MESH}
    named = {k: n for k, n in mesh.items() if k in run.values or n != KEYS[k].default}
    return [*as_arguments({**named, **run.values})]


def as_arguments(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield values of keys as arguments of a run, in YAML's words."""
    words = {True: "true", False: "false", None: "null"}
    for key, value in values.items():
        is_word = value is None or isinstance(value, bool)
        yield f"{key}={words[value] if is_word else value}"
