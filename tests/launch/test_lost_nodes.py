"""A node that ends a run which is under way: its agent or its way to the other one is lost, and the
agents start ranks again.

The launch scripts run as two nodes on this machine's loopback, or as network namespaces where a
cable is cut.
"""

import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.commands import (
    REPOSITORY,
    completed,
    finish,
    needs_namespaces,
    read_metrics,
    wait_until,
)
from helpers.documented import error_line, require_error_line
from helpers.launches import (
    ARGUMENTS,
    DATA,
    FORWARD,
    HOST,
    KILL,
    KILLED,
    STEP,
    break_rank,
    one_node,
    resumes,
    two_nodes,
    while_it_imports,
    write_run,
)
from helpers.ranks import on_ranks, run_script

from distTest.rehearse import namespaces

pytestmark = pytest.mark.full
PLACE = {"MASTER_ADDR": "10.11.7.50", "NCCL_SOCKET_IFNAME": "enp26s0np0"}


@pytest.fixture
def folder(tmp_path: Path, models: dict[str, Path]) -> Path:
    return write_run(tmp_path, models["llama"])


@pytest.fixture
def places() -> Iterator[list[namespaces.Node]]:
    """Two nodes with a cable between them."""
    with namespaces.joined_nodes(["10.11.7.50", "10.11.7.51"], "enp26s0np0") as joined:
        yield joined


def cut_cable(node: namespaces.Node) -> None:
    node.ip("link", "set", node.interface, "down")


@pytest.mark.parametrize(
    ("node", "is_training"),
    [(0, True), (1, False)],
)
def test_an_agent_that_is_killed_ends_its_ranks_and_the_other_node(node, is_training, folder):
    """Its ranks end with it, also before they have met; the other node says so at once."""
    fault = {} if is_training else while_it_imports(folder, "train_fsdp.py", "time.sleep(20)")
    with two_nodes(folder, GPUS_PER_NODE="1", **fault) as nodes:
        if is_training:
            nodes.wait_for_step(4)
        else:
            nodes.wait_for_words("nodes agree")
            wait_until(lambda: nodes.ranks(0) and nodes.ranks(1))
        time.sleep(8)  # the agents tell their ranks' places once a second, on an idle machine
        nodes.remember()
        nodes.scripts[node].kill()
        code, last = nodes.end()[1 - node]
        place = STEP if is_training else "last seen in start-up"
        lost = rf"node 1 \({HOST}\) is lost: .+ \(rank 1, {place}\)"
        if node == 0:
            lost = rf"node 0 \({HOST}\) is out of reach at 127.0.0.1:\d+: .+"
        assert code == 1 and re.fullmatch(f"ERROR: {lost} - its launch has .*", last), nodes.texts()
        require_error_line(last)


def test_an_agent_that_is_stopped_is_out_of_reach(folder):
    """The other node ends within a minute, and the stopped one when it goes on."""
    with two_nodes(folder, GPUS_PER_NODE="1") as nodes:
        nodes.wait_for_step(4)
        os.kill(nodes.scripts[0].pid, signal.SIGSTOP)
        assert nodes.scripts[1].wait(60) == 1
        last = error_line(nodes.texts()[1])
        assert "is out of reach" in last and "no sign of life for 40 s" in last, last
        os.kill(nodes.scripts[0].pid, signal.SIGCONT)
        assert nodes.end()[0][0] == 1


@needs_namespaces
def test_nodes_whose_cable_is_cut_name_one_another(folder, places):
    """Nothing comes from the other any more, not even the end of its connections."""
    prefixes = (places[0].prefix, places[1].prefix)
    with two_nodes(folder, prefixes=prefixes, **PLACE) as nodes:
        nodes.wait_for_step(4)
        time.sleep(2)
        cut_cable(places[1])
        silent = "no sign of life for 40 s"
        lines = (
            rf"node 1 \(node1\) is lost: {silent} \(ranks 2 to 3, {STEP}\) - .*",
            rf"node 0 \(node0\) is out of reach at 10.11.7.50:\d+: {silent} .* - .*",
        )
        nodes.require_end(1, *lines)
    resumes(folder, GPUS_PER_NODE="1")


@needs_namespaces
def test_the_other_node_goes_on_without_node_0_that_stays_dead(folder, tmp_path, places):
    """As docs/launch.md says, by its mirror; with the losses of an undisturbed run."""
    dead, left, whole = (shutil.copytree(folder, tmp_path / name) for name in ("0", "1", "whole"))
    rows, at_once = "train.gradient_accumulation_steps=", "scheduler.warmup_ratio=0"
    prefixes = tuple(
        [*place.prefix, "env", "-C", str(own)]
        for place, own in zip(places, (dead, left), strict=True)
    )
    settings = PLACE | {"GPUS_PER_NODE": "1"}
    with two_nodes(dead, f"{rows}1", at_once, prefixes=prefixes, **settings) as nodes:
        nodes.wait_for_words("Mirrored checkpoint_")
        nodes.remember()
        places[0].kill_all()
        code, last = nodes.end()[1]
    assert code == 1 and "go on without it as docs/launch.md says" in last, last
    steps = read_metrics(dead / "run", "step")[-1]["step"] + 2
    shutil.rmtree(dead / "run")
    given = (at_once, f"train.max_steps={steps}")
    code, output, errors = one_node(left, *given, f"{rows}2", GPUS_PER_NODE="1")
    assert code == 0 and "Resumed from checkpoint_" in output, errors
    finish(on_ranks(2, run_script, [*ARGUMENTS, *given, f"{rows}1"], cwd=whole))
    seen, expected = (read_metrics(each / "run", "step") for each in (left, whole))
    assert [entry["step"] for entry in seen] == list(range(1, steps + 1))
    losses = [[entry["loss"] for entry in each] for each in (seen, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@needs_namespaces
def test_a_rank_that_ends_while_node_0_cannot_be_reached_is_named_on_its_node(folder, places):
    effect = "time.sleep(11); raise OSError(116, 'Stale file handle')"
    settings = PLACE | {"GPUS_PER_NODE": "1"} | break_rank(folder, 1, DATA, effect)
    prefixes = (places[0].prefix, places[1].prefix)
    with two_nodes(folder, prefixes=prefixes, **settings) as nodes:
        nodes.wait_for_step(4)
        time.sleep(2)  # its save asks the store, before the fifth step begins
        cut_cable(places[0])
        lines = (
            r"node 1 \(node1\) is lost: no sign .*",
            r"rank 1 on node1: OSError: .*, in step 5 .*",
        )
        nodes.require_end(1, *lines)


def test_the_agents_start_the_ranks_again(folder):
    """On both nodes at once, and they resume; said each time."""
    once = f"os.path.exists('{folder}/fell') or open('{folder}/fell', 'w') and {KILL}"
    settings = break_rank(folder, 1, DATA, once) | {"GPUS_PER_NODE": "1"}
    arguments = ("train.max_steps=12", "run.resume=never")  # which holds for the first start
    with two_nodes(folder, *arguments, MAX_RESTARTS="1", **settings) as nodes:
        nodes.wait_for_step(4)
        for script in nodes.scripts:
            assert script.wait(480) == 0, nodes.texts()
        for text in nodes.texts():
            line = KILLED.format(rank=1, host=HOST)
            assert len(re.findall(f"^Restart 1 of 1 after: {line}$", text, re.MULTILINE)) == 1, text
        assert "Resumed from checkpoint_000000" in nodes.texts()[0]
    steps = [entry["step"] for entry in read_metrics(folder / "run", "step")]
    assert steps == list(range(1, 13))


BETWEEN_ATTEMPTS = """
import asyncio, os, signal, sys
if "shardtune.cluster" in sys.orig_argv and os.environ["NODE_RANK"] == "1":
    from shardtune.cluster.agent import Agent
    original = Agent._end_ranks
    async def _end_ranks(self, ranks, end):
        await original(self, ranks, end)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.1)  # until its handler has run
    Agent._end_ranks = _end_ranks
"""


@pytest.mark.parametrize("when", ["before the failure", "between the attempts"])
def test_a_signal_ends_a_launch_that_would_start_its_ranks_again(when, folder):
    """Sent to the node that does not decide."""
    line = "ended by SIGTERM before a restart - run the same command again"
    effect = KILL
    if when == "before the failure":
        effect = f"os.kill(os.getppid(), signal.SIGTERM); time.sleep(0.5); {KILL}"
        line = KILLED.format(rank=1, host=HOST)
    settings = break_rank(folder, 1, DATA, effect) | {"GPUS_PER_NODE": "1"}
    if when == "between the attempts":
        with (folder / "fault/sitecustomize.py").open("a") as file:
            file.write(BETWEEN_ATTEMPTS)
    with two_nodes(folder, MAX_RESTARTS="3", **settings) as nodes:
        nodes.wait_for_step(4)
        nodes.require_end(1, line)
        restarts = [text.count("Restart ") for text in nodes.texts()]
        assert restarts == [1, 1] if when == "between the attempts" else restarts == [0, 0]


def test_restarts_are_given_up_when_no_step_is_gained(folder):
    fault = break_rank(folder, 0, FORWARD, f"time.sleep(3); {KILL}", nth=1)  # step 1 is seen
    fault |= {"MAX_RESTARTS": "5", "GPUS_PER_NODE": "1"}
    code, output, errors = one_node(folder, "eval.baseline=false", **fault)
    assert code == 1 and re.findall("Restart .*?: ", output) == ["Restart 1 of 5 after: "], output
    last = error_line(errors)
    assert "given up, because no step was gained" in last


def test_torchrun_starts_the_ranks_again(folder):
    at_first = "os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'"
    fault = break_rank(folder, 1, DATA, f"{at_first} and {KILL}")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1"]
    script = [str(REPOSITORY / "train_fsdp.py"), *ARGUMENTS, "train.max_steps=12"]
    command = [*torchrun, "--nproc_per_node=2", *script]
    said = finish(completed(command, cwd=folder, env=os.environ | fault, timeout_s=480))
    assert "Resumed from checkpoint_000000" in said
    assert [entry["step"] for entry in read_metrics(folder / "run", "step")] == list(range(1, 13))
