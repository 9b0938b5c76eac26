"""Network namespaces of this machine as nodes, joined by a bridge in a namespace of its own.

No packet leaves them. Needs Linux, root and `ip` of iproute2.
"""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

_TRIAL = "ip link add trial type bridge && ip link add wire type veth && hostname trial"
# A longer queue would delay small messages behind large ones. A burst must last a timer's tick.
_LIMIT = "root tbf burst 256kb latency 20ms rate"
LIMIT_TRIAL = f"tc qdisc add dev lo {_LIMIT} 1gbit"
_MTU = 9000  # bytes of a frame without its Ethernet header, as fast networks are set up
# Of Ethernet (14), IP (20) and TCP with its time stamps (32), in bytes.
HEADER_BYTES = 66
# Bytes on a cable for each byte of a long message.
FRAMED = (_MTU + 14) / (_MTU + 14 - HEADER_BYTES)


@dataclass(frozen=True)
class Node:
    """A namespace with one interface and loopback. Commands behind `prefix` run in it."""

    name: str
    host: str
    interface: str
    wire: str  # the bridge's end of its cable, in the namespace `bridge`
    bridge: str

    @property
    def prefix(self) -> list[str]:
        named = 'hostname "$0" && exec "$@"'
        return ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", named, self.host]

    def ip(self, *arguments: str) -> str:
        return _ip("-n", self.name, *arguments)

    def limit(self, bits_per_s: int) -> None:
        for owner, end in ((self.name, self.interface), (self.bridge, self.wire)):
            _ip("-n", owner, "link", "set", end, "mtu", str(_MTU))
        if bits_per_s:
            limit = ["qdisc", "replace", "dev", self.interface, *_LIMIT.split(), str(bits_per_s)]
            subprocess.run(["tc", "-n", self.name, *limit], check=True)

    def received_bytes(self) -> int:
        """Return the bytes that came over the node's cable so far, without headers of frames."""
        # The kernel counts several frames of one stream as one packet, with one header.
        (link,) = json.loads(self.ip("-s", "-j", "link", "show", self.interface))
        counters = link["stats64"]["rx"]
        return int(counters["bytes"] - HEADER_BYTES * counters["packets"])

    def kill_all(self) -> None:
        for pid in _ip("netns", "pids", self.name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def obstacle(trial: str = _TRIAL) -> str | None:
    """Return why namespaces cannot be made here, or None. `trial`: a command to run in one."""
    code, output = subprocess.getstatusoutput(f"unshare --net --uts sh -c '{trial}'")
    return f"no network namespaces here ({output.strip()})" if code else None


@contextlib.contextmanager
def joined_nodes(addresses: list[str], interface: str) -> Iterator[list[Node]]:
    """Make a node for each address of a /24 network; at the end remove it with its processes."""
    run = f"shardtune-{os.getpid()}"
    bridge, nodes = f"{run}-bridge", []
    with contextlib.ExitStack() as at_end:
        _ip("netns", "add", bridge)
        at_end.callback(_ip, "netns", "delete", bridge)
        _ip("-n", bridge, "link", "add", "name", "bridge", "type", "bridge")
        _ip("-n", bridge, "link", "set", "bridge", "up")
        for number, address in enumerate(addresses):
            node = Node(f"{run}-node{number}", f"node{number}", interface, f"wire{number}", bridge)
            _ip("netns", "add", node.name)
            at_end.callback(_ip, "netns", "delete", node.name)
            at_end.callback(node.kill_all)
            cable = f"link add name {node.wire} type veth peer name {interface} netns {node.name}"
            _ip("-n", bridge, *cable.split())
            _ip("-n", bridge, "link", "set", node.wire, "master", "bridge", "up")
            node.ip("link", "set", "lo", "up")
            node.ip("address", "add", f"{address}/24", "dev", interface)
            node.ip("link", "set", interface, "up")
            nodes.append(node)
        yield nodes


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
