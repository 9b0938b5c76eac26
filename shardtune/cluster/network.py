"""This machine's network: interfaces, routes, ports and their holders."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import select
import socket
import time
from collections.abc import Iterable

import psutil

_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def addresses() -> dict[str, list[ipaddress.IPv4Interface | ipaddress.IPv6Interface]]:
    """Of every interface its addresses, each with the network it lies in; IPv4 first.

    An address with a label, as in `eth0:1`, is eth0's.
    """
    found: dict[str, list[ipaddress.IPv4Interface | ipaddress.IPv6Interface]] = {}
    for name, entries in psutil.net_if_addrs().items():
        ordered = sorted(
            (entry for entry in entries if entry.family in _FAMILIES),
            key=lambda entry: entry.family,
        )
        own = [_with_network(entry.address.partition("%")[0], entry.netmask) for entry in ordered]
        known = found.setdefault(name.partition(":")[0], [])
        known += [one for one in own if one.version == 4 or not one.ip.is_link_local]
    for _, name in socket.if_nameindex():  # one without any address is in no other list
        found.setdefault(name, [])
    return found


def loopback() -> str:
    """The name of the loopback interface, mostly lo."""
    return interfaces_of("127.0.0.1")[0]


def free_port() -> int:
    """A port of loopback that nobody listens at now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def described_addresses() -> str:
    """`lo (127.0.0.1), enp26s0np0 (10.11.7.50)`."""
    return ", ".join(
        f"{name} ({' '.join(str(one.ip) for one in own if str(one.ip) != '::1') or 'without an address'})"
        for name, own in addresses().items()
    )


def interfaces_of(ip: str) -> list[str]:
    """The interfaces that own this address; every 127.x.x.x is lo's."""
    wanted = ipaddress.ip_address(ip)
    return [
        name
        for name, own in addresses().items()
        if any(one.ip == wanted or (one.ip.is_loopback and wanted.is_loopback) for one in own)
    ]


def address_towards(interface: str, ip: str) -> str:
    """Of the interface's addresses this very one, else one in its network, else the first."""
    wanted, own = ipaddress.ip_address(ip), addresses()[interface]
    return str(max(own, key=lambda one: (one.ip == wanted, wanted in one.network)).ip)


def interfaces_towards(ip: str) -> list[str]:
    """The interfaces through which this machine reaches the address: the route's own, then those in its network.

    Nothing is sent: connecting a UDP socket only chooses a route.
    """
    found: list[str] = []
    wanted = ipaddress.ip_address(ip)
    with contextlib.suppress(OSError), socket.socket(_family(ip), socket.SOCK_DGRAM) as chooser:
        chooser.connect((ip, 9))
        found += interfaces_of(chooser.getsockname()[0])
    return found + [
        name
        for name, own in addresses().items()
        if name not in found and any(wanted in one.network for one in own)
    ]


def resolved(name: str) -> str:
    """The address of a host's name, or the address itself. Raises OSError."""
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(
            errno.EINVAL, "a part of it between dots is empty, or longer than 63 characters"
        ) from error
    ordered = sorted(
        (entry for entry in entries if entry[0] in _FAMILIES), key=lambda entry: entry[0]
    )
    return str(ordered[0][4][0])


def named(name: str, ip: str | None) -> str:
    """`NAME (ADDRESS)`, or the name alone where it is that very address or has none."""
    return name if ip in (None, name) else f"{name} ({ip})"


def is_link_up(interface: str) -> bool:
    """Whether it was set up, and has a carrier; one of which the system knows nothing counts as up."""
    known = psutil.net_if_stats().get(interface)
    return known is None or known.isup


def listen(port: int, ip: str = "") -> socket.socket:
    """A listener on one address, or on every one of this machine. Raises OSError."""
    if ip or not socket.has_dualstack_ipv6():
        return socket.create_server(
            (ip, port), family=_family(ip) if ip else socket.AF_INET, backlog=128
        )
    return socket.create_server(
        ("", port), family=socket.AF_INET6, backlog=128, dualstack_ipv6=True
    )


def port_holder(port: int) -> str:
    """Who listens on a port of this machine, as far as the system tells: of another user's process it may not."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if (
                connection.status == psutil.CONN_LISTEN
                and connection.laddr.port == port
                and connection.pid
            ):
                command = " ".join(psutil.Process(connection.pid).cmdline())
                return f"process {connection.pid} (`{command[:120]}`)"
    return "a process that this user may not see"


def is_up(ip: str, ports: Iterable[int], timeout_s: float) -> int | None:
    """The first of these ports where the machine answers, be it with a refusal; None if it is silent on all."""
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as opened:
        trying: dict[int, tuple[socket.socket, int]] = {}
        poll = select.poll()
        for port in ports:
            attempt = opened.enter_context(socket.socket(_family(ip), socket.SOCK_STREAM))
            attempt.setblocking(False)
            code = attempt.connect_ex((ip, port))
            if code in (0, errno.ECONNREFUSED):
                return port
            if code == errno.EINPROGRESS:
                poll.register(attempt, select.POLLOUT)
                trying[attempt.fileno()] = (attempt, port)
        while trying and (left_s := deadline - time.monotonic()) > 0:
            for number, _ in poll.poll(1000 * left_s):
                poll.unregister(number)
                attempt, port = trying.pop(number)
                if attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in (
                    0,
                    errno.ECONNREFUSED,
                ):
                    return port
    return None


def _family(ip: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in ip else socket.AF_INET


def _with_network(
    ip: str, netmask: str | None
) -> ipaddress.IPv4Interface | ipaddress.IPv6Interface:
    if netmask is not None and ":" in netmask:
        netmask = str(bin(int(ipaddress.ip_address(netmask))).count("1"))
    return ipaddress.ip_interface(f"{ip}/{netmask}" if netmask else ip)
