"""The preflight through the launch scripts: faults between two nodes, each refused by its name on both of them.

Nodes are network namespaces with the guide's own addresses where there is root, else processes on loopback.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY, a_free_port, chats, needs_namespaces, write_jsonl
from documented import require_documented

from distTest import compare, facts, ranks
from distTest.namespaces import Node, joined_nodes

INTERFACE = "enp26s0np0"
ADDRESSES = ["10.11.7.50", "10.11.7.51", "10.11.7.52"]
ENDED_WITHIN_S = 60
CHOOSING = ("VIRTUAL_ENV", "CONDA_PREFIX", "NODE_RANK", "JOIN_TIMEOUT", "MASTER_ADDR", "MASTER_PORT", "NNODES")


@dataclass
class Machine:
    """A node before its launch: where it is, its folder with data, model and configuration, and what it is told."""

    node: Node
    folder: Path
    script: Path
    arguments: list[str] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)

    def start(self) -> subprocess.Popen[str]:
        inherited = {name: value for name, value in os.environ.items() if name not in CHOOSING}
        inherited |= {"VIRTUAL_ENV": sys.prefix, "GPUS_PER_NODE": "1", "JOIN_TIMEOUT": "40"}
        return self.run(str(self.script), "--config", "config.yaml", *self.arguments, env=inherited | self.settings)

    def run(self, *command: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self.node.prefix, *command],
            cwd=self.folder,
            env=env,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def python(self, program: str, *arguments: str) -> subprocess.Popen[str]:
        """A program that has printed a line before this returns."""
        process = self.run(sys.executable, "-c", program, *arguments)
        assert process.stdout is not None and process.stdout.readline()
        return process

    def drop(self, *what: str) -> None:
        """Lose incoming packets such as these without a word."""
        self.node.ip("rule", "add", "pref", "10", "iif", self.node.interface, *what, "blackhole")

    def accept(self, *what: str) -> None:
        """Let these pass what `drop` says."""
        self.node.ip("rule", "add", "pref", "5", "iif", self.node.interface, *what, "lookup", "local")


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
        yield [Machine(node, inputs(node.host), script) for node, script in zip(nodes, scripts, strict=True)]


Prepare = Callable[[Machine, Machine], object]


def both(machines: Sequence[Machine], **settings: str) -> None:
    for machine in machines:
        machine.settings |= settings


def own_routing_rules(machine: Machine) -> None:
    """Have rules that drop packets come before the one that hands them to this node."""
    machine.node.ip("rule", "add", "pref", "100", "lookup", "local")
    machine.node.ip("rule", "del", "pref", "0")


def wrong_address(master: Machine, worker: Machine) -> None:
    both((master, worker), JOIN_TIMEOUT="8")
    worker.settings["MASTER_ADDR"] = "10.11.7.99"


def address_of_the_worker(master: Machine, worker: Machine) -> None:
    both((master, worker), MASTER_ADDR="10.11.7.51", JOIN_TIMEOUT="6")


def no_way_between(master: Machine, worker: Machine) -> None:
    both((master, worker), JOIN_TIMEOUT="8")
    worker.node.ip("route", "add", "blackhole", "10.11.7.50/32")


def port_blocked(master: Machine, worker: Machine) -> None:
    own_routing_rules(master)
    master.drop("ipproto", "tcp", "dport", "29600")


def only_ssh_passes(master: Machine, worker: Machine) -> None:
    both((master, worker), JOIN_TIMEOUT="8")
    own_routing_rules(master)
    master.accept("ipproto", "tcp", "dport", "22")
    master.drop("ipproto", "tcp")


def other_ports_blocked(at: int) -> Prepare:
    """The ports of the system's choice, on one node; that also stops what its own connections to such ports receive."""

    def prepare(*machines: Machine) -> None:
        own_routing_rules(machines[at])
        machines[at].drop("ipproto", "tcp", "dport", "32768-60999")
        if at == 1:
            machines[at].accept("ipproto", "tcp", "sport", "29600")

    return prepare


def small_mtu(master: Machine, worker: Machine) -> None:
    subprocess.run(
        ["ip", "-n", worker.node.bridge, "link", "set", worker.node.wire, "mtu", "900"], check=True, capture_output=True
    )


def interface_elsewhere(at: int) -> Prepare:
    def prepare(*machines: Machine) -> None:
        node = machines[at].node
        node.ip("link", "add", "name", "docker0", "type", "bridge")
        node.ip("address", "add", "172.17.0.1/16", "dev", "docker0")
        node.ip("link", "set", "docker0", "up")
        machines[at].settings["NCCL_SOCKET_IFNAME"] = "docker0"

    return prepare


def setting(at: int, **settings: str) -> Prepare:
    return lambda *machines: machines[at].settings.update(settings)


def argument(text: str) -> Prepare:
    return lambda master, worker: worker.arguments.append(text)


def two_masters(master: Machine, worker: Machine) -> None:
    worker.script = master.script


def other_code(master: Machine, worker: Machine) -> None:
    copy = worker.folder / "clone"
    shutil.copytree(REPOSITORY / "shardtune", copy / "shardtune")
    shutil.copytree(REPOSITORY / "distTest", copy / "distTest")
    for file in REPOSITORY.glob("*.*"):
        if file.suffix in (".py", ".sh", ".yaml"):
            shutil.copy(file, copy / file.name)
    with (copy / "shardtune/loss.py").open("a", encoding="utf-8") as file:
        file.write("# changed here\n")
    worker.script = copy / "launch_node1.sh"


def other_version(master: Machine, worker: Machine) -> None:
    """What pip leaves of a package says its version."""
    info = worker.folder / "packages/transformers-4.0.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.0.0\n", encoding="utf-8")
    worker.settings["PYTHONPATH"] = str(info.parent)


def clock_ahead(seconds: float) -> Prepare:
    def prepare(master: Machine, worker: Machine) -> None:
        (worker.folder / "sitecustomize.py").write_text(
            f"import time\n_now = time.time\ntime.time = lambda: _now() + {seconds}\n", encoding="utf-8"
        )
        worker.settings["PYTHONPATH"] = str(worker.folder)

    return prepare


def other_data(master: Machine, worker: Machine) -> None:
    write_jsonl(worker.folder / "train.jsonl", chats(12, seed=1))


def no_data(master: Machine, worker: Machine) -> None:
    (worker.folder / "train.jsonl").unlink()


def other_model(master: Machine, worker: Machine) -> None:
    config = worker.folder / "model/config.json"
    config.write_text(config.read_text(encoding="utf-8").replace('"num_hidden_layers": 2', '"num_hidden_layers": 1'))


def other_weights(master: Machine, worker: Machine) -> None:
    """Of the same size, as a model and what was made of it are."""
    file = worker.folder / "model/model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


LISTEN = "import socket, time; s = socket.create_server(('', 29600)); print('listening', flush=True); time.sleep(99)"


def port_taken(master: Machine, worker: Machine) -> None:
    master.python(LISTEN, "train_fsdp.py")


def master_never_comes(master: Machine, worker: Machine) -> None:
    master.script = Path("/bin/true")
    worker.settings["JOIN_TIMEOUT"] = "4"


def another_service(master: Machine, worker: Machine) -> None:
    port_taken(master, worker)
    master.script = Path("/bin/true")


def loopback_name(master: Machine, worker: Machine) -> None:
    master.settings["MASTER_ADDR"] = "localhost"


@dataclass(frozen=True)
class Fault:
    """`words` stand in the last line on stderr of both nodes, or those of the worker in `on_worker`."""

    name: str
    prepare: Prepare
    words: str
    on_worker: str = ""
    is_quick: bool = False

    def __str__(self) -> str:
        return self.name


FAULTS = [
    Fault(
        "wrong master address",
        wrong_address,
        "start launch_node1.sh on it with MASTER_ADDR=10.11.7.50 MASTER_PORT=29600",
        "no machine answers at MASTER_ADDR 10.11.7.99",
    ),
    Fault(
        "the worker's address",
        address_of_the_worker,
        "MASTER_ADDR 10.11.7.51 is no address of node 0",
        "MASTER_ADDR 10.11.7.51 is an address of node 1 (node1) itself",
    ),
    Fault("no route", no_way_between, "did not come to node 0", "no machine answers at MASTER_ADDR 10.11.7.50"),
    Fault("port blocked", port_blocked, "port 29600 of node 0 is blocked on the way from node 1 (node1)"),
    Fault(
        "only port 22 passes", only_ssh_passes, "`nc -vz 10.11.7.50 29600` there", "port 29600 of 10.11.7.50 is blocked"
    ),
    Fault("other ports blocked towards node 0", other_ports_blocked(0), "ports other than 29600 are blocked"),
    Fault("other ports blocked towards node 1", other_ports_blocked(1), "ports other than 29600 are blocked"),
    Fault("MTU", small_mtu, "small messages pass between"),
    Fault(
        "wrong interface on node 0",
        interface_elsewhere(0),
        "NCCL_SOCKET_IFNAME is 'docker0' and the way to MASTER_ADDR 10.11.7.50 leads through enp26s0np0",
    ),
    Fault(
        "wrong interface on node 1",
        interface_elsewhere(1),
        "NCCL_SOCKET_IFNAME is 'docker0' and the way to MASTER_ADDR 10.11.7.50 leads through enp26s0np0",
        is_quick=True,
    ),
    Fault(
        "no such interface",
        setting(1, NCCL_SOCKET_IFNAME="eth7"),
        "name one of lo (127.0.0.1), enp26s0np0 (10.11.7.51)",
    ),
    Fault(
        "two masters",
        two_masters,
        "two nodes call themselves node 0: node0 (10.11.7.50) and node1 (10.11.7.51)",
        is_quick=True,
    ),
    Fault("forgotten nnodes", setting(1, NNODES="1"), "NNODES is 2 on node 0 (node0) and 1 on node 1 (node1)"),
    Fault("other nnodes", setting(1, NNODES="3"), "NNODES is 2 on node 0 (node0) and 3 on node 1 (node1)"),
    Fault("a rank that is no number", setting(1, NODE_RANK="one"), "NODE_RANK is 'one'"),
    Fault("a number that is none", setting(1, GPUS_PER_NODE="eight"), "GPUS_PER_NODE is 'eight'"),
    Fault("a name of loopback", loopback_name, "'localhost', which is 127.0.0.1 here: a loopback address"),
    Fault("port taken", port_taken, "port 29600 of node 0 (node0) is taken by process", is_quick=True),
    Fault("master never comes", master_never_comes, "", "no node 0 came to 10.11.7.50:29600 within 4 s"),
    Fault(
        "another service",
        another_service,
        "",
        "something answers at 10.11.7.50:29600 that is not the preflight of node 0",
    ),
    Fault(
        "worker never comes",
        lambda master, worker: (
            setting(1)(master, worker),
            master.settings.update(JOIN_TIMEOUT="3"),
            setattr(worker, "script", Path("/bin/true")),
        ),
        "node 1 of 2 did not come to node 0 within 3 s",
    ),
    Fault("other code", other_code, "shardtune/loss.py is"),
    Fault("other version", other_version, "transformers is 5.23.0 on node 0 (node0) and 4.0.0 on node 1 (node1)"),
    Fault("clock", clock_ahead(100), "the clock of node 1 (node1) is 100."),
    Fault(
        "other configuration",
        argument("optimizer.lr=3e-5"),
        "optimizer.lr is 1e-05 on node 0 (node0) and 3e-05 on node 1 (node1)",
        is_quick=True,
    ),
    Fault("other seed", argument("run.seed=7"), "run.seed is 1234 on node 0 (node0) and 7 on node 1 (node1)"),
    Fault("unknown key", argument("optimizer.rate=7"), "node 1 (node1): optimizer.rate (command line) is not known"),
    Fault("other data", other_data, "data.train: train.jsonl is"),
    Fault(
        "data is missing", no_data, "node 1 (node1): data.train=train.jsonl: no such file or directory", is_quick=True
    ),
    Fault("other model", other_model, "config.json is"),
    Fault("other weights", other_weights, "model.safetensors is"),
]


def ended(process: subprocess.Popen[str], timeout_s: float = 100) -> tuple[int, str, str]:
    output, errors = process.communicate(timeout=timeout_s)
    assert not set("\r\x1b") & set(output + errors)
    return process.returncode, output, errors


CASES = [pytest.param(fault, id=fault.name, marks=() if fault.is_quick else pytest.mark.full) for fault in FAULTS]


@needs_namespaces
@pytest.mark.parametrize("fault", CASES)
def test_fault(fault: Fault, machines: list[Machine]) -> None:
    fault.prepare(*machines)
    started_s = time.monotonic()
    started = [machine.start() for machine in machines]
    for process, machine, words in zip(started, machines, (fault.words, fault.on_worker or fault.words), strict=True):
        code, output, errors = ended(process)
        if machine.script.parent == Path("/bin"):
            continue
        assert code == 2, output + errors
        last = errors.splitlines()[-1]
        assert last.startswith("ERROR: ") and " - " in last and words in last, output + errors
        require_documented("preflight", last)
        assert "Training Configuration" not in output
    assert time.monotonic() - started_s < ENDED_WITHIN_S


@pytest.mark.full
@needs_namespaces
def test_a_late_worker_with_another_clock(machines: list[Machine]) -> None:
    """It comes after 25 s, is a few seconds ahead, has a disk of its own, and both train."""
    master, worker = machines
    clock_ahead(5)(master, worker)
    both(machines, JOIN_TIMEOUT="300")
    first = master.start()
    time.sleep(25)
    second = worker.start()
    (code0, output0, errors0), (code1, _, errors1) = ended(first, 240), ended(second, 240)
    assert (code0, code1) == (0, 0), output0 + errors0 + errors1
    assert output0.count("Preflight: waiting for node 1 of 2") >= 5
    assert "Warning: the clock of node 1 (node1) is 5.0 s ahead of that of node 0 (node0)" in output0
    assert "run.dir runs/config is on each node's own disk" in output0
    assert "Preflight: all 2 nodes agree" in output0 and "Saved the final model" in output0


def on_loopback(node: int, cwd: Path, port: str, *arguments: str, **settings: str) -> subprocess.Popen[str]:
    """The preflight alone, as a node of this machine."""
    inherited = {name: value for name, value in os.environ.items() if name not in CHOOSING}
    own = {"MASTER_ADDR": "127.0.0.1", "NCCL_SOCKET_IFNAME": "lo", "MASTER_PORT": port, "NODE_RANK": str(node)}
    return subprocess.Popen(
        [sys.executable, "-m", "distTest.preflight", "--config", "config.yaml", *arguments],
        cwd=cwd,
        env=inherited | own | {"GPUS_PER_NODE": "2", "PYTHONPATH": str(REPOSITORY)} | settings,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def wait_for(process: subprocess.Popen[str], words: str) -> str:
    """What the process has printed when it prints these words."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if words in line:
            return said
    raise AssertionError(said)


def test_nodes_that_agree(inputs: Callable[[str], Path]) -> None:
    """Nodes of different size; something else than a node knocks at the master port first, and is ignored."""
    folder, port = inputs("both"), a_free_port()
    master = on_loopback(0, folder, port)
    output = wait_for(master, "waiting for node 1 of 2, 300 s more")
    for noise in (b"GET / HTTP/1.1\r\n\r\n", b'{"hello": []}\n', b"[" * 100_000 + b"\n"):
        with socket.create_connection(("127.0.0.1", int(port))) as scanner, contextlib.suppress(ConnectionError):
            scanner.sendall(noise)
            scanner.settimeout(5)
            assert scanner.recv(100) == b""
    worker = on_loopback(1, folder, port, GPUS_PER_NODE="1")
    (code0, more, errors0), (code1, _, errors1) = ended(master), ended(worker)
    assert (code0, code1) == (0, 0), errors0 + errors1
    lines = (output + more).splitlines()
    assert len([line for line in lines if not line.startswith("Preflight: waiting")]) <= 12
    assert "run.dir runs/config is shared by all nodes" in more
    row = r"^Preflight: {node}     \S+ +{size} x CPU process +\S+( GB/s)? +\S+ GB/s +\d+ us +\S+ TFLOP/s$"
    for node, size in ((0, 2), (1, 1)):
        assert re.search(row.format(node=node, size=size), more, re.MULTILINE), more
    assert re.fullmatch(r"Preflight: all 2 nodes agree \(\d+ s\)", lines[-1])
    assert not errors0 + errors1 and not list(folder.rglob(".preflight*"))
    with socket.create_server(("127.0.0.1", int(port))):
        pass  # torchrun is next


def test_a_node_that_leaves_and_two_of_one_rank(inputs: Callable[[str], Path]) -> None:
    """Three nodes: one is stopped and started again, which is no fault, and then there are two of it."""
    folder, port = inputs("all"), a_free_port()
    master = on_loopback(0, folder, port, NNODES="3")
    worker = on_loopback(1, folder, port, NNODES="3")
    wait_for(worker, "has found node 0")
    worker.send_signal(signal.SIGINT)
    code, _, errors = ended(worker)
    assert code == 1 and errors == "ERROR: ended by SIGINT during the preflight - run the same command again\n"
    wait_for(master, "has left again")
    again = [on_loopback(1, folder, port, NNODES="3") for _ in range(2)]
    for code, _, errors in map(ended, [master, *again]):
        assert code == 2 and "ERROR: two nodes call themselves node 1: " in errors.splitlines()[-1], errors


@pytest.mark.parametrize("cause", [signal.SIGKILL, signal.SIGTERM])
def test_a_master_that_dies_while_a_node_waits(cause: signal.Signals, inputs: Callable[[str], Path]) -> None:
    folder, port = inputs("all"), a_free_port()
    master = on_loopback(0, folder, port, NNODES="3")
    worker = on_loopback(1, folder, port, NNODES="3")
    wait_for(worker, "has found node 0")
    master.send_signal(cause)
    code, _, errors = ended(worker)
    assert code == 2 and "ended while node 1" in errors.splitlines()[-1]
    require_documented("preflight", errors.splitlines()[-1])
    assert ended(master)[0] == (1 if cause == signal.SIGTERM else -signal.SIGKILL)


@pytest.mark.full
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_preflight_that_is_stopped(stopped: int, inputs: Callable[[str], Path]) -> None:
    """The other says who fell silent; the stopped one hears of it when it goes on."""
    folder, port = inputs("all"), a_free_port()
    nodes = [on_loopback(node, folder, port) for node in (0, 1)]
    wait_for(nodes[1], "has found node 0")
    nodes[stopped].send_signal(signal.SIGSTOP)
    code, _, errors = ended(nodes[1 - stopped])
    assert code == 2, errors
    assert re.match(rf"ERROR: node {stopped} \(.+\) went away \(no sign of life for 20 s, ", errors.splitlines()[-1])
    nodes[stopped].send_signal(signal.SIGCONT)
    assert ended(nodes[stopped])[0] == 2


def test_a_child_dies_with_its_parent() -> None:
    """At once, whatever it is doing, as a rank within a collective."""
    program = (
        "import os, time; from distTest.children import Child\n"
        "def work(link): print(os.getpid(), flush=True); time.sleep(99)\n"
        "child = Child('a child', work); time.sleep(99)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=REPOSITORY, text=True, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = Path("/proc") / parent.stdout.readline().strip()
    assert child.exists()
    parent.kill()
    parent.communicate(timeout=10)  # which ends when nobody holds its output any more


def test_a_stale_process_holds_the_port(inputs: Callable[[str], Path]) -> None:
    with socket.create_server(("0.0.0.0", 0)) as stale:
        node = on_loopback(0, inputs("one"), str(stale.getsockname()[1]), NNODES="1")
        code, _, errors = ended(node)
    assert code == 2 and f"is taken by process {os.getpid()} (`" in errors.splitlines()[-1]


@pytest.mark.full
def test_two_nodes_of_eight_processes(inputs: Callable[[str], Path]) -> None:
    folder, port = inputs("both"), a_free_port()
    nodes = [on_loopback(node, folder, port, GPUS_PER_NODE="8") for node in range(2)]
    for code, _, errors in map(ended, nodes):
        assert code == 0, errors


def test_ranks_that_fail(inputs: Callable[[str], Path]) -> None:
    """gloo finds no such interface: what failed is named, on both nodes, with what it said."""
    folder, port = inputs("both"), a_free_port()
    nodes = [on_loopback(node, folder, port, GLOO_SOCKET_IFNAME="eth77") for node in range(2)]
    for code, _, errors in map(ended, nodes):
        last = errors.splitlines()[-1]
        assert code == 2 and "the rendezvous of the ranks failed" in last and "eth77" in last, errors
        require_documented("preflight", last)


FACTS: dict[str, Any] = {
    "versions": {"torch": "2.13.0"},
    "libraries": {"CUDA": "13.0", "NCCL": "2.28.9"},
    "code": {},
    "config": {"parallel.replicate": 1, "parallel.expert": 1},
    "data": {},
    "model": {},
    "weights_bytes": 0,
    "remarks": [],
    "processes": 8,
    "run_dir": "runs/config",
    "free_disk_bytes": 1e13,
    "shares_run_dir": True,
    "clock_ahead_s": 0.0,
    "clock_error_s": 0.001,
    "device": "GPU",
    "gpus": [{"name": "H100", "free_bytes": 79e9, "total_bytes": 80e9}] * 8,
    "gpu_users": "",
    "driver": "580.1",
    "shm_bytes": 1e11,
    "nofile": 1 << 20,
    "memlock": -1,
    "has_rdma": True,
}


@pytest.mark.parametrize(
    ("different", "words"),
    [
        ({}, ""),
        ({"libraries": {"CUDA": "13.0", "NCCL": "2.27.3"}}, "NCCL is 2.28.9 on node 0 (a) and 2.27.3 on node 1 (b)"),
        ({"device": "CPU", "gpus": []}, "GPUs on node 0 (a) and CPUs on node 1 (b)"),
        (
            {"processes": 4},
            "12 (8 + 4 processes on node 0 (a), node 1 (b)), which parallel.replicate=8 does not divide",
        ),
        (
            {"config": {"parallel.replicate": 1, "parallel.expert": 1, "new": None}},
            "new is missing on node 0 (a) and null",
        ),
        ({"clock_ahead_s": -40.0}, "the clock of node 1 (b) is 40.0 s behind that of node 0 (a)"),
    ],
)
def test_facts_that_are_refused(different: dict[str, Any], words: str) -> None:
    facts = [FACTS, FACTS | different]
    if "processes" in different:
        facts = [fact | {"config": {"parallel.replicate": 8, "parallel.expert": 1}} for fact in facts]
    names = ["node 0 (a)", "node 1 (b)"]
    problems = compare.problems_of_files(facts, names) + compare.problems_of_machines(facts, names)
    assert [words in problem for problem in problems] == [True] * bool(different)


@pytest.mark.parametrize(
    ("different", "words"),
    [
        ({}, ""),
        ({"driver": "570.2"}, "the GPU drivers differ: 580.1 on node 0 (a), 570.2 on node 1 (b)"),
        ({"gpus": [{"name": "A100", "free_bytes": 40e9, "total_bytes": 40e9}]}, "the GPUs differ: 8 x H100 on node 0"),
        (
            {"gpus": [FACTS["gpus"][0] | {"free_bytes": 9e9}], "gpu_users": "77, python, 70 GB"},
            "node 1 (b): GPU 0 has only 9.0 of 80.0 GB free, another process holds the rest (processes on its GPUs: 77",
        ),
        ({"weights_bytes": 214 * 10**10}, "has 10000.0 GB free, a checkpoint may need up to 12840 GB"),
        ({"free_disk_bytes": 9e9}, "run.dir runs/config has 9.0 GB free"),
        ({"shm_bytes": 64e6}, "/dev/shm has 64 MB"),
        ({"nofile": 256}, "only 256 open files"),
        ({"memlock": 65536}, "only 65536 bytes may be locked"),
        ({"clock_ahead_s": 2.0}, "the clock of node 1 (b) is 2.0 s ahead of that of node 0 (a)"),
        ({"clock_ahead_s": 2.0, "clock_error_s": 1.5}, ""),
    ],
)
def test_facts_that_are_warned_of(different: dict[str, Any], words: str) -> None:
    found = compare.warnings_of([FACTS, FACTS | different], ["node 0 (a)", "node 1 (b)"])
    assert [words in warning for warning in found] == [True] * bool(words)


def test_a_slow_device() -> None:
    figures = [{"flops": [6e14, 6.1e14]}, {"flops": [4.6e14, 5.9e14]}]
    (warning,) = ranks.slow_devices(figures, ["node 0 (a)", "node 1 (b)"])
    assert warning.startswith("node 1 (b): device 0 is slow, its GEMM runs at 460 TFLOP/s")


def test_data_that_is_too_large_to_read_is_sampled(tmp_path: Path) -> None:
    """The last block of a file is always among the samples."""
    file = tmp_path / "train.jsonl"
    content = bytearray(20 << 20)
    file.write_bytes(content)
    whole, sampled = (facts.digest(file, is_whole) for is_whole in (True, False))
    content[-1] = 1
    file.write_bytes(content)
    assert facts.digest(file, True) != whole and facts.digest(file, False) != sampled


def test_a_python_without_the_packages(tmp_path: Path) -> None:
    venv.create(tmp_path / "empty", with_pip=False)
    done = subprocess.run(
        [REPOSITORY / "launch_node0.sh"],
        env=os.environ | {"VIRTUAL_ENV": str(tmp_path / "empty"), "NNODES": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert re.fullmatch(r"ERROR: \S+/empty/bin/python has no torch, .*, yaml - activate .*\n", done.stderr)
