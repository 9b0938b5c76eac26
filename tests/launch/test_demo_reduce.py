"""distTest/demo_reduce.py: every command of its docstring, on this machine."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from helpers.commands import REPOSITORY, a_free_port, needs_namespaces

from distTest import demo_reduce
from distTest.rehearse import namespaces

ONE_NODE, TWO_NODES, TWO_TERMINALS = re.findall(r":\n((?:    .+\n)+)", demo_reduce.__doc__ or "")


def run_each(*commands: str, prefixes: tuple[list[str], ...] = ([], [])) -> str:
    """The output of commands that run at the same time; all must end with 0."""
    here = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    started = [
        subprocess.Popen(
            [*prefix, "bash", "-c", command],
            cwd=REPOSITORY,
            env=here,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command, prefix in zip(commands, prefixes, strict=False)
    ]
    outputs = [process.communicate(timeout=240)[0] for process in started]
    assert [process.returncode for process in started] == [0] * len(started), "\n".join(outputs)
    return "".join(outputs)


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


def sums(output: str) -> Counter[str]:
    return Counter(
        re.findall(r"^rank (\d+ of \d+ on .+, cpu: got \d+, right is \d+)$", output, re.MULTILINE)
    )


def expected(ranks: int, right: int) -> Counter[str]:
    host = socket.gethostname()
    return Counter(
        f"{rank} of {ranks} on {host}, cpu: got {right}, right is {right}" for rank in range(ranks)
    )


def test_one_node() -> None:
    assert sums(run_each(ONE_NODE)) == expected(2, 3)


def test_two_terminals() -> None:
    assert sums(run_each(*on_both(on_loopback(TWO_TERMINALS)))) == expected(2, 3)


@pytest.mark.full
def test_two_nodes_on_loopback() -> None:
    assert sums(run_each(*on_both(on_loopback(TWO_NODES)))) == expected(2, 3)


@pytest.mark.full
@needs_namespaces
def test_two_nodes_as_it_stands() -> None:
    """With the guide's own address, port and interface, and 16 ranks."""
    with namespaces.joined_nodes(["10.11.7.50", "10.11.7.51"], "enp26s0np0") as nodes:
        output = run_each(*on_both(TWO_NODES), prefixes=tuple(node.prefix for node in nodes))
    found = sums(output)
    assert len(found) == 16 and all(line.endswith("got 136, right is 136") for line in found)
    assert [sum(f" on node{n}, " in line for line in found) for n in (0, 1)] == [8, 8]
