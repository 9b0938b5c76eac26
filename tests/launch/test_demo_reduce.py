"""distTest/demo_reduce.py: every command of its docstring, on this machine."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.commands import REPOSITORY, a_free_port, needs_namespaces, piped

from distTest import demo_reduce
from distTest.rehearse import namespaces

ONE_NODE, TWO_NODES, TWO_TERMINALS = re.findall(r":\n((?:    .+\n)+)", demo_reduce.__doc__ or "")


SUM = r"^rank (\d+) of (\d+) on (\S+), cpu: got (\d+), right is (\d+)$"


def sums(*commands: str, prefixes: tuple[list[str], ...] = ([], [])) -> list[tuple[str, ...]]:
    """The ranks' lines of commands that run at the same time; all must end with 0."""
    here = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    started = [
        piped([*prefix, "bash", "-c", command], REPOSITORY, here, stderr=subprocess.STDOUT)
        for command, prefix in zip(commands, prefixes, strict=False)
    ]
    outputs = [process.communicate(timeout=500)[0] for process in started]
    assert not any(process.returncode for process in started), "\n".join(outputs)
    return sorted(re.findall(SUM, "".join(outputs), re.MULTILINE))


def on_both(command: str) -> tuple[str, str]:
    assert "--node_rank=0" in command
    return command, command.replace("--node_rank=0", "--node_rank=1")


def on_loopback(command: str) -> str:
    changes = {
        "10.11.7.50": "127.0.0.1",
        "29600": a_free_port(),
        "enp26s0np0": "lo",
        "nproc_per_node=8": "nproc_per_node=1",
    }
    for old, new in changes.items():
        command = command.replace(old, new)
    return command


@pytest.mark.full
@pytest.mark.parametrize(
    "commands",
    [
        (ONE_NODE,),
        on_both(on_loopback(TWO_TERMINALS)),
    ],
    ids=["one node", "two terminals"],
)
def test_two_ranks_sum_their_numbers(commands):
    host = socket.gethostname()
    assert sums(*commands) == [("0", "2", host, "3", "3"), ("1", "2", host, "3", "3")]


@pytest.mark.full
@needs_namespaces
def test_two_nodes_of_two_ranks_sum_their_numbers():
    """With the guide's own address, port and interface."""
    command = TWO_NODES.replace("nproc_per_node=8", "nproc_per_node=2")
    with namespaces.joined_nodes(["10.11.7.50", "10.11.7.51"], "enp26s0np0") as nodes:
        found = sums(*on_both(command), prefixes=tuple(node.prefix for node in nodes))
    assert found == [(str(rank), "4", f"node{rank // 2}", "10", "10") for rank in range(4)]
