"""Whether any two nodes reach each other as NCCL and gloo need it: on any port, and with large messages."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil

from shardtune.cluster import network
from shardtune.cluster.environment import Settings
from shardtune.cluster.meeting import Meeting

_CONNECT_TIMEOUT_S = 5.0
_MESSAGE_TIMEOUT_S = 5.0
_SILENT, _CUT_OFF = f"hears nothing for {_MESSAGE_TIMEOUT_S:.0f} s", "is cut off"
_SMALL_BYTES, _LARGE_BYTES = 64, 64 << 10  # in one packet, and in more than any MTU holds
_BYTES = (_SMALL_BYTES, _LARGE_BYTES, 1 << 20)
_AT_ONCE = 16
_GATHER_TIMEOUT_S = 60.0
_NO_NETWORK, _NO_HOST = os.strerror(errno.ENETUNREACH), os.strerror(errno.EHOSTUNREACH)


def require_paths(meeting: Meeting, settings: Settings) -> None:
    """Connect every node with every other, and send both ways; afterwards nothing of it is left.

    Raises:
        UserError: on every node, with who cannot reach whom, and how.
    """
    assert settings.own_ip is not None
    with network.listen(0, settings.own_ip) as listener:
        threading.Thread(target=_answer_all, args=(listener,), daemon=True).start()
        mtu = psutil.net_if_stats()[settings.interface].mtu
        place = {
            "ip": settings.own_ip,
            "port": listener.getsockname()[1],
            "mtu": f"{settings.interface} {mtu}",
        }
        places = meeting.gather("ports that can be reached", place, _GATHER_TIMEOUT_S)
        # By way of the master port.
        known = (
            {0: settings.master_ip}
            if meeting.node
            else {m.node: m.address for m in meeting.members}
        )

        def problem_towards(node: int) -> str | None:
            me, other = meeting.members[meeting.node].name, meeting.members[node].name
            ip, port = places[node]["ip"], places[node]["port"]
            if (trouble := _try(ip, port)) is None:
                return None
            if trouble == "large":
                mtus = f"{places[meeting.node]['mtu']} here and {places[node]['mtu']} there"
                return (
                    f"small messages pass between {me} and {other}, large ones do not: the MTU ({mtus}) is more than "
                    "the way between them carries - set one that every interface and switch takes (ip link set dev "
                    "INTERFACE mtu N)"
                )
            if trouble in (_SILENT, _CUT_OFF):
                return (
                    f"{me} connects to {other} at port {port} of {ip} and {trouble}: its preflight is stopped, its "
                    "machine hangs, or another answers for it - look there, and for a firewall or proxy on the way"
                )
            if trouble == "slow":
                return (
                    f"{_LARGE_BYTES >> 10} KiB pass between {me} and {other}, {_BYTES[-1] >> 10} KiB do not within "
                    f"{_MESSAGE_TIMEOUT_S:.0f} s: a cable, a switch or an interface has fallen back to a slower rate, "
                    "the way is full, or one of the two is stopped - see `ethtool INTERFACE` on both, and what else "
                    "they send"
                )
            if trouble == _NO_NETWORK:
                return (
                    f"{me} cannot reach {other} at {ip} ({trouble}), though it reaches MASTER_ADDR - mend the route, "
                    "or set NCCL_SOCKET_IFNAME to an interface whose network all nodes share"
                )
            if trouble == _NO_HOST and known.get(node) != ip:
                return (
                    f"{me} cannot reach {other} at port {port} of {ip} ({trouble}), though both reach MASTER_ADDR: a "
                    "firewall rejects it, or there is no way between the two - open all ports between the nodes in "
                    "the firewall, or set NCCL_SOCKET_IFNAME to an interface whose network all nodes share"
                )
            return (
                f"{me} cannot reach {other} at port {port} of {ip} ({trouble}): ports other than {settings.port} are "
                "blocked, and NCCL and gloo need them - open all ports between the nodes in the firewall"
            )

        others = [node for node in range(len(meeting.members)) if node != meeting.node]
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            problems = [problem for problem in threads.map(problem_towards, others) if problem]
        meeting.gather("connections between the nodes", {"problems": problems}, _GATHER_TIMEOUT_S)
        _end(listener)


def _try(ip: str, port: int) -> str | None:
    """What keeps messages from passing both ways: `large` if only a small one comes, `slow` if more do."""
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
