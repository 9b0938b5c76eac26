"""The preflight through the launch scripts: faults between two nodes, each named by both of them.

Nodes are network namespaces with the guide's own addresses, or processes on loopback.
"""

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.chats import chats, write_jsonl
from helpers.commands import REPOSITORY, a_free_port, completed, needs_namespaces, piped
from helpers.documented import error_line, require_error_line
from helpers.launches import start_preflight
from helpers.preflight_faults import FAULTS, Machine, both

from distTest.rehearse.namespaces import joined_nodes
from shardtune.cluster import microbenchmark
from shardtune.cluster.child import Child, Pipe
from shardtune.cluster.control import Control, NodeHello
from shardtune.cluster.rendezvous import NotFound, say_hello

INTERFACE = "enp26s0np0"
ADDRESSES = ["10.11.7.50", "10.11.7.51", "10.11.7.52"]
ENDED_WITHIN_S = 60


@pytest.fixture
def inputs(tmp_path: Path, models: dict[str, Path]) -> Callable[[str], Path]:
    """A folder of a node, with the same inputs as every other."""

    def make(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        write_jsonl(folder / "train.jsonl", chats(12))
        shutil.copytree(models["llama"], folder / "model")
        (folder / "config.yaml").write_text(
            "model: {path: ./model, compute_dtype: float32}\ntrain: {max_steps: 2}\n"
            "data: {train: train.jsonl, max_length: 128}\n",
            encoding="utf-8",
        )
        return folder

    return make


@pytest.fixture
def machines(inputs: Callable[[str], Path]) -> Iterator[list[Machine]]:
    with joined_nodes(ADDRESSES[:2], INTERFACE) as nodes:
        scripts = [REPOSITORY / f"launch_node{number}.sh" for number in range(2)]
        yield [
            Machine(node, inputs(node.host), script)
            for node, script in zip(nodes, scripts, strict=True)
        ]


def ended(process: subprocess.Popen[str], timeout_s: float = 400) -> tuple[int, str, str]:
    output, errors = process.communicate(timeout=timeout_s)
    assert not set("\r\x1b") & set(output + errors)
    return process.returncode, output, errors


CASES = [
    pytest.param(fault, id=fault.name, marks=() if fault.is_quick else pytest.mark.full)
    for fault in FAULTS
]


@needs_namespaces
@pytest.mark.parametrize("fault", CASES)
def test_each_fault_is_named_on_every_node(fault, machines):
    fault.prepare(*machines)
    started_s = time.monotonic()
    started = [machine.start() for machine in machines]
    expected = (fault.words, fault.on_worker or fault.words)
    for process, words in zip(started, expected, strict=True):
        code, output, errors = ended(process)
        assert code == 2, output + errors
        last = error_line(errors)
        assert last.startswith("ERROR: ") and " - " in last and words in last, output + errors
        assert "Training Configuration" not in output
    assert time.monotonic() - started_s < ENDED_WITHIN_S


def on_loopback(
    node: int, cwd: Path, port: str, *arguments: str, **settings: str
) -> subprocess.Popen[str]:
    """The preflight alone, as a node with two ranks."""
    return start_preflight(node, port, *arguments, cwd=cwd, **{"GPUS_PER_NODE": "2"} | settings)


def wait_for(process: subprocess.Popen[str], words: str) -> str:
    """Return the process's output up to the line with these words."""
    assert process.stdout is not None
    output = ""
    for line in process.stdout:
        output += line
        if words in line:
            return output
    raise AssertionError(output)


def test_nodes_that_agree_pass_the_preflight(inputs):
    """They have different sizes."""
    folder, port = inputs("both"), a_free_port()
    master = on_loopback(0, folder, port)
    output = wait_for(master, "waiting for node 1 of 2, 300 s more")
    worker = on_loopback(1, folder, port, GPUS_PER_NODE="1")
    (code0, more, errors0), (code1, on_worker, errors1) = ended(master), ended(worker)
    assert (code0, code1) == (0, 0), errors0 + errors1
    lines = (output + more).splitlines()
    assert len([line for line in lines if not line.startswith("Preflight: waiting")]) <= 12
    assert "run.dir runs/config is shared by all nodes" in more
    figures = r"\S+( GB/s)? +\S+ GB/s +\d+ us +\S+ TFLOP/s"
    for node, size in ((0, 2), (1, 1)):
        row = rf"^Preflight: {node}     \S+ +{size} x CPU process +{figures}$"
        assert re.search(row, more, re.MULTILINE), more
    for last in (lines[-1], on_worker.splitlines()[-1]):
        assert re.fullmatch(r"Preflight: all 2 nodes agree \(\d+ s\)", last)
    assert not errors0 + errors1 and not list(folder.rglob(".preflight*"))
    with socket.create_server(("127.0.0.1", int(port))):
        pass  # torchrun is next


@pytest.mark.parametrize("cause", [signal.SIGKILL, signal.SIGTERM])
def test_a_node_0_that_dies_while_another_node_waits_is_named(cause, inputs):
    folder, port = inputs("all"), a_free_port()
    master = on_loopback(0, folder, port, NNODES="3")
    worker = on_loopback(1, folder, port, NNODES="3")
    wait_for(worker, "has found node 0")
    master.send_signal(cause)
    code, _, errors = ended(worker)
    assert code == 2 and " went away (" in errors.splitlines()[-1]
    require_error_line(errors.splitlines()[-1])
    code, _, errors = ended(master)
    assert code == (1 if cause == signal.SIGTERM else -signal.SIGKILL)
    if cause == signal.SIGTERM:
        line = "ERROR: ended by SIGTERM during the preflight - run the same command again\n"
        assert errors == line


@pytest.mark.full
def test_a_node_0_that_is_stopped_while_others_wait_is_named(inputs):
    folder, port = inputs("all"), a_free_port()
    nodes = [on_loopback(node, folder, port, NNODES="3") for node in (0, 1)]
    wait_for(nodes[1], "has found node 0")
    nodes[0].send_signal(signal.SIGSTOP)
    code, _, errors = ended(nodes[1])
    nodes[0].kill()
    ended(nodes[0])
    last = error_line(errors)
    assert code == 2 and " went away (no sign of life for 20 s, " in last, errors


@pytest.mark.full
@needs_namespaces
def test_nodes_meet_at_a_second_address_of_the_master(machines):
    """It has a label, as old tools give one, and is in a second network."""
    for number, machine in enumerate(machines):
        own = f"192.168.77.5{number}/24"
        machine.node.ip("address", "add", own, "dev", INTERFACE, "label", f"{INTERFACE}:1")
    both(machines, MASTER_ADDR="192.168.77.50")
    started = [machine.start() for machine in machines]
    (code0, output, errors0), (code1, _, errors1) = [ended(process, 240) for process in started]
    assert (code0, code1) == (0, 0), output + errors0 + errors1
    assert "run.dir runs/config is on each node's own disk" in output
    assert "Preflight: all 2 nodes agree" in output and "Saved the final model" in output


def test_ranks_that_cannot_meet_are_named_on_both_nodes(inputs):
    """gloo finds no such interface: what failed is named, on both nodes, with what it said."""
    folder, port = inputs("both"), a_free_port()
    nodes = [on_loopback(node, folder, port, GLOO_SOCKET_IFNAME="eth77") for node in range(2)]
    for code, _, errors in map(ended, nodes):
        last = error_line(errors)
        assert code == 2 and "the rendezvous of the ranks failed" in last and "eth77" in last, (
            errors
        )


def test_a_child_dies_with_its_parent():
    """At once, whatever it is doing, as a rank within a collective."""
    program = (
        "import os, time; from shardtune.cluster.child import Child\n"
        "def work(pipe): print(os.getpid(), flush=True); time.sleep(99)\n"
        "child = Child('a child', work); time.sleep(99)"
    )
    parent = piped([sys.executable, "-c", program], REPOSITORY, stderr=None)
    assert parent.stdout is not None
    child = Path("/proc") / parent.stdout.readline().strip()
    assert child.exists()
    parent.kill()
    parent.communicate(timeout=40)  # which ends when nobody holds its output any more


def test_a_child_ignores_a_hangup_that_nohup_ignores():
    def wait_and_send(pipe: Pipe) -> None:
        pipe.send({})
        time.sleep(0.5)
        pipe.send({"done": True})

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        child = Child("a child", wait_and_send)
        assert child.result() == {}
        assert child._process.pid is not None
        os.kill(child._process.pid, signal.SIGHUP)
        assert child.result() == {"done": True}
        child.end()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_child_that_ends_without_a_message_is_a_problem_of_its_node():
    child = Child("node 0 (host0)", lambda pipe: os._exit(3))
    (problem,) = child.result()["problems"]
    child.end()
    assert problem == "node 0 (host0) ended without a message (exit code 3) - see above"


def test_a_rank_that_does_not_finish_the_measurement_is_named(tmp_path, monkeypatch):
    """It is named with the part in which it stands: here the other one never comes."""
    monkeypatch.setattr(microbenchmark, "_ALL_TIMEOUT_S", 2.0)
    job = {"logs": str(tmp_path), "node": 0, "name": "node 0 (host0)", "sizes": [1, 1]}
    job |= {"stages": 1, "backend": "gloo", "address": "127.0.0.1", "port": int(a_free_port())}
    (problem,) = microbenchmark.measure(job)["problems"]
    late = "node 0 (host0), rank 0 did not finish within 2 s (last seen in the rendezvous of the"
    assert problem.startswith(late), problem
    require_error_line(f"ERROR: {problem}")


@pytest.mark.full
def test_the_ways_between_stages_are_tried(tmp_path, monkeypatch):
    """They are no part of an all-reduce: here one rank does not answer to its neighbour."""
    exchange = microbenchmark._exchange

    def exchange_but_rank_1(device: torch.device, stage_ranks: int) -> None:
        time.sleep(60 * (dist.get_rank() == 1))
        exchange(device, stage_ranks)

    monkeypatch.setattr(microbenchmark, "_exchange", exchange_but_rank_1)
    monkeypatch.setattr(microbenchmark, "_PART_TIMEOUT_S", 5.0)
    job = {"logs": str(tmp_path), "node": 0, "name": "node 0 (host0)", "sizes": [2], "stages": 2}
    job |= {"backend": "gloo", "address": "127.0.0.1", "port": int(a_free_port())}
    (problem,) = microbenchmark.measure(job)["problems"]
    assert "rank 0: the messages between the stages failed (" in problem


@pytest.mark.full
def test_the_store_of_a_running_job_is_a_stranger():
    """torchrun's store answers at MASTER_PORT, and serves its job afterwards too."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    me = NodeHello(node=1, nodes=2, host="host1", address="?", code="d1", problems=[])

    async def hello() -> None:
        await say_hello(Control(me), "127.0.0.1", store.port)

    with pytest.raises(NotFound) as result:
        asyncio.run(hello())
    assert result.value.kind == "stranger"
    store.set("still", "serves")


@pytest.mark.parametrize("command", [["./launch_node0.sh"], ["python", "-m", "distTest.preflight"]])
def test_a_python_without_the_packages_is_refused(command, tmp_path):
    venv.create(tmp_path / "empty", with_pip=False)
    if command[0] == "python":
        command = [str(tmp_path / "empty/bin/python"), *command[1:]]
    done = completed(
        command,
        cwd=REPOSITORY,
        env=os.environ | {"VIRTUAL_ENV": str(tmp_path / "empty"), "NNODES": "1"},
        timeout_s=240,
    )
    assert done.returncode == 2
    assert re.fullmatch(
        r"ERROR: \S+/empty/bin/python has no torch, .* - activate .*\n", done.stderr
    )
