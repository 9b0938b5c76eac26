"""What nodes tell each other: JSON, one message a line, over TCP. Whatever comes in is parsed, never executed."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

PROTOCOL = "shardtune preflight 1"
_LONGEST_BYTES = 32 << 20
_LONGEST_HELLO_BYTES = 64 << 10
_SEND_TIMEOUT_S = 10.0
# A machine that is lost says nothing: after so long without an answer the system ends the connection.
_SILENCE_S = 15
_LONGEST_WAIT_S = 1e6  # the system takes no more


class ConnectionLost(Exception):
    """The other end closed the connection, is lost, or sends what is no message."""


@dataclass(frozen=True)
class NodeHello:
    """A node as it introduces itself. `node` and `nodes` are None where its own settings could not be read.

    `port` is the MASTER_PORT of its run, `token` what it alone says, `preflight` a digest of its program.
    """

    node: int | None
    nodes: int | None
    host: str
    address: str
    port: int | None
    token: str
    preflight: str
    problems: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"node {'?' if self.node is None else self.node} ({self.host})"

    def hello(self) -> Message:
        told = {name: value for name, value in vars(self).items() if name != "address"}
        return {"hello": PROTOCOL, **told}

    @staticmethod
    def of(hello: Message, address: str) -> NodeHello:
        """Raises ValueError where it is no hello."""
        node, nodes, host, problems = (
            hello.get(key) for key in ("node", "nodes", "host", "problems")
        )
        if (
            hello.get("hello") != PROTOCOL
            or not isinstance(host, str)
            or not isinstance(problems, list)
        ):
            raise ValueError("no hello of this program")
        port, token, preflight = (hello.get(key) for key in ("port", "token", "preflight"))
        for number, least in ((node, 0), (nodes, 1), (port, 1)):
            if number is not None and (type(number) is not int or number < least):
                raise ValueError("no numbers")
        told = tuple(printable(str(problem)) for problem in problems)
        return NodeHello(
            node, nodes, printable(host), address, port, str(token), printable(str(preflight)), told
        )


class Link:
    """A connection to another node, or process; what is sent must be taken within `send_timeout_s`."""

    def __init__(
        self,
        connection: socket.socket,
        address: str,
        send_timeout_s: float | None = _SEND_TIMEOUT_S,
    ) -> None:
        self._socket = connection
        self.address = address
        self._unread = b""
        self._longest = _LONGEST_HELLO_BYTES
        self.since = time.monotonic()
        connection.settimeout(send_timeout_s)
        with contextlib.suppress(OSError):
            for level, option, value in (
                (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
                (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
                (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
                (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
                (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, (_SILENCE_S - 5) // 2),
                (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SILENCE_S),
            ):
                connection.setsockopt(level, option, value)

    def fileno(self) -> int:
        return self._socket.fileno()

    def trust(self) -> None:
        """It has said hello, and may send longer messages from now on."""
        self._longest = _LONGEST_BYTES

    def send(self, message: Message) -> None:
        """Raises ConnectionLost."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise ConnectionLost(
                error.strerror or "its connection takes nothing any more"
            ) from error

    def messages(self) -> list[Message]:
        """Those that have come, once the connection is readable. Raises Gone when there will be none any more."""
        try:
            received = self._socket.recv(1 << 20)
        except OSError as error:
            raise ConnectionLost(error.strerror or "its connection is silent") from error
        if not received:
            raise ConnectionLost("it closed the connection")
        *lines, self._unread = (self._unread + received).split(b"\n")
        if len(self._unread) > self._longest:
            raise ConnectionLost("it sends more than any message holds")
        return [_parsed(line) for line in lines]

    def receive(self, timeout_s: float) -> list[Message]:
        """Wait for the next message, and return it with those behind it. Raises ConnectionLost, and TimeoutError without one."""
        deadline = time.monotonic() + timeout_s
        while readable([self], deadline - time.monotonic()):
            if messages := self.messages():
                return messages
        raise TimeoutError

    def close(self) -> None:
        self._socket.close()


def readable(sources: Iterable[Any], timeout_s: float) -> list[Any]:
    """Those of the sources, each with a `fileno()`, that can be read without waiting, at the latest after that time."""
    with selectors.DefaultSelector() as selector:
        for source in sources:
            selector.register(source, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(min(max(0, timeout_s), _LONGEST_WAIT_S))]


def connect(ip: str, port: int, timeout_s: float) -> Link:
    """Raises OSError. A socket that met itself, as one to a free port of this machine may, counts as refused."""
    connection = socket.create_connection((ip, port), timeout_s)
    if connection.getsockname() == connection.getpeername():
        connection.close()
        raise ConnectionRefusedError
    return Link(connection, ip)


def printable(text: str) -> str:
    """One line without control characters: another machine wrote it."""
    return "".join(character if character.isprintable() else "?" for character in text)[:2000]


def _parsed(line: bytes) -> Message:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConnectionLost("it sends no JSON") from error
    if not isinstance(message, dict):
        raise ConnectionLost("it sends no message")
    return message
