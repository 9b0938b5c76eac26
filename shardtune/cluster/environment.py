"""The environment and arguments of this node's launch, and the problems that one node can see."""

import ctypes
import os
import re
import socket
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from shardtune.cluster import network
from shardtune.config import Config, DistributedConfig
from shardtune.config_io import read_run_arguments
from shardtune.errors import UserError, first_line, missing_directory
from shardtune.paths import kind_of, split_path

REPOSITORY = Path(__file__).resolve().parent.parent.parent
DEFAULTS = {
    "MASTER_ADDR": "10.11.7.50",
    "MASTER_PORT": "29600",
    "NNODES": "2",
    "GPUS_PER_NODE": "8",
    "NODE_RANK": "0",
    "NCCL_SOCKET_IFNAME": "enp26s0np0",
    "MAX_RESTARTS": "0",
}
HELP = """\
One node of the run, as the environment says. The same on every node:
  MASTER_ADDR=10.11.7.50          node 0's address
  MASTER_PORT=29600               where the nodes meet
  NNODES=2                        number of nodes; 1 needs no address, port or interface
  JOIN_TIMEOUT=300                seconds in which all of them have to come
  MAX_RESTARTS=0                  how often the ranks are started again after a failure
  JOIN_SECRET                     only nodes that have the same one are let in
and for each:
  NODE_RANK                       0 to NNODES - 1; launch_node0.sh sets 0 and launch_node1.sh 1
  GPUS_PER_NODE=8                 processes, one a GPU, or CPU processes where there is none
  NCCL_SOCKET_IFNAME=enp26s0np0   interface towards the others, for gloo too
Arguments are those of train_fsdp.py:
"""
# Signals reach the ranks through the agent, and a save may take long.
_SHUTDOWN_TIMEOUT_S = 2 * 24 * 3600


@dataclass(frozen=True)
class Environment:
    """One node's part. A number that could not be read is None; `problems` says so.

    `master_ip` is MASTER_ADDR resolved, `local_ip` the interface's address that is nearest to it.
    `port` is MASTER_PORT; `store_port`, where the ranks meet, differs from it only for one node
    alone. `problems` are `<what> - <what to do>`.
    """

    node: int | None
    nodes: int | None
    processes: int | None  # this node's GPUS_PER_NODE
    master: str
    master_named: str  # the master, and the address it has here if it is a name
    master_ip: str | None
    port: int | None
    store_port: int | None
    interface: str
    local_ip: str | None
    owns_master: bool
    join_timeout_s: float
    max_restarts: int
    secret: bytes = field(repr=False)  # JOIN_SECRET, or empty
    config: Config | None
    problems: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"node {'?' if self.node is None else self.node} ({socket.gethostname()})"

    @property
    def is_alone(self) -> bool:
        return self.nodes == 1 and self.node == 0


def read_environment(environ: MutableMapping[str, str], arguments: Sequence[str]) -> Environment:
    """Read what can be known without asking another node.

    One node alone (NNODES=1) uses loopback, and no interface or address; MASTER_PORT where it is
    set, else a free port.
    """
    values = {name: environ.get(name) or default for name, default in DEFAULTS.items()}
    problems: list[str] = []

    def number(name: str, least: int, largest: int) -> int | None:
        text = values[name]
        if re.fullmatch("[0-9]{1,9}", text) and least <= int(text) <= largest:
            return int(text)
        problems.append(f"{name} is '{text}' - set it to a whole number from {least} to {largest}")
        return None

    port = store_port = number("MASTER_PORT", 1, 65535)
    nodes, node = number("NNODES", 1, 99_999), number("NODE_RANK", 0, 99_998)
    if node is not None and nodes is not None and node >= nodes:
        problems.append(
            f"NODE_RANK is {node} and NNODES {nodes} - node ranks run from 0 to NNODES - 1"
        )
    processes, max_restarts = number("GPUS_PER_NODE", 1, 9_999), number("MAX_RESTARTS", 0, 9_999)
    if nodes == 1 and node == 0:
        values |= {"MASTER_ADDR": "127.0.0.1", "NCCL_SOCKET_IFNAME": "lo"}
        if not environ.get("MASTER_PORT"):
            store_port = network.free_port()
    secret = _take_secret(environ, problems)
    config: Config | None = None
    try:
        config = read_run_arguments(arguments, REPOSITORY / "config.yaml")
        problems += _path_problems(config)
    except UserError as error:
        problems += error.problems
    interface, master = values["NCCL_SOCKET_IFNAME"], values["MASTER_ADDR"]
    local_ip = _local_ip(interface, problems)
    master_ip = _master_ip(master, local_ip, problems)
    master_named = master if master_ip in (None, master) else f"{master} ({master_ip})"
    owns_master = master_ip is not None and bool(network.interfaces_of(master_ip))
    if master_ip and local_ip:
        local_ip = network.address_towards(interface, master_ip)
        problems += _route_problems(interface, master_named, master_ip, owns_master, node)
    return Environment(
        node=node,
        nodes=nodes,
        processes=processes,
        master=master,
        master_named=master_named,
        master_ip=master_ip,
        port=port,
        store_port=store_port,
        interface=interface,
        local_ip=local_ip,
        owns_master=owns_master,
        join_timeout_s=(config.distributed if config else DistributedConfig()).join_timeout_s,
        max_restarts=max_restarts or 0,
        secret=secret,
        config=config,
        problems=tuple(problems),
    )


def _take_secret(environ: MutableMapping[str, str], problems: list[str]) -> bytes:
    """Take JOIN_SECRET out of the environment, so that no child and no /proc file shows it."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    if at := getenv(b"JOIN_SECRET"):
        ctypes.memset(at, 0, len(ctypes.string_at(at)))
    secret = environ.pop("JOIN_SECRET", None)
    if secret is not None and not secret.strip():
        problems.append("JOIN_SECRET is empty - set the same long text on every node, or unset it")
    return os.fsencode((secret or "").strip())


def _path_problems(config: Config) -> list[str]:
    specs = config.data.paths | {"model.path": config.model.path}
    problems = [
        f"{key}={spec}: no such file or directory that this user can read"
        f"{missing_directory(spec)} - correct the path"
        for key, spec in specs.items()
        if not os.access(split_path(spec)[0], os.R_OK)
        # A name of the hub has at most one slash.
        and (spec[0] in "./" or spec.count("/") > 1 or kind_of(spec))
    ]
    run_dir = existing_part(Path(config.run.dir))
    if not run_dir.is_dir() or not os.access(run_dir, os.W_OK | os.X_OK):
        problems.append(
            f"run.dir={config.run.dir}: {run_dir} cannot be written - name one that can be"
        )
    return problems


def existing_part(path: Path) -> Path:
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def _local_ip(interface: str, problems: list[str]) -> str | None:
    known = network.addresses().get(interface)
    if not known:  # NCCL takes lists and prefixes too; gloo does not
        problems.append(
            f"NCCL_SOCKET_IFNAME is '{interface}', and this node has no such interface with an "
            f"address - name one of {network.described_addresses()}"
        )
        return None
    if not psutil.net_if_stats()[interface].isup:
        problems.append(
            f"NCCL_SOCKET_IFNAME is '{interface}', and that interface is down - "
            f"`ip link set {interface} up` as root; if `ip link show {interface}` says NO-CARRIER, "
            "look at its cable and its switch"
        )
    return str(known[0].ip)


def _master_ip(master: str, local_ip: str | None, problems: list[str]) -> str | None:
    try:
        ip = socket.gethostbyname(master)
    except (OSError, UnicodeError) as error:
        problems.append(
            f"MASTER_ADDR is '{master}', which does not resolve to an address "
            f"({first_line(error)}) - set it to node 0's address"
        )
        return None
    if ip.startswith("127.") and local_ip and not local_ip.startswith("127."):
        problems.append(
            f"MASTER_ADDR is '{master}', which is {ip} here: a loopback address, where every "
            "machine finds only itself - set it to node 0's address in the nodes' network"
        )
        return None
    return ip


def _route_problems(
    interface: str, master: str, master_ip: str, owns_master: bool, node: int | None
) -> list[str]:
    if node == 0 and not owns_master:
        return [
            f"MASTER_ADDR {master} is not an address of node 0, which has "
            f"{network.described_addresses()} - set it to node 0's on every node, or NODE_RANK if "
            "this is not node 0 (launch_node1.sh)"
        ]
    interfaces = network.interfaces_towards(master_ip)
    if not interfaces or interface in interfaces:
        return []  # without any route, the first connection says more
    return [
        f"NCCL_SOCKET_IFNAME is '{interface}' and the way to MASTER_ADDR {master} leads through "
        f"{interfaces[0]} - set NCCL_SOCKET_IFNAME={interfaces[0]}, or MASTER_ADDR to an address "
        f"that {interface} reaches"
    ]


def set_defaults(environment: Environment) -> None:
    defaults = DEFAULTS | {
        "GLOO_SOCKET_IFNAME": environment.interface,
        "OMP_NUM_THREADS": "1",  # torchrun's own default; naming it spares its warning
        # Warnings of torch's sockets, about names that cannot be looked up, hide what matters.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(_SHUTDOWN_TIMEOUT_S),
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    for name, value in defaults.items():
        os.environ[name] = os.environ.get(name) or value
    os.environ["MASTER_ADDR"] = environment.master
    os.environ["NCCL_SOCKET_IFNAME"] = environment.interface


def banner(environment: Environment) -> str:
    # A carriage return from a file of settings must not rewrite the line.
    shown = {name: v if v.isprintable() else repr(v) for name, v in os.environ.items()}
    role = "MASTER" if shown["NODE_RANK"] == "0" else "WORKER"
    port = environment.store_port or shown["MASTER_PORT"]
    rule = "=" * 40
    return f"""\
{rule}
Launching {role} NODE (Node {shown["NODE_RANK"]})
Master: {shown["MASTER_ADDR"]}:{port}
Total Nodes: {shown["NNODES"]}
GPUs per Node: {shown["GPUS_PER_NODE"]}
{rule}"""
