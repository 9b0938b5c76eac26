"""Nodes before their launch, and what may be wrong with them or between them; see FAULTS."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from distTest.rehearse.namespaces import Node
from helpers.chats import chats, write_jsonl
from helpers.commands import REPOSITORY

CHOOSING = (
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "NODE_RANK",
    "JOIN_TIMEOUT",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NNODES",
)


@dataclass
class Machine:
    """A node before its launch; `folder` holds its data, model and configuration."""

    node: Node
    folder: Path
    script: Path
    arguments: list[str] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0

    def start(self) -> subprocess.Popen[str]:
        inherited = {name: value for name, value in os.environ.items() if name not in CHOOSING}
        inherited |= {"VIRTUAL_ENV": sys.prefix, "GPUS_PER_NODE": "1", "JOIN_TIMEOUT": "40"}
        return self.run(
            *("sh", "-c", 'sleep "$0"; exec "$@"', str(self.delay_s), str(self.script)),
            *("--config", "config.yaml", *self.arguments),
            env=inherited | self.settings,
        )

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
        """Start a program, and wait for its first line."""
        process = self.run(sys.executable, "-c", program, *arguments)
        assert process.stdout is not None and process.stdout.readline()
        return process

    def drop(self, what: str) -> None:
        """Lose such incoming packets silently."""
        self.ip(f"rule add pref 10 iif {self.node.interface} {what} blackhole")

    def reject(self, what: str) -> None:
        """Refuse them as firewalls do (ICMP), which arrives as "No route to host"."""
        answer = "echo 1 > /proc/sys/net/ipv4/ip_forward"  # else the kernel does not answer
        subprocess.run([*self.node.prefix, "sh", "-c", answer], check=True)
        self.ip(f"rule add pref 10 iif {self.node.interface} {what} prohibit")

    def accept(self, what: str) -> None:
        """Let such packets pass `drop` and `reject`."""
        self.ip(f"rule add pref 5 iif {self.node.interface} {what} lookup local")

    def ip(self, arguments: str) -> None:
        self.node.ip(*arguments.split())


Prepare = Callable[[Machine, Machine], object]


def both(machines: Sequence[Machine], **settings: str) -> None:
    for machine in machines:
        machine.settings |= settings


def own_routing_rules(machine: Machine) -> None:
    """Make room for rules before the one that hands packets to this node."""
    machine.ip("rule add pref 100 lookup local")
    machine.ip("rule del pref 0")


def wrong_address(master: Machine, worker: Machine) -> None:
    both((master, worker), JOIN_TIMEOUT="8")
    worker.settings["MASTER_ADDR"] = "10.11.7.99"


def address_of_the_worker(master: Machine, worker: Machine) -> None:
    both((master, worker), MASTER_ADDR="10.11.7.51", JOIN_TIMEOUT="6")


def no_way_between(master: Machine, worker: Machine) -> None:
    both((master, worker), JOIN_TIMEOUT="8")
    worker.ip("route add blackhole 10.11.7.50/32")


def no_network(master: Machine, worker: Machine) -> None:
    """The worker's interface is in another network than node 0."""
    master.settings["JOIN_TIMEOUT"] = "8"
    worker.ip(f"address flush dev {worker.node.interface}")
    worker.ip(f"address add 192.168.77.51/24 dev {worker.node.interface}")


def nobody_has_the_address(master: Machine, worker: Machine) -> None:
    both((master, worker), JOIN_TIMEOUT="8")
    master.ip(f"link set {master.node.interface} down")


def interface_down(master: Machine, worker: Machine) -> None:
    both((master, worker), JOIN_TIMEOUT="6")
    worker.ip(f"link set {worker.node.interface} down")


def another_spelling(master: Machine, worker: Machine) -> None:
    """Of a number that begins with 0 the digits are octal."""
    both((master, worker), MASTER_ADDR="10.11.7.0143", JOIN_TIMEOUT="6")


def label_too_long(master: Machine, worker: Machine) -> None:
    master.settings["MASTER_ADDR"] = "10.11..7.50"


def port_blocked(master: Machine, worker: Machine) -> None:
    both((master, worker), JOIN_TIMEOUT="8")
    own_routing_rules(master)
    master.drop("ipproto tcp dport 29600")


def only_ssh_passes(master: Machine, worker: Machine) -> None:
    both((master, worker), JOIN_TIMEOUT="8")
    own_routing_rules(master)
    master.accept("ipproto tcp dport 22")
    master.drop("ipproto tcp")


def other_ports(at: int, lose: Callable[..., None]) -> Prepare:
    """One node closes the ports that the system chooses, by `Machine.drop` or `Machine.reject`.

    Its own connections to such ports receive nothing then.
    """

    def prepare(*machines: Machine) -> None:
        own_routing_rules(machines[at])
        lose(machines[at], "ipproto tcp dport 32768-60999")
        if at == 1:
            machines[at].accept("ipproto tcp sport 29600")

    return prepare


def port_rejected(master: Machine, worker: Machine) -> None:
    both((master, worker), JOIN_TIMEOUT="8")
    own_routing_rules(master)
    master.accept("ipproto tcp dport 22")
    master.reject("ipproto tcp")


def slow_link(master: Machine, worker: Machine) -> None:
    for machine in (master, worker):
        limit = "root tbf rate 500kbit burst 16kb latency 400ms"
        command = f"tc qdisc add dev {machine.node.interface} {limit}".split()
        subprocess.run([*machine.node.prefix, *command], check=True, capture_output=True)


def small_mtu(master: Machine, worker: Machine) -> None:
    command = f"ip -n {worker.node.bridge} link set {worker.node.wire} mtu 900"
    subprocess.run(command.split(), check=True, capture_output=True)


def interface_elsewhere(at: int) -> Prepare:
    def prepare(*machines: Machine) -> None:
        machines[at].ip("link add name docker0 type bridge")
        machines[at].ip("address add 172.17.0.1/16 dev docker0")
        machines[at].ip("link set docker0 up")
        machines[at].settings["NCCL_SOCKET_IFNAME"] = "docker0"

    return prepare


def address_nobody_reaches(master: Machine, worker: Machine) -> None:
    """The first address of the worker's interface is one that has no way back."""
    interface = worker.node.interface
    worker.ip(f"address flush dev {interface}")
    worker.ip(f"address add 192.168.77.51/24 dev {interface}")
    worker.ip(f"address add 10.11.7.51/32 dev {interface}")
    worker.ip(f"route add 10.11.7.0/24 dev {interface} src 10.11.7.51")


def address_refused(master: Machine, worker: Machine) -> None:
    """The same, and a router between the two says so."""
    address_nobody_reaches(master, worker)
    master.ip("route add unreachable 192.168.77.0/24")


def setting(at: int, **settings: str) -> Prepare:
    return lambda *machines: machines[at].settings.update(settings)


def argument(text: str) -> Prepare:
    return lambda master, worker: worker.arguments.append(text)


def forgotten_on_node_0(master: Machine, worker: Machine) -> None:
    """It does not wait for the worker, which looks for it already."""
    master.settings["NNODES"] = "1"
    master.delay_s = 3.0


def sizes_that_do_not_fit(master: Machine, worker: Machine) -> None:
    master.settings["GPUS_PER_NODE"] = "2"
    for machine in (master, worker):
        machine.arguments.append("parallel.replicate=2")


def two_masters(master: Machine, worker: Machine) -> None:
    worker.script = master.script


def other_code(file_name: str) -> Callable[[Machine, Machine], None]:
    def prepare(master: Machine, worker: Machine) -> None:
        copy = worker.folder / "clone"
        shutil.copytree(REPOSITORY / "shardtune", copy / "shardtune")
        shutil.copytree(REPOSITORY / "distTest", copy / "distTest")
        for file in REPOSITORY.glob("*.*"):
            if file.suffix in (".py", ".sh", ".yaml"):
                shutil.copy(file, copy / file.name)
        with (copy / file_name).open("a", encoding="utf-8") as file:
            file.write("# changed here\n")
        worker.script = copy / "launch_node1.sh"

    return prepare


def other_version(master: Machine, worker: Machine) -> None:
    """The version is that of the metadata."""
    info = worker.folder / "packages/transformers-4.0.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: transformers\nVersion: 4.0.0\n", encoding="utf-8"
    )
    worker.settings["PYTHONPATH"] = str(info.parent)


def clock_ahead(seconds: float) -> Prepare:
    def prepare(master: Machine, worker: Machine) -> None:
        (worker.folder / "sitecustomize.py").write_text(
            f"import time\n_now = time.time\ntime.time = lambda: _now() + {seconds}\n",
            encoding="utf-8",
        )
        worker.settings["PYTHONPATH"] = str(worker.folder)

    return prepare


def other_data(master: Machine, worker: Machine) -> None:
    write_jsonl(worker.folder / "train.jsonl", chats(12, seed=1))


def no_data(master: Machine, worker: Machine) -> None:
    (worker.folder / "train.jsonl").unlink()


def other_place(key: str, name: str) -> Prepare:
    """The worker's files have another path, and another content."""

    def prepare(master: Machine, worker: Machine) -> None:
        if key == "model.path":
            (worker.folder / "model").rename(worker.folder / name)
            config = worker.folder / name / "config.json"
            config.write_text(config.read_text(encoding="utf-8") + " ", encoding="utf-8")
        else:
            write_jsonl(worker.folder / name, chats(12, seed=1))
        worker.arguments.append(f"{key}={name}")

    return prepare


def other_model(master: Machine, worker: Machine) -> None:
    config = worker.folder / "model/config.json"
    config.write_text(
        config.read_text(encoding="utf-8").replace(
            '"num_hidden_layers": 2', '"num_hidden_layers": 1'
        )
    )


def other_weights(master: Machine, worker: Machine) -> None:
    """Of the same size, as after fine-tuning."""
    file = worker.folder / "model/model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


LISTEN = """
import socket, time
listener = socket.create_server(("", 29600))
print("listening", flush=True)
time.sleep(99)
"""


def port_taken(master: Machine, worker: Machine) -> None:
    master.python(LISTEN, "train_fsdp.py")


def master_never_comes(master: Machine, worker: Machine) -> None:
    master.script = Path("/bin/true")
    worker.settings["JOIN_TIMEOUT"] = "4"


def worker_never_comes(master: Machine, worker: Machine) -> None:
    master.settings["JOIN_TIMEOUT"] = "3"
    worker.script = Path("/bin/true")


def another_service(master: Machine, worker: Machine) -> None:
    port_taken(master, worker)
    master.script = Path("/bin/true")


def loopback_name(master: Machine, worker: Machine) -> None:
    master.settings["MASTER_ADDR"] = "localhost"


@dataclass(frozen=True)
class Fault:
    """The last line on stderr holds `words`, on the worker `on_worker` if that is set."""

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
        "on it with MASTER_ADDR=10.11.7.50 MASTER_PORT=29600",
        "no machine answers at MASTER_ADDR 10.11.7.99",
    ),
    Fault(
        "the worker's address",
        address_of_the_worker,
        "MASTER_ADDR 10.11.7.51 is not an address of node 0",
        "MASTER_ADDR 10.11.7.51 is an address of node 1 (node1) itself",
    ),
    Fault(
        "no route",
        no_way_between,
        "did not come to node 0",
        "no machine answers at MASTER_ADDR 10.11.7.50",
    ),
    Fault(
        "no route at all",
        no_network,
        "did not come to node 0",
        "no route to MASTER_ADDR 10.11.7.50 from node 1 (node1)",
    ),
    Fault(
        "nobody has the address",
        nobody_has_the_address,
        "NCCL_SOCKET_IFNAME is 'enp26s0np0', and that interface is down",
        "(10.11.7.50:29600 cannot be reached (No route to host))",
    ),
    Fault(
        "interface down",
        interface_down,
        "did not come to node 0",
        "NCCL_SOCKET_IFNAME is 'enp26s0np0', and that interface is down",
        is_quick=True,
    ),
    Fault(
        "an address that is read as another",
        another_spelling,
        "MASTER_ADDR 10.11.7.0143 (10.11.7.99) is not an address of node 0",
        "no machine answers at MASTER_ADDR 10.11.7.0143 (10.11.7.99) from node 1 (node1)",
    ),
    Fault(
        "a name that cannot be one",
        label_too_long,
        "MASTER_ADDR is '10.11..7.50', which does not resolve to an address (a part of it",
        is_quick=True,
    ),
    Fault(
        "port blocked",
        port_blocked,
        "`nc -vz 10.11.7.50 29600` there",
        "port 29600 of 10.11.7.50 is blocked: from node 1 (node1)",
    ),
    Fault(
        "only port 22 passes",
        only_ssh_passes,
        "`nc -vz 10.11.7.50 29600` there",
        "port 29600 of 10.11.7.50 is blocked",
    ),
    Fault(
        "other ports blocked towards node 0",
        other_ports(0, Machine.drop),
        "ports other than 29600 are blocked",
    ),
    Fault(
        "other ports blocked towards node 1",
        other_ports(1, Machine.drop),
        "ports other than 29600 are blocked",
    ),
    Fault(
        "port rejected",
        port_rejected,
        "`nc -vz 10.11.7.50 29600` there",
        "port 29600 of 10.11.7.50 is blocked: from",
    ),
    Fault(
        "other ports rejected by node 0",
        other_ports(0, Machine.reject),
        "ports other than 29600 are blocked",
    ),
    Fault(
        "other ports rejected by node 1",
        other_ports(1, Machine.reject),
        "ports other than 29600 are blocked",
    ),
    Fault(
        "a variable on one node",
        setting(1, TORCH_DIST_INIT_BARRIER="1"),
        "TORCH_DIST_INIT_BARRIER is not set on node 0 (node0) and 1 on node 1 (node1)",
    ),
    Fault("MTU", small_mtu, "small messages pass between"),
    Fault("a slow way", slow_link, "1024 KiB do not within 5 s: a cable"),
    Fault(
        "wrong interface on node 0",
        interface_elsewhere(0),
        "'docker0' and the way to MASTER_ADDR 10.11.7.50 leads through enp26s0np0",
    ),
    Fault(
        "wrong interface on node 1",
        interface_elsewhere(1),
        "'docker0' and the way to MASTER_ADDR 10.11.7.50 leads through enp26s0np0",
        is_quick=True,
    ),
    Fault(
        "an address that node 0 does not reach",
        address_nobody_reaches,
        "cannot reach node 1 (node1) at 192.168.77.51 (Network is unreachable), though it",
    ),
    Fault(
        "an address that is refused to node 0",
        address_refused,
        "of 192.168.77.51 (No route to host), though both reach MASTER_ADDR: a firewall",
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
    Fault(
        "forgotten nnodes",
        setting(1, NNODES="1"),
        "NNODES is 2 on node 0 (node0) and 1 on node 1 (node1)",
    ),
    Fault(
        "forgotten nnodes on node 0",
        forgotten_on_node_0,
        "NNODES is 1 on node 0 (node0) and 2 on node 1 (node1)",
    ),
    Fault(
        "other nnodes",
        setting(1, NNODES="3"),
        "NNODES is 2 on node 0 (node0) and 3 on node 1 (node1)",
    ),
    Fault("a rank that is no number", setting(1, NODE_RANK="one"), "NODE_RANK is 'one'"),
    Fault("a number that is none", setting(1, GPUS_PER_NODE="eight"), "GPUS_PER_NODE is 'eight'"),
    Fault(
        "different GPU counts against the configuration",
        sizes_that_do_not_fit,
        "on node 0 (node0), node 1 (node1)), which parallel.replicate=2 does not",
    ),
    Fault(
        "a name of loopback",
        loopback_name,
        "'localhost', which is 127.0.0.1 here: a loopback address",
    ),
    Fault(
        "port taken",
        port_taken,
        "port 29600 of node 0 (node0) is taken by process",
        "something answers at 10.11.7.50:29600 that is not the preflight of node 0",
        is_quick=True,
    ),
    Fault(
        "master never comes",
        master_never_comes,
        "",
        "no node 0 came to 10.11.7.50:29600 within 4 s",
    ),
    Fault(
        "another service",
        another_service,
        "",
        "something answers at 10.11.7.50:29600 that is not the preflight of node 0",
    ),
    Fault(
        "worker never comes",
        worker_never_comes,
        "node 1 of 2 did not come to node 0 within 3 s",
    ),
    Fault("other code", other_code("shardtune/model/loss.py"), "shardtune/model/loss.py is"),
    Fault(
        "another preflight",
        other_code("shardtune/cluster/node_info.py"),
        "the code differs: shardtune/cluster has digest",
    ),
    Fault(
        "other version",
        other_version,
        "transformers is 5.23.0 on node 0 (node0) and 4.0.0 on node 1 (node1)",
    ),
    Fault("clock", clock_ahead(100), "the clock of node 1 (node1) is 100."),
    Fault(
        "other configuration",
        argument("optimizer.lr=3e-5"),
        "optimizer.lr is 1e-05 on node 0 (node0) and 3e-05 on node 1 (node1)",
        is_quick=True,
    ),
    Fault(
        "other seed",
        argument("run.seed=7"),
        "run.seed is 1234 on node 0 (node0) and 7 on node 1 (node1)",
    ),
    Fault(
        "unknown key",
        argument("optimizer.rate=7"),
        "node 1 (node1): optimizer.rate (command line) is not known",
    ),
    Fault("other data", other_data, "data.train: train.jsonl is"),
    Fault(
        "data is missing",
        no_data,
        "node 1 (node1): data.train=train.jsonl: no such file or directory",
        is_quick=True,
    ),
    Fault(
        "another data.train",
        other_place("data.train", "./other.jsonl"),
        "ERROR: data.train is train.jsonl on node 0 (node0) and ./other.jsonl on node 1 (node1)",
    ),
    Fault(
        "another model.path",
        other_place("model.path", "./other"),
        "ERROR: model.path is ./model on node 0 (node0) and ./other on node 1 (node1)",
    ),
    Fault("other model", other_model, "config.json is"),
    Fault("other weights", other_weights, "model.safetensors is"),
]
