"""Tries the paths between any two nodes as NCCL and gloo need them: any port, large messages."""

import asyncio
import contextlib
import os

import psutil

from shardtune.cluster.control import Control, Message
from shardtune.cluster.environment import Environment

_TIMEOUT_S = 5.0
_LARGE_BYTES = 64 << 10  # more than any MTU holds
_SIZES = (64, _LARGE_BYTES, 1 << 20)
_GATHER_TIMEOUT_S = 60.0


async def require_paths(control: Control, environment: Environment) -> None:
    """Connect every node with every other, and send messages both ways. Raises UserError."""
    server = await asyncio.start_server(_echo, environment.local_ip, 0)
    place = {
        "ip": environment.local_ip,
        "port": server.sockets[0].getsockname()[1],
        "mtu": f"{environment.interface} {psutil.net_if_stats()[environment.interface].mtu}",
    }
    try:
        places = await control.gather("ports that can be reached", place, _GATHER_TIMEOUT_S)
        others = [node for node in range(len(control.nodes)) if node != control.node]
        found = await asyncio.gather(*(_problem(control, node, places) for node in others))
        value = {"problems": [problem for problem in found if problem]}
        await control.gather("connections between the nodes", value, _GATHER_TIMEOUT_S)
    finally:
        server.close()


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    # asyncio prints a traceback of a handler that is cancelled, as when a launch ends.
    expected = (OSError, EOFError, asyncio.CancelledError)
    with contextlib.suppress(*expected), contextlib.closing(writer):
        for size in _SIZES:  # one write: parts of a large message may be small enough to pass
            writer.write(await reader.readexactly(size))


async def _problem(control: Control, node: int, places: list[Message]) -> str | None:
    me, other = control.me.name, control.nodes[node].name
    ip, port = places[node]["ip"], places[node]["port"]
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(ip, port), _TIMEOUT_S)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else "timed out"
        return (
            f"{me} cannot reach {other} at port {port} of {ip} ({why}): ports other than "
            "MASTER_PORT are blocked, or no way leads there - open all ports between nodes in the "
            "firewall, or set NCCL_SOCKET_IFNAME to an interface whose network all share"
        )
    try:
        for size in _SIZES:
            writer.write(bytes(size))
            left = size
            with contextlib.suppress(OSError):  # a TimeoutError is one
                while left and (received := await asyncio.wait_for(reader.read(left), _TIMEOUT_S)):
                    left -= len(received)
            if left and size == _LARGE_BYTES and not reader.at_eof():
                mtus = f"{places[control.node]['mtu']} here and {places[node]['mtu']} there"
                return (
                    f"small messages pass between {me} and {other}, large ones do not: the MTU "
                    f"({mtus}) is more than the way between them carries - set one that every "
                    "interface and switch takes (ip link set dev INTERFACE mtu N)"
                )
            if left:
                return (
                    f"{me} connects to {other} at port {port} of {ip}, and {size} bytes do not "
                    f"come back within {_TIMEOUT_S:.0f} s: that node is stopped, the way is slow "
                    "or full, or another answers for it - look there, see `ethtool INTERFACE` on "
                    "both, and look for a firewall or proxy on the way"
                )
    finally:
        writer.transport.abort()  # the verdict does not wait for bytes on a slow path
    return None
