"""The environment and arguments of this node's launch, and the problems that one node can see."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardtune.cluster import network
from shardtune.config import Config
from shardtune.config_io import read_run_arguments
from shardtune.errors import UserError

REPOSITORY = Path(__file__).resolve().parent.parent.parent
DEFAULTS = {
    "MASTER_ADDR": "10.11.7.50",
    "MASTER_PORT": "29600",
    "NNODES": "2",
    "GPUS_PER_NODE": "8",
    "NODE_RANK": "0",
    "NCCL_SOCKET_IFNAME": "enp26s0np0",
}
_RANGES = {
    "MASTER_PORT": (1, 65535),
    "NNODES": (1, 99_999),
    "GPUS_PER_NODE": (1, 9_999),
    "JOIN_TIMEOUT": (1, 999_999_999),
    "MAX_RESTARTS": (0, 9_999),
}
HELP = """\
One node of the run, as the environment says. The same on every node:
  MASTER_ADDR=10.11.7.50          node 0's address
  MASTER_PORT=29600               where the nodes meet
  NNODES=2                        number of nodes; 1 needs no address, port or interface
  JOIN_TIMEOUT=300                seconds in which all of them have to come
  MAX_RESTARTS=0                  how often the ranks are started again after a failure
and for each:
  NODE_RANK                       0 to NNODES - 1; launch_node0.sh sets 0 and launch_node1.sh 1
  GPUS_PER_NODE=8                 processes, one a GPU, or CPU processes where there is none
  NCCL_SOCKET_IFNAME=enp26s0np0   interface towards the others, for gloo too
Arguments are those of train_fsdp.py:
"""
# Signals reach the ranks through the agent, and a save may take long.
_SHUTDOWN_TIMEOUT_S = 2 * 24 * 3600
DATA_SUFFIXES = (".json", ".jsonl", ".parquet")
_JOIN_TIMEOUT_S = 300.0  # where neither JOIN_TIMEOUT nor a readable configuration names one


@dataclass(frozen=True)
class Environment:
    """One node's part. A number that could not be read is None; `problems` says so.

    `master_ip` is MASTER_ADDR resolved, `local_ip` the interface's address that is nearest to it.
    `port` is MASTER_PORT; `store_port`, where the ranks meet, differs from it only for one node
    alone. `problems` are `<what> - <what to do>`.
    """

    node: int | None
    nodes: int | None
    processes: int | None  # of this node: GPUS_PER_NODE
    master: str
    master_ip: str | None
    port: int | None
    store_port: int | None
    interface: str
    local_ip: str | None
    owns_master: bool
    join_timeout_s: float
    max_restarts: int
    config: Config | None
    problems: tuple[str, ...]

    @property
    def name(self) -> str:
        """How lines call this node."""
        return f"node {'?' if self.node is None else self.node} ({socket.gethostname()})"

    @property
    def master_named(self) -> str:
        """MASTER_ADDR as it was set, with the address that this is here where it is another."""
        return network.named(self.master, self.master_ip)

    @property
    def is_alone(self) -> bool:
        return self.nodes == 1 and self.node == 0


def read_environment(environ: Mapping[str, str], arguments: Sequence[str]) -> Environment:
    """Read what can be known without asking another node.

    One node alone (NNODES=1) uses loopback, and no interface or address; MASTER_PORT where it is
    set, else a free port.
    """
    values = {name: environ.get(name) or default for name, default in DEFAULTS.items()}
    for name in ("JOIN_TIMEOUT", "MAX_RESTARTS"):
        if environ.get(name):
            values[name] = environ[name]
    problems: list[str] = []
    numbers = {name: _number(values, name, problems) for name in _RANGES if name in values}
    node, nodes = _node_rank(values, numbers["NNODES"], problems), numbers["NNODES"]
    if nodes == 1 and node == 0:
        values |= {"MASTER_ADDR": "127.0.0.1", "NCCL_SOCKET_IFNAME": network.loopback()}
    port = store_port = numbers["MASTER_PORT"]
    if nodes == 1 and node == 0 and not environ.get("MASTER_PORT"):
        store_port = network.free_port()
    config = _config(arguments, numbers, problems)
    interface, master = values["NCCL_SOCKET_IFNAME"], values["MASTER_ADDR"]
    local_ip = _local_ip(interface, problems)
    master_ip = _master_ip(master, local_ip, problems)
    owns_master = master_ip is not None and bool(network.interfaces_of(master_ip))
    if master_ip and local_ip:
        local_ip = network.address_towards(interface, master_ip)
        route_problems = _route_problems(interface, master, master_ip, owns_master, node)
        problems += route_problems or _link_problems(interface)
    join_timeout_s = numbers.get("JOIN_TIMEOUT") or _JOIN_TIMEOUT_S
    return Environment(
        node=node,
        nodes=nodes,
        processes=numbers["GPUS_PER_NODE"],
        master=master,
        master_ip=master_ip,
        port=port,
        store_port=store_port,
        interface=interface,
        local_ip=local_ip,
        owns_master=owns_master,
        join_timeout_s=config.distributed.join_timeout_s if config else join_timeout_s,
        max_restarts=numbers.get("MAX_RESTARTS") or 0,
        config=config,
        problems=tuple(problems),
    )


def _number(values: Mapping[str, str], name: str, problems: list[str]) -> int | None:
    least, largest = _RANGES[name]
    text = values[name]
    if re.fullmatch(r"0|[1-9][0-9]{0,8}", text) and least <= int(text) <= largest:
        return int(text)
    problems.append(f"{name} is '{text}' - set it to a whole number from {least} to {largest}")
    return None


def _node_rank(values: Mapping[str, str], nodes: int | None, problems: list[str]) -> int | None:
    rank = (
        int(values["NODE_RANK"])
        if re.fullmatch(r"0|[1-9][0-9]{0,8}", values["NODE_RANK"])
        else None
    )
    if rank is None or (nodes is not None and rank >= nodes):
        problems.append(
            f"NODE_RANK is '{values['NODE_RANK']}' and NNODES '{values['NNODES']}' - "
            "node ranks run from 0 to NNODES - 1"
        )
    return rank


def _config(
    arguments: Sequence[str], numbers: Mapping[str, int | None], problems: list[str]
) -> Config | None:
    try:
        Path.cwd()
    except FileNotFoundError:
        problems.append(
            "the directory that this was started in does not exist any more - "
            "`cd` into one that does"
        )
        return None
    try:
        config = read_run_arguments(arguments, REPOSITORY / "config.yaml")
    except UserError as error:
        is_named = "JOIN_TIMEOUT" in numbers and numbers["JOIN_TIMEOUT"] is None
        problems += [
            problem for problem in error.problems if not (is_named and "JOIN_TIMEOUT" in problem)
        ]
        return None
    try:
        problems += _missing_files(config)
    except OSError as error:
        problems.append(
            f"{error.filename}: {error.strerror} - "
            "let this user look at it there, or name another path"
        )
    return config


def _missing_files(config: Config) -> list[str]:
    """Name the paths that do not exist and cannot be names of the hub."""
    named = {"data.train": config.data.train, "data.eval": config.data.eval}
    problems = [
        f"{key}={spec}: no such file or directory - correct the path"
        for key, spec in named.items()
        if spec
        and not Path(spec).exists()
        and (is_path(spec) or Path(spec).suffix in DATA_SUFFIXES)
    ]
    if is_path(config.model.path) and not Path(config.model.path).is_dir():
        problems.append(
            f"model.path={config.model.path}: no such directory - "
            "correct the path, or name a hub id"
        )
    run_dir = existing_part(Path(config.run.dir))
    if not run_dir.is_dir() or not os.access(run_dir, os.W_OK | os.X_OK):
        problems.append(
            f"run.dir={config.run.dir}: {run_dir} cannot be written - name one that can be"
        )
    return problems


def is_path(spec: str) -> bool:
    """Whether the value can only be a path: a name of the hub has at most one slash."""
    return spec.startswith((".", "/")) or spec.count("/") > 1


def existing_part(path: Path) -> Path:
    """The directory itself, or the nearest existing one above it."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def _local_ip(interface: str, problems: list[str]) -> str | None:
    known = network.addresses()
    if re.search("[=^,]", interface):  # NCCL takes lists, prefixes and exclusions
        problems.append(
            f"NCCL_SOCKET_IFNAME is '{interface}', and exactly one interface's name is wanted - "
            f"name one of {network.described_addresses()}"
        )
        return None
    if not known.get(interface):
        lack = (
            "that interface has no address"
            if interface in known
            else "this node has no such interface"
        )
        problems.append(
            f"NCCL_SOCKET_IFNAME is '{interface}' and {lack} - "
            f"name one of {network.described_addresses()}"
        )
        return None
    return str(known[interface][0].ip)


def _link_problems(interface: str) -> list[str]:
    if network.is_link_up(interface):
        return []
    return [
        f"NCCL_SOCKET_IFNAME is '{interface}', and that interface is down - "
        f"`ip link set {interface} up` as root; if `ip link show {interface}` says NO-CARRIER, "
        "look at its cable and its switch"
    ]


def _master_ip(master: str, local_ip: str | None, problems: list[str]) -> str | None:
    try:
        ip = network.resolved(master)
    except OSError as error:
        problems.append(
            f"MASTER_ADDR is '{master}', which does not resolve to an address ({error.strerror}) - "
            "set it to node 0's address"
        )
        return None
    if ipaddress.ip_address(ip).is_unspecified:
        problems.append(
            f"MASTER_ADDR is '{master}', which is not a machine's address - set it to node 0's"
        )
        return None
    is_loopback = ipaddress.ip_address(ip).is_loopback
    if is_loopback and local_ip is not None and not ipaddress.ip_address(local_ip).is_loopback:
        problems.append(
            f"MASTER_ADDR is '{master}', which is {ip} here: a loopback address, where every "
            "machine finds only itself - set it to node 0's address in the network (this node has "
            f"{local_ip})"
        )
        return None
    return ip


def _route_problems(
    interface: str, master_name: str, master_ip: str, owns_master: bool, node: int | None
) -> list[str]:
    """Whether node 0 is where the others look for it, and the interface on the way there."""
    master = network.named(master_name, master_ip)
    if node == 0 and not owns_master:
        return [
            f"MASTER_ADDR {master} is not an address of node 0, which has "
            f"{network.described_addresses()} - set it to node 0's on every node, or NODE_RANK if "
            "this is not node 0 (launch_node1.sh)"
        ]
    find = network.interfaces_of if owns_master else network.interfaces_towards
    interfaces = find(master_ip)
    if not interfaces or interface in interfaces:
        return []  # without any route, the first connection says more
    return [
        f"NCCL_SOCKET_IFNAME is '{interface}' and the way to MASTER_ADDR {master} leads through "
        f"{interfaces[0]} - set NCCL_SOCKET_IFNAME={interfaces[0]}, or MASTER_ADDR to an address "
        f"that {interface} reaches"
    ]


def set_defaults(environment: Environment) -> None:
    """Set the variables that the ranks, torch and NCCL read."""
    for name, value in DEFAULTS.items():
        if not os.environ.get(name):
            os.environ[name] = value
    os.environ["NCCL_SOCKET_IFNAME"] = environment.interface
    os.environ.setdefault("GLOO_SOCKET_IFNAME", os.environ["NCCL_SOCKET_IFNAME"])
    # One thread per process is torchrun's own default; naming it spares its warning.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Warnings of torch's sockets, about names that cannot be looked up, would hide lines that
    # matter.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_SHUTDOWN_TIMEOUT_S))
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def banner(environment: Environment) -> str:
    role = "MASTER" if os.environ["NODE_RANK"] == "0" else "WORKER"
    values = {name: _shown(os.environ[name]) for name in DEFAULTS}
    port = environment.store_port or values["MASTER_PORT"]
    rule = "=" * 40
    return "\n".join(
        (
            rule,
            f"Launching {role} NODE (Node {values['NODE_RANK']})",
            f"Master: {_shown(environment.master)}:{port}",
            f"Total Nodes: {values['NNODES']}",
            f"GPUs per Node: {values['GPUS_PER_NODE']}",
            rule,
        )
    )


def _shown(value: str) -> str:
    """A carriage return from a file of settings must not rewrite the line."""
    return value if value.isprintable() else repr(value)
