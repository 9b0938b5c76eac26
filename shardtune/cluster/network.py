"""This machine's network, IPv4 only: interfaces, routes, ports and their holders."""

import contextlib
import socket
from ipaddress import IPv4Address, IPv4Interface

import psutil


def addresses() -> dict[str, list[IPv4Interface]]:
    """List every interface's addresses, each with its network.

    An address with a label, as in `eth0:1`, is eth0's.
    """
    interfaces: dict[str, list[IPv4Interface]] = {}
    for name, entries in psutil.net_if_addrs().items():
        interfaces.setdefault(name.partition(":")[0], []).extend(
            IPv4Interface(f"{entry.address}/{entry.netmask or 32}")
            for entry in entries
            if entry.family == socket.AF_INET
        )
    return interfaces


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def described_addresses() -> str:
    """Describe the interfaces that have an address: `lo (127.0.0.1), enp26s0np0 (10.11.7.50)`."""
    return ", ".join(
        f"{name} ({' '.join(str(one.ip) for one in known)})"
        for name, known in addresses().items()
        if known
    )


def interfaces_of(ip: str) -> list[str]:
    """List the interfaces that own this address; every 127.x.x.x is lo's."""
    wanted = IPv4Address(ip)
    return [
        name
        for name, known in addresses().items()
        if any(one.ip == wanted or (one.ip.is_loopback and wanted.is_loopback) for one in known)
    ]


def interfaces_towards(ip: str) -> list[str]:
    """List the interfaces that lead to the address: the route's, then those in its network.

    Nothing is sent: connecting a UDP socket only chooses a route.
    """
    by_route: list[str] = []
    with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as chooser:
        chooser.connect((ip, 9))
        by_route = interfaces_of(chooser.getsockname()[0])
    return by_route + [
        name
        for name, known in addresses().items()
        if name not in by_route and any(IPv4Address(ip) in one.network for one in known)
    ]


def address_towards(interface: str, ip: str) -> str:
    """Choose an address of the interface: `ip` itself, else one in its network, else the first."""
    wanted, known = IPv4Address(ip), addresses()[interface]
    return str(max(known, key=lambda one: (one.ip == wanted, wanted in one.network)).ip)


def port_holder(port: int) -> str:
    """Name the process that listens on a port of this machine; another user's may be hidden."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            is_listening = connection.status == psutil.CONN_LISTEN
            if is_listening and connection.laddr.port == port and connection.pid:
                command = " ".join(psutil.Process(connection.pid).cmdline())
                return f"process {connection.pid} (`{command[:120]}`)"
    return "a process that this user may not see"
