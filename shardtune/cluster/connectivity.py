"""Tries the paths between any two nodes as NCCL and gloo need them: any port, large messages."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import threading
from typing import Any

import psutil

from shardtune.cluster import network
from shardtune.cluster.control import Control
from shardtune.cluster.environment import Environment

_CONNECT_TIMEOUT_S = 5.0
_MESSAGE_TIMEOUT_S = 5.0
_SILENT, _CUT_OFF = f"hears nothing for {_MESSAGE_TIMEOUT_S:.0f} s", "is cut off"
_SMALL_BYTES, _LARGE_BYTES = 64, 64 << 10  # in one packet, and in more than any MTU holds
_BYTES = (_SMALL_BYTES, _LARGE_BYTES, 1 << 20)
_AT_ONCE = 16
_GATHER_TIMEOUT_S = 60.0
_NO_NETWORK, _NO_HOST = os.strerror(errno.ENETUNREACH), os.strerror(errno.EHOSTUNREACH)


async def require_paths(control: Control, environment: Environment) -> None:
    """Connect every node with every other, and send messages both ways.

    Raises:
        LaunchEnded: on every node, with the nodes that cannot reach each other, and how.
    """
    assert environment.local_ip is not None
    with network.listen(0, environment.local_ip) as listener:
        threading.Thread(target=_answer_all, args=(listener,), daemon=True).start()
        mtu = psutil.net_if_stats()[environment.interface].mtu
        place = {
            "ip": environment.local_ip,
            "port": listener.getsockname()[1],
            "mtu": f"{environment.interface} {mtu}",
        }
        what = "ports that can be reached"
        places = await control.gather(what, place, _GATHER_TIMEOUT_S)
        limit = asyncio.Semaphore(_AT_ONCE)

        async def problem_towards(node: int) -> str | None:
            async with limit:
                ip, port = places[node]["ip"], places[node]["port"]
                trouble = await asyncio.to_thread(_try, ip, port)
                return trouble and _describe(trouble, node, places, control, environment)

        others = [node for node in range(len(control.nodes)) if node != control.node]
        troubles = await asyncio.gather(*map(problem_towards, others))
        value = {"problems": [trouble for trouble in troubles if trouble]}
        await control.gather("connections between the nodes", value, _GATHER_TIMEOUT_S)
        _end(listener)


def _describe(
    trouble: str,
    node: int,
    places: list[dict[str, Any]],
    control: Control,
    environment: Environment,
) -> str:
    """Describe the trouble that `_try` met on the way to a node, as `<what> - <what to do>`."""
    me, other = control.me.name, control.nodes[node].name
    ip, port = places[node]["ip"], places[node]["port"]
    # The addresses by which the nodes have met at the master port.
    known = {0: environment.master_ip}
    if control.node == 0:
        known = {hello.node or 0: hello.address for hello in control.nodes}
    if trouble == "large":
        mtus = f"{places[control.node]['mtu']} here and {places[node]['mtu']} there"
        return (
            f"small messages pass between {me} and {other}, large ones do not: the MTU ({mtus}) is "
            "more than the way between them carries - set one that every interface and switch "
            "takes (ip link set dev INTERFACE mtu N)"
        )
    if trouble in (_SILENT, _CUT_OFF):
        return (
            f"{me} connects to {other} at port {port} of {ip} and {trouble}: its preflight is "
            "stopped, its machine hangs, or another answers for it - look there, and for a "
            "firewall or proxy on the way"
        )
    if trouble == "slow":
        return (
            f"{_LARGE_BYTES >> 10} KiB pass between {me} and {other}, {_BYTES[-1] >> 10} KiB do "
            f"not within {_MESSAGE_TIMEOUT_S:.0f} s: a cable, a switch or an interface has fallen "
            "back to a slower rate, the way is full, or one of the two is stopped - see `ethtool "
            "INTERFACE` on both, and what else they send"
        )
    if trouble == _NO_NETWORK:
        return (
            f"{me} cannot reach {other} at {ip} ({trouble}), though it reaches MASTER_ADDR - mend "
            "the route, or set NCCL_SOCKET_IFNAME to an interface whose network all nodes share"
        )
    if trouble == _NO_HOST and known.get(node) != ip:
        return (
            f"{me} cannot reach {other} at port {port} of {ip} ({trouble}), though both reach "
            "MASTER_ADDR: a firewall rejects it, or there is no way between the two - open all "
            "ports between the nodes in the firewall, or set NCCL_SOCKET_IFNAME to an interface "
            "whose network all nodes share"
        )
    return (
        f"{me} cannot reach {other} at port {port} of {ip} ({trouble}): ports other than "
        f"{environment.port} are blocked, and NCCL and gloo need them - open all ports between the "
        "nodes in the firewall"
    )


def _try(ip: str, port: int) -> str | None:
    """Name the trouble on the way, or None.

    `large`: only a small message passes. `slow`: a larger one passes, the largest does not.
    """
    try:
        connection = socket.create_connection((ip, port), _CONNECT_TIMEOUT_S)
    except OSError as error:
        return error.strerror or "timed out"
    with connection:
        connection.settimeout(_MESSAGE_TIMEOUT_S)
        passed = 0
        try:
            for size in _BYTES:
                connection.sendall(bytes(size))
                _receive(connection, size)
                passed = size
        except OSError as error:
            if passed >= _LARGE_BYTES:
                return "slow"  # the other end may be the first to give up
            if isinstance(error, ConnectionError):
                return _CUT_OFF
            return "large" if passed else error.strerror or _SILENT
    return None


def _answer_all(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is closed in the end
        while True:
            threading.Thread(target=_answer, args=(listener.accept()[0],), daemon=True).start()


def _answer(connection: socket.socket) -> None:
    connection.settimeout(2 * _MESSAGE_TIMEOUT_S)  # the other end gives up first, and says why
    with connection, contextlib.suppress(OSError):
        for size in _BYTES:
            _receive(connection, size)
            connection.sendall(bytes(size))


def _receive(connection: socket.socket, size: int) -> None:
    while size > 0:
        received = connection.recv(min(size, 1 << 20))
        if not received:
            raise ConnectionAbortedError
        size -= len(received)


def _end(listener: socket.socket) -> None:
    """Wake the thread that accepts, which closing alone does not."""
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
