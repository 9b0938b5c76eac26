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
    """List every interface's addresses with the network of each, IPv4 first.

    An address with a label, as in `eth0:1`, is eth0's.
    """
    interfaces: dict[str, list[ipaddress.IPv4Interface | ipaddress.IPv6Interface]] = {}
    for name, entries in psutil.net_if_addrs().items():
        ordered = sorted(
            (entry for entry in entries if entry.family in _FAMILIES),
            key=lambda entry: entry.family,
        )
        parsed = [_with_network(e.address.partition("%")[0], e.netmask) for e in ordered]
        usable = [one for one in parsed if one.version == 4 or not one.ip.is_link_local]
        interfaces.setdefault(name.partition(":")[0], []).extend(usable)
    for _, name in socket.if_nameindex():  # psutil leaves out those without an address
        interfaces.setdefault(name, [])
    return interfaces


def loopback() -> str:
    """Name the loopback interface, mostly lo."""
    return interfaces_of("127.0.0.1")[0]


def free_port() -> int:
    """Choose a port of loopback at which nobody listens now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def described_addresses() -> str:
    """Describe all interfaces: `lo (127.0.0.1), enp26s0np0 (10.11.7.50)`."""
    texts = {
        name: " ".join(str(one.ip) for one in known if str(one.ip) != "::1")
        for name, known in addresses().items()
    }
    return ", ".join(f"{name} ({text or 'without an address'})" for name, text in texts.items())


def interfaces_of(ip: str) -> list[str]:
    """List the interfaces that own this address; every 127.x.x.x is lo's."""
    wanted = ipaddress.ip_address(ip)
    return [
        name
        for name, known in addresses().items()
        if any(one.ip == wanted or (one.ip.is_loopback and wanted.is_loopback) for one in known)
    ]


def address_towards(interface: str, ip: str) -> str:
    """Choose the interface's address: this very one, else one in its network, else the first."""
    wanted, known = ipaddress.ip_address(ip), addresses()[interface]
    return str(max(known, key=lambda one: (one.ip == wanted, wanted in one.network)).ip)


def interfaces_towards(ip: str) -> list[str]:
    """List the interfaces that lead to the address: the route's, then those in its network.

    Nothing is sent: connecting a UDP socket only chooses a route.
    """
    by_route: list[str] = []
    wanted = ipaddress.ip_address(ip)
    with contextlib.suppress(OSError), socket.socket(_family(ip), socket.SOCK_DGRAM) as chooser:
        chooser.connect((ip, 9))
        by_route += interfaces_of(chooser.getsockname()[0])
    return by_route + [
        name
        for name, known in addresses().items()
        if name not in by_route and any(wanted in one.network for one in known)
    ]


def resolved(name: str) -> str:
    """Look up the address of a host's name; an address is its own. Raises OSError."""
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
    """Write `NAME (ADDRESS)`, or the name alone where it is that very address or has none."""
    return name if ip in (None, name) else f"{name} ({ip})"


def is_link_up(interface: str) -> bool:
    """Whether it is set up and has a carrier; an interface that psutil does not know is up."""
    known = psutil.net_if_stats().get(interface)
    return known is None or known.isup


def listen(port: int, ip: str = "") -> socket.socket:
    """Listen on one address, or on all of this machine. Raises OSError."""
    if ip or not socket.has_dualstack_ipv6():
        return socket.create_server(
            (ip, port), family=_family(ip) if ip else socket.AF_INET, backlog=128
        )
    return socket.create_server(
        ("", port), family=socket.AF_INET6, backlog=128, dualstack_ipv6=True
    )


def port_holder(port: int) -> str:
    """Name the process that listens on a port of this machine; another user's may be hidden."""
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
    """Return the first of these ports where the machine answers or refuses, or None."""
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
