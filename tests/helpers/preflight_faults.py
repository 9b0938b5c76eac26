"""Nodes before their launch, and what may be wrong with them or between them; see FAULTS."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from distTest.rehearse.namespaces import Node
from helpers.commands import piped


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
        ours = {"VIRTUAL_ENV": sys.prefix, "GPUS_PER_NODE": "1", "JOIN_TIMEOUT": "160"}
        return self.run(
            *("sh", "-c", 'sleep "$0"; exec "$@"', str(self.delay_s), str(self.script)),
            *("--config", "config.yaml", *self.arguments),
            env=os.environ | ours | self.settings,
        )

    def run(self, *command: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        whole = [*self.node.prefix, *command]
        return piped(whole, self.folder, env, stdin=subprocess.DEVNULL)

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


def no_network(master: Machine, worker: Machine) -> None:
    """The worker's interface is in another network than node 0."""
    master.settings["JOIN_TIMEOUT"] = "8"
    worker.ip(f"address flush dev {worker.node.interface}")
    worker.ip(f"address add 192.168.77.51/24 dev {worker.node.interface}")


def port_blocked(master: Machine, worker: Machine) -> None:
    both((master, worker), JOIN_TIMEOUT="8")
    own_routing_rules(master)
    master.drop("ipproto tcp dport 29600")


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


def slow_link(master: Machine, worker: Machine) -> None:
    for machine in (master, worker):
        limit = "root tbf rate 1mbit burst 16kb latency 400ms"
        command = f"tc qdisc add dev {machine.node.interface} {limit}".split()
        subprocess.run([*machine.node.prefix, *command], check=True, capture_output=True)


def small_mtu(master: Machine, worker: Machine) -> None:
    command = f"ip -n {worker.node.bridge} link set {worker.node.wire} mtu 900"
    subprocess.run(command.split(), check=True, capture_output=True)


def interface_elsewhere(master: Machine, worker: Machine) -> None:
    worker.ip("link add name docker0 type bridge")
    worker.ip("address add 172.17.0.1/16 dev docker0")
    worker.ip("link set docker0 up")
    worker.settings["NCCL_SOCKET_IFNAME"] = "docker0"


def address_nobody_reaches(master: Machine, worker: Machine) -> None:
    """The first address of the worker's interface is one that has no way back."""
    interface = worker.node.interface
    worker.ip(f"address flush dev {interface}")
    worker.ip(f"address add 192.168.77.51/24 dev {interface}")
    worker.ip(f"address add 10.11.7.51/32 dev {interface}")
    worker.ip(f"route add 10.11.7.0/24 dev {interface} src 10.11.7.51")


def other_config(master: Machine, worker: Machine) -> None:
    worker.arguments.append("optimizer.lr=3e-5")


def no_data(master: Machine, worker: Machine) -> None:
    (worker.folder / "train.jsonl").unlink()


LISTEN = """
import socket, time
listener = socket.create_server(("", 29600))
print("listening", flush=True)
time.sleep(99)
"""


def port_taken(master: Machine, worker: Machine) -> None:
    master.python(LISTEN, "train_fsdp.py")


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


BLOCKED = "ports other than MASTER_PORT are blocked"
FAULTS = [
    Fault(
        "wrong master address",
        wrong_address,
        "`MASTER_ADDR=10.11.7.50 MASTER_PORT=29600 NNODES=2 NODE_RANK=1 ./launch_node1.sh`",
        "nothing answers at MASTER_ADDR 10.11.7.99",
    ),
    Fault(
        "the worker's address",
        address_of_the_worker,
        "MASTER_ADDR 10.11.7.51 is not an address of node 0",
        "MASTER_ADDR 10.11.7.51 is an address of node 1 (node1) itself",
    ),
    Fault(
        "no route",
        no_network,
        "did not come to node 0",
        "(10.11.7.50:29600 does not answer (Network is unreachable))",
    ),
    Fault(
        "port blocked",
        port_blocked,
        "`nc -vz 10.11.7.50 29600` there",
        "nothing answers at MASTER_ADDR 10.11.7.50",
    ),
    Fault("other ports blocked towards node 0", other_ports(0, Machine.drop), BLOCKED),
    Fault("other ports rejected by node 1", other_ports(1, Machine.reject), BLOCKED),
    Fault("MTU", small_mtu, "small messages pass between"),
    Fault(
        "a slow way",
        slow_link,
        "and 1048576 bytes do not come back within 5 s: ",
    ),
    Fault(
        "wrong interface",
        interface_elsewhere,
        "'docker0' and the way to MASTER_ADDR 10.11.7.50 leads through enp26s0np0",
        is_quick=True,
    ),
    Fault(
        "an address that node 0 does not reach",
        address_nobody_reaches,
        "of 192.168.77.51 (Network is unreachable): ports other than MASTER_PORT are blocked",
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
        "other configuration",
        other_config,
        "optimizer.lr is 1e-05 on node 0 (node0) and 3e-05 on node 1 (node1)",
        is_quick=True,
    ),
    Fault(
        "data is missing",
        no_data,
        "node 1 (node1): data.train=train.jsonl: no such file or directory",
        is_quick=True,
    ),
]
