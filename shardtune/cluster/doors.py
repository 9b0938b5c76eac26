"""Where node 0 listens: the master port, and a side door that tells a blocked port from a node that is not there."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Any

from shardtune.cluster.control import ConnectionLost, Link, NodeHello, readable
from shardtune.cluster.network import listen

_HELLO_TIMEOUT_S = 10.0
_MOST_STRANGERS = 64


def side_port(port: int) -> int:
    """Where a worker asks when the master port does not answer as it should."""
    return port + 1000 if port + 1000 <= 65535 else port - 1000


class Doors:
    """Who comes says hello in one line. Anything else, such as a port scan, is a stranger, and let go."""

    def __init__(self, me: NodeHello) -> None:
        self.has_main = False
        self._me = me
        self._listeners: list[socket.socket] = []
        self._strangers: list[Link] = []

    def open(self, port: int, is_main: bool) -> None:
        """Listen at a port of every address of this machine. Raises OSError."""
        self._listeners.append(listen(port))
        self.has_main |= is_main

    def sources(self) -> list[Any]:
        """What to wait for."""
        return [*self._listeners, *self._strangers]

    def arrivals(self, ready: list[Any]) -> list[tuple[NodeHello, Link]]:
        """Nodes that have said hello, and were answered; `ready` holds those of `sources` that are readable."""
        for listener in self._listeners:
            if listener in ready:
                with contextlib.suppress(OSError):  # it has gone again
                    connection, (address, *_) = listener.accept()
                    self._strangers.append(Link(connection, address.removeprefix("::ffff:")))
        arrived = []
        for link in self._strangers[:]:
            is_old = time.monotonic() - link.since > _HELLO_TIMEOUT_S
            try:
                messages = link.messages() if link in ready or readable([link], 0) else []
                if messages:
                    member = NodeHello.of(messages[0], link.address)
                    # A preflight of another version may name none: that it differs is said of it later.
                    if member.port not in (None, self._me.port) or member.token == self._me.token:
                        raise ConnectionLost("it looks for another run, or is this node itself")
                    link.send({"welcome": time.time(), "host": self._me.host})
                    link.trust()
                    arrived.append((member, link))
                    self._strangers.remove(link)
                elif is_old or self._strangers.index(link) < len(self._strangers) - _MOST_STRANGERS:
                    raise ConnectionLost("it says nothing")
            except (ConnectionLost, ValueError):
                self._strangers.remove(link)
                link.close()
        return arrived

    def close(self) -> None:
        for source in self.sources():
            source.close()
        self._listeners, self._strangers = [], []
