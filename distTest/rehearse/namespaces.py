"""Network namespaces of this machine as nodes, joined by a bridge in a namespace of its own.

No packet leaves them. Needs Linux, root and `ip` of iproute2.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "shardtune"


@dataclass(frozen=True)
class Node:
    """A namespace with one interface and loopback. Commands behind `prefix` run in it."""

    name: str
    host: str
    address: str
    interface: str
    wire: str  # the bridge's end of its cable, in the namespace `bridge`
    bridge: str

    @property
    def prefix(self) -> list[str]:
        named = 'hostname "$0" && exec "$@"'
        return ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", named, self.host]

    def ip(self, *arguments: str) -> str:
        """`ip` within the node, as in `node.ip("link", "set", node.interface, "down")`."""
        return _ip("-n", self.name, *arguments)

    def kill_all(self) -> None:
        """End every process in it with SIGKILL, as a power cut does."""
        for pid in _ip("netns", "pids", self.name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def obstacle() -> str | None:
    """The reason why namespaces cannot be made here, or None."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    missing = [name for name in ("ip", "unshare", "hostname") if not shutil.which(name)]
    return (
        f"{' and '.join(missing)} (of iproute2, util-linux and hostname) is not installed"
        if missing
        else None
    )


@contextlib.contextmanager
def joined_nodes(addresses: list[str], interface: str) -> Iterator[list[Node]]:
    """Make a node for each address, in networks of 24 bits.

    At the end they are removed with every process in them.

    Raises:
        subprocess.CalledProcessError: this kernel lacks namespaces, bridges or veth: `stderr`.
    """
    _remove_left_behind()
    bridge = f"{_PREFIX}-{os.getpid()}-bridge"
    nodes = [
        Node(
            name=f"{_PREFIX}-{os.getpid()}-node{number}",
            host=f"node{number}",
            address=address,
            interface=interface,
            wire=f"wire{number}",
            bridge=bridge,
        )
        for number, address in enumerate(addresses)
    ]
    try:
        _ip("netns", "add", bridge)
        _ip("-n", bridge, "link", "add", "name", "bridge", "type", "bridge")
        _ip("-n", bridge, "link", "set", "bridge", "up")
        for node in nodes:
            _ip("netns", "add", node.name)
            cable = f"link add name {node.wire} type veth peer name {interface} netns {node.name}"
            _ip("-n", bridge, *cable.split())
            _ip("-n", bridge, "link", "set", node.wire, "master", "bridge", "up")
            node.ip("link", "set", "lo", "up")
            node.ip("address", "add", f"{node.address}/24", "dev", interface)
            node.ip("link", "set", interface, "up")
        yield nodes
    finally:
        for node in nodes:
            _remove(node.name)
        _remove(bridge)


def _remove_left_behind() -> None:
    """Remove namespaces whose processes were killed before they could."""
    for line in _ip("netns", "list").splitlines():
        name = line.split()[0]
        pid = re.fullmatch(rf"{_PREFIX}-(\d+)-\w+", name)
        if pid and not Path(f"/proc/{pid[1]}").exists():
            _remove(name)


def _remove(name: str) -> None:
    with contextlib.suppress(subprocess.CalledProcessError):  # it was not made
        for pid in _ip("netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _ip("netns", "delete", name)


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
