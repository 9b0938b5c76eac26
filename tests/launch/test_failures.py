"""What ends a run that is under way: on every node all processes are gone within a minute, the last
line names the rank or node that failed, and the same commands resume.

The launch scripts run as two nodes on this machine's loopback, or as network namespaces where a
cable is cut.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
from conftest import REPOSITORY, needs_namespaces, read_metrics
from helpers.commands import completed, finish
from helpers.documented import require_error_line
from helpers.launches import (
    ARGUMENTS,
    DATA,
    FORWARD,
    Nodes,
    break_rank,
    end,
    resumes,
    start,
    two_nodes,
    while_it_imports,
    write_run,
)

from distTest.rehearse import namespaces

HOST = socket.gethostname()
FULL = pytest.mark.full
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
LATER = "time.sleep(3); "  # once somebody has looked at the processes
LOADING = ("shardtune.model.build", "build_model")
RANK = r"rank {rank} on {host}: "
STEP = r"last seen in step \d+ \(.+\)"
KILLED = RANK + rf"ended by SIGKILL, {STEP} - most often killed for memory, .*"
CRASHED = RANK + rf"ended by SIGSEGV, {STEP} - see its output above .*"
ENDED = RANK + rf"ended with code CODE, {STEP} - see its output above .*"
RAISED = RANK + r"\w+: .*, in step 5 \(forward and backward\) - see the traceback there; .*"
STOPPED = RANK + rf"no sign of life for \d+ s, {STEP} - its process is stopped .*"


@pytest.fixture
def folder(tmp_path: Path, models: dict[str, Path]) -> Path:
    return write_run(tmp_path, models["llama"])


def require_end(nodes: Nodes, code: int, pattern: str) -> None:
    """Both nodes end with this code and a last line that is documented."""
    for actual, last in nodes.end():
        assert actual == code and re.fullmatch(f"ERROR: {pattern}", last), nodes.texts()
        require_error_line(last)


@FULL
@pytest.mark.parametrize(
    ("rank", "effect", "how"),
    [
        (3, f"threading.Timer(1, lambda: {KILL}).start()", "by SIGKILL"),
        (0, KILL, "by SIGKILL"),
        (2, "os._exit(7)", "with code 7"),
        (2, "os._exit(0)", "with code 0"),
    ],
)
def test_a_rank_that_ends_while_it_imports_is_named(rank, effect, how, folder):
    with two_nodes(folder, **while_it_imports(folder, str(rank), effect)) as nodes:
        nodes.wait_for_words("nodes agree")
        line = f"rank {rank} on {HOST}: ended {how}, before it had met the others - .*"
        require_end(nodes, 1, line)
        assert "Training Configuration" not in nodes.texts()[0]


@FULL
def test_a_rank_that_hangs_while_it_imports_is_named_as_absent(folder):
    """Slow or stuck, nobody can know before the time to meet is over."""
    fault = while_it_imports(folder, "1", "time.sleep(3600)")
    with two_nodes(folder, GPUS_PER_NODE="1", JOIN_TIMEOUT="40", **fault) as nodes:
        nodes.wait_for_words("nodes agree")
        time.sleep(40)
        line = r"rank 1 of 2 did not come within 40.0 s - start every node within that time, .*"
        require_end(nodes, 2, line)


@pytest.mark.parametrize(
    ("ranks_per_node", "rank", "where", "effect", "line"),
    [
        (1, 1, DATA, KILL, KILLED),
        *(
            pytest.param(*case, marks=FULL)
            for case in [
                (1, 0, DATA, "os._exit(0)", ENDED.replace("CODE", "0")),
                (1, 1, DATA, "os.kill(os.getpid(), signal.SIGSTOP)", STOPPED),
                (2, 3, DATA, KILL, KILLED),
                (1, 1, FORWARD, f"{LATER}raise ValueError('no such token')", RAISED),
                (2, 3, FORWARD, f"{LATER}sys.exit(0)", ENDED.replace("CODE", "0")),
                (1, 1, DATA, "os._exit(7)", ENDED.replace("CODE", "7")),
                (1, 1, DATA, "os.kill(os.getpid(), signal.SIGSEGV)", CRASHED),
            ]
        ),
    ],
)
def test_a_rank_that_ends_or_stops_is_named(ranks_per_node, rank, where, effect, line, folder):
    """One line says it: a rank that only lost a connection prints no traceback.

    No process of the launch has the secret of the agents.
    """
    fault = break_rank(folder, rank, where, effect) | {"JOIN_SECRET": "the secret word"}
    with two_nodes(folder, GPUS_PER_NODE=str(ranks_per_node), **fault) as nodes:
        nodes.wait_for_step(2)
        assert nodes.ranks(0) and not nodes.processes_with("the secret word")
        require_end(nodes, 1, line.format(rank=rank, host=HOST))
        if where == DATA:
            assert not any("Traceback" in text for text in nodes.texts()), nodes.texts()
    if ranks_per_node == 2:
        resumes(folder)


@FULL
def test_the_rank_that_ended_first_is_the_one_named(folder):
    """All others are killed behind it, before they can tell of it."""
    siblings = "$(cat /proc/%d/task/*/children)"
    others = f"os.system('(sleep 0.3; kill -9 {siblings} 2> /dev/null) &' % os.getppid())"
    fault = break_rank(folder, 1, DATA, f"{others}; {KILL}")
    one_node = {"NNODES": "1", "GPUS_PER_NODE": "2"}
    code, _, errors = end(start("launch_node0.sh", *ARGUMENTS, cwd=folder, **one_node, **fault))
    line = KILLED.format(rank=1, host=HOST)
    assert code == 1 and re.fullmatch(f"ERROR: {line}", errors.splitlines()[-1]), errors


@pytest.mark.parametrize(
    ("rank", "ranks_per_node", "mesh", "where", "phase", "at"),
    [
        (1, 1, "replicate=1", DATA, "data", "build_batch"),
        *(
            pytest.param(*case, marks=FULL)
            for case in [
                (1, 1, "replicate=2", FORWARD, "forward and backward", "summed_loss"),
                (1, 2, "replicate=1", DATA, "data", "build_batch"),
                (2, 2, "replicate=1", FORWARD, "forward and backward", "summed_loss"),
                # All others wait for a message of that rank's stage, or in that stage.
                (1, 2, "stages=2", DATA, "data", "build_batch"),
                (3, 2, "stages=2", FORWARD, "forward and backward", "summed_loss"),
            ]
        ),
    ],
)
def test_a_rank_that_does_not_arrive_is_named(rank, ranks_per_node, mesh, where, phase, at, folder):
    """Its own log shows its stack."""
    micro_batches = 2 if "stages" in mesh else 1
    fault = break_rank(folder, rank, where, "time.sleep(3600)", nth=4 * micro_batches + 1)
    limits = ("distributed.step_timeout_s=12", f"parallel.{mesh}")
    limits += (f"train.gradient_accumulation_steps={micro_batches}",)
    with two_nodes(folder, *limits, GPUS_PER_NODE=str(ranks_per_node), **fault) as nodes:
        nodes.wait_for_step(4)
        behind = rf"did not arrive within 12 s \(at {at}, sitecustomize.py:\d+\), in step 5"
        name = f"rank {rank} on {HOST}"
        require_end(nodes, 1, rf"{name}: {behind} \({phase}\) - see its traceback there, .*")
        its_log = nodes.texts()[rank // ranks_per_node]
        assert "time.sleep(3600)" in its_log.partition(f"{name} is here:")[2], its_log


@FULL
@pytest.mark.parametrize(
    ("effect", "code"),
    [
        ("time.sleep(3600)", 1),
        ("exec('for _ in range(2 * 10**8): pass')", 0),
    ],
)
def test_a_rank_may_take_long_outside_of_steps_while_it_works(effect, code, folder):
    """It may take its time as long as it works. One node is watched as two are."""
    fault = break_rank(folder, 1, LOADING, effect, nth=1)
    one_node = {"NNODES": "1", "GPUS_PER_NODE": "2"}
    arguments = (*ARGUMENTS, "distributed.step_timeout_s=4", "train.max_steps=1")
    actual, _, errors = end(start("launch_node0.sh", *arguments, cwd=folder, **one_node, **fault))
    assert actual == code, errors
    if code:
        last = errors.splitlines()[-1]
        at = r"\(at build_model, sitecustomize.py:\d+\)"
        line = rf"rank 1 on {HOST}: did not arrive within 4 s {at}, in loading the model"
        assert re.match(f"ERROR: {line} - see its traceback there, or raise ", last), errors
        require_error_line(last)


@FULL
@pytest.mark.parametrize(
    ("node", "is_training"),
    [(0, True), (1, True), (0, False), (1, False)],
)
def test_an_agent_that_is_killed_ends_its_ranks_and_the_other_node(node, is_training, folder):
    """Its ranks end with it, also before they have met; the other node says so at once."""
    fault = {} if is_training else while_it_imports(folder, "train_fsdp.py", "time.sleep(20)")
    with two_nodes(folder, **fault) as nodes:
        if is_training:
            nodes.wait_for_step(4)
        else:
            nodes.wait_for_words("nodes agree")
        time.sleep(8)  # the agents tell their ranks' places once a second, on an idle machine
        nodes.remember()
        nodes.scripts[node].kill()
        code, last = nodes.end()[1 - node]
        place = STEP if is_training else "last seen in start-up"
        lost = rf"node 1 \({HOST}\) is lost: .+ \(ranks 2 to 3, {place}\)"
        if node == 0:
            lost = rf"node 0 \({HOST}\) is out of reach at 127.0.0.1:\d+: .+"
        assert code == 1 and re.fullmatch(f"ERROR: {lost} - its launch has .*", last), nodes.texts()
        require_error_line(last)


@FULL
def test_an_agent_that_is_stopped_is_out_of_reach(folder):
    """The other node ends within a minute, and the stopped one when it goes on."""
    with two_nodes(folder, GPUS_PER_NODE="1") as nodes:
        nodes.wait_for_step(4)
        os.kill(nodes.scripts[0].pid, signal.SIGSTOP)
        assert nodes.scripts[1].wait(60) == 1
        last = nodes.texts()[1].splitlines()[-1]
        assert "is out of reach" in last and "no sign of life for 40 s" in last, last
        require_error_line(last)
        os.kill(nodes.scripts[0].pid, signal.SIGCONT)
        assert nodes.end()[0][0] == 1


@FULL
@needs_namespaces
@pytest.mark.parametrize(("lost", "how"), [(0, "power"), (1, "cable")])
def test_a_node_that_is_lost_is_named(lost, how, folder):
    """Nothing comes from it any more, not even the end of its connections."""
    with namespaces.joined_nodes(["10.11.7.50", "10.11.7.51"], "enp26s0np0") as places:
        prefixes = (places[0].prefix, places[1].prefix)
        place = {"MASTER_ADDR": "10.11.7.50", "NCCL_SOCKET_IFNAME": "enp26s0np0"}
        with two_nodes(folder, prefixes=prefixes, **place) as nodes:
            nodes.wait_for_step(4)
            time.sleep(2)
            places[lost].ip("link", "set", places[lost].interface, "down")
            if how == "power":
                places[lost].kill_all()
            ended = nodes.end()
        silent = "no sign of life for 40 s"
        lines = (
            rf"node 1 \(node1\) is lost: {silent} \(ranks 2 to 3, {STEP}\) - .*",
            rf"node 0 \(node0\) is out of reach at 10.11.7.50:\d+: {silent} .* - .*",
        )
        for node, line in enumerate(lines):
            code, last = ended[node]
            if how == "cable" or node != lost:
                assert code == 1 and re.fullmatch(f"ERROR: {line}", last), nodes.texts()
                require_error_line(last)
    resumes(folder)


@FULL
@needs_namespaces
@pytest.mark.parametrize(("lost", "is_shared"), [(0, False), (1, True)])
def test_the_other_node_goes_on_without_one_that_stays_dead(lost, is_shared, folder, tmp_path):
    """As docs/launch.md says, on a shared disk and from copied parts; with the losses of a run that
    nothing disturbed."""
    folders = [folder, folder]
    if not is_shared:
        folders = [shutil.copytree(folder, tmp_path / f"node{node}") for node in (0, 1)]
    whole = shutil.copytree(folder, tmp_path / "whole")
    rows, at_once = "train.gradient_accumulation_steps=", "scheduler.warmup_ratio=0"
    with namespaces.joined_nodes(["10.11.7.50", "10.11.7.51"], "enp26s0np0") as places:
        prefixes = tuple(
            [*place.prefix, "env", "-C", str(own)]
            for place, own in zip(places, folders, strict=True)
        )
        place = {"MASTER_ADDR": "10.11.7.50", "NCCL_SOCKET_IFNAME": "enp26s0np0"}
        place["GPUS_PER_NODE"] = "1"
        with two_nodes(folders[0], f"{rows}1", at_once, prefixes=prefixes, **place) as nodes:
            nodes.wait_for_words("Saved checkpoint_0000004")
            nodes.remember()
            places[lost].kill_all()
            code, last = nodes.end()[1 - lost]
    assert code == 1 and "go on without it as docs/launch.md says" in last, last
    left, dead = folders[1 - lost] / "run", folders[lost] / "run"
    if not is_shared:
        parts = [path for path in (dead / "checkpoints").iterdir() if path.name[0] != "."]
        finish(completed(["cp", "-rn", *parts, left / "checkpoints"]))
        if lost == 0:
            shutil.copy(dead / "metrics.jsonl", left)
    steps = read_metrics(dead if lost == 0 else left, "step")[-1]["step"] + 2
    alone = {"NNODES": "1", "cwd": left.parent}
    arguments = (*ARGUMENTS, at_once, f"train.max_steps={steps}")
    code, output, errors = end(start("launch_node0.sh", *arguments, f"{rows}2", **alone))
    assert code == 0 and "Resumed from checkpoint_" in output, errors
    undisturbed = {"NNODES": "1", "GPUS_PER_NODE": "2", "cwd": whole}
    code, _, errors = end(start("launch_node0.sh", *arguments, f"{rows}1", **undisturbed))
    assert code == 0, errors
    seen, expected = (read_metrics(each, "step") for each in (left, whole / "run"))
    assert [entry["step"] for entry in seen] == list(range(1, steps + 1))
    losses = [[entry["loss"] for entry in each] for each in (seen, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@FULL
@needs_namespaces
def test_a_rank_that_ends_while_node_0_cannot_be_reached_is_named_on_its_node(folder):
    with namespaces.joined_nodes(["10.11.7.50", "10.11.7.51"], "enp26s0np0") as places:
        prefixes = (places[0].prefix, places[1].prefix)
        place = {"MASTER_ADDR": "10.11.7.50", "NCCL_SOCKET_IFNAME": "enp26s0np0"}
        effect = "time.sleep(11); raise OSError(116, 'Stale file handle')"
        settings = place | {"GPUS_PER_NODE": "1"} | break_rank(folder, 1, DATA, effect)
        with two_nodes(folder, prefixes=prefixes, **settings) as nodes:
            nodes.wait_for_step(4)
            time.sleep(2)  # its save asks the store, before the fifth step begins
            places[0].ip("link", "set", places[0].interface, "down")
            (code0, last0), (code1, last1) = nodes.end()
    assert code0 == 1 and re.match(r"ERROR: node 1 \(node1\) is lost: no sign ", last0), last0
    line = r"rank 1 on node1: OSError: .*, in step 5 .*"
    assert code1 == 1 and re.fullmatch(f"ERROR: {line}", last1), last1
    require_error_line(last1)


@FULL
@pytest.mark.parametrize("ranks_per_node", ["1", "2"])
def test_the_agents_start_the_ranks_again(ranks_per_node, folder):
    """On both nodes at once, and they resume; said each time."""
    once = f"os.path.exists('{folder}/fell') or open('{folder}/fell', 'w') and {KILL}"
    settings = break_rank(folder, 1, DATA, once) | {"GPUS_PER_NODE": ranks_per_node}
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


@FULL
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
        for code, last in nodes.end():
            assert code == 1 and re.fullmatch(f"ERROR: {line}", last), nodes.texts()
        restarts = [text.count("Restart ") for text in nodes.texts()]
        assert restarts == [1, 1] if when == "between the attempts" else restarts == [0, 0]


@FULL
def test_restarts_are_given_up_when_no_step_is_gained(folder):
    fault = break_rank(folder, 1, FORWARD, f"time.sleep(3); {KILL}", nth=1)  # step 1 is seen
    one_node = {"NNODES": "1", "GPUS_PER_NODE": "2", "MAX_RESTARTS": "5"}
    arguments = (*ARGUMENTS, "eval.baseline=false")
    code, output, errors = end(
        start("launch_node0.sh", *arguments, cwd=folder, **one_node, **fault)
    )
    assert code == 1 and output.count("Restart 1 of 5 after: ") == 1, output + errors
    assert (
        output.count("Restart ") == 1
        and "given up, because no step was gained" in errors.splitlines()[-1]
    )
    require_error_line(errors.splitlines()[-1])


@FULL
def test_torchrun_starts_the_ranks_again(folder):
    fault = break_rank(
        folder, 1, DATA, f"os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and {KILL}"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1"]
    script = [str(REPOSITORY / "train_fsdp.py"), *ARGUMENTS, "train.max_steps=12"]
    said = finish(
        completed(
            [*torchrun, "--nproc_per_node=2", *script],
            cwd=folder,
            env=os.environ | fault,
            timeout_s=480,
        )
    )
    assert "Resumed from checkpoint_000000" in said
    assert [entry["step"] for entry in read_metrics(folder / "run", "step")] == list(range(1, 13))
