"""The connection between the agents of two nodes, from their first hello to their last line.

A message is a JSON object behind a line with its number of bytes. Received text is parsed, never
executed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

from shardtune.errors import first_line
from shardtune.log import logger

Message = dict[str, Any]

PROTOCOL = "shardtune agents 1"
SAY_EVERY_S = 5.0
_TICK_S = 1.0
_LONGEST_BYTES = 32 << 20
_LONGEST_HELLO_BYTES = 64 << 10
_SEND_TIMEOUT_S = 10.0
# After one node's refusal node 0 waits so long for those of others, and another node so long for
# node 0's word.
_MORE_PROBLEMS_S = 1.0
_VERDICT_S = 10.0
# Without an answer for so long the system ends a connection.
_DEAD_PEER_S = 15


class ConnectionLost(Exception):
    """The other end closed the connection, is lost, or sends something else than messages."""


class LaunchEnded(Exception):
    """This launch ends on every node: with this exit code and these last lines."""

    def __init__(self, code: int, lines: Iterable[str]) -> None:
        self.code, self.lines = code, list(dict.fromkeys(lines))
        super().__init__("\n".join(self.lines))


@dataclass(frozen=True)
class NodeHello:
    """How a node introduces itself.

    `node` and `nodes` are None where its environment could not be read. `port` is the MASTER_PORT
    of its run, `token` a random name, `code` a digest of its programs, `problems` its own ones.
    """

    node: int | None
    nodes: int | None
    host: str
    address: str
    port: int | None
    token: str
    code: str
    problems: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"node {'?' if self.node is None else self.node} ({self.host})"

    def message(self) -> Message:
        return {
            "hello": PROTOCOL,
            **{name: v for name, v in vars(self).items() if name != "address"},
        }

    @staticmethod
    def parse(message: Message, address: str) -> NodeHello:
        """Raises ConnectionLost where it is not a hello."""
        node, nodes, port = (message.get(key) for key in ("node", "nodes", "port"))
        host, problems = message.get("host"), message.get("problems")
        is_hello = message.get("hello") == PROTOCOL and isinstance(host, str)
        numbers = ((node, 0), (nodes, 1), (port, 1))
        if not is_hello or not isinstance(problems, list) or not all(map(_is_number, numbers)):
            raise ConnectionLost("it says no hello")
        token, code = (printable(str(message.get(key))) for key in ("token", "code"))
        texts = tuple(printable(str(problem)) for problem in problems)
        return NodeHello(node, nodes, printable(str(host)), address, port, token, code, texts)


def _is_number(number: tuple[Any, int]) -> bool:
    value, least = number
    return value is None or (type(value) is int and value >= least)


class Peer:
    """The connection to another node; `hello` is the other node's."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._longest = _LONGEST_HELLO_BYTES
        self.address = str(writer.get_extra_info("peername")[0]).removeprefix("::ffff:")
        self.hello = NodeHello(None, None, "?", self.address, None, "", "")
        self.silent_ticks = 0
        connection = writer.get_extra_info("socket")
        with contextlib.suppress(OSError):
            for level, option, value in (
                (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
                (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
                (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
                (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
                (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, (_DEAD_PEER_S - 5) // 2),
            ):
                connection.setsockopt(level, option, value)

    @property
    def name(self) -> str:
        return self.hello.name

    def trust(self, hello: NodeHello) -> None:
        """Accept longer messages from now on: the other end has said hello."""
        self.hello, self._longest = hello, _LONGEST_BYTES

    async def send(self, message: Message) -> None:
        """Raises ConnectionLost."""
        text = json.dumps(message).encode()
        try:
            self._writer.write(b"%d\n%s" % (len(text), text))
            await asyncio.wait_for(self._writer.drain(), _SEND_TIMEOUT_S)
        except (OSError, TimeoutError) as error:
            raise ConnectionLost(first_line(error)) from error

    async def receive(self) -> Message:
        """Raises ConnectionLost."""
        try:
            head = await self._reader.readline()
            if not head:
                raise ConnectionLost("it closed the connection")
            size = int(head)
            if not 0 < size <= self._longest:
                raise ConnectionLost("it sends more than a message holds")
            message = json.loads(await self._reader.readexactly(size))
        except (OSError, EOFError) as error:
            raise ConnectionLost(getattr(error, "strerror", None) or "it broke off") from error
        except (ValueError, RecursionError) as error:
            raise ConnectionLost("it sends something else than messages") from error
        if not isinstance(message, dict):
            raise ConnectionLost("it sends something else than messages")
        return message

    def close(self) -> None:
        self._writer.close()


class Control:
    """This node's connections: node 0's to all other nodes, another node's to node 0.

    Every node says once a second that it lives. A connection on which nothing has come for
    `silent_s` is lost. `clock_ahead_s` is how far this node's clock is ahead of node 0's, give or
    take `clock_error_s`.
    """

    def __init__(self, me: NodeHello, silent_s: float = 20.0) -> None:
        self.me = me
        self.nodes: list[NodeHello] = [me]
        self.peers: list[Peer] = []
        self.silent_s = silent_s
        self.clock_ahead_s = self.clock_error_s = 0.0
        self._queue: asyncio.Queue[tuple[Peer | None, Message]] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._round = 0
        self.spawn(self._beat())

    @property
    def node(self) -> int:
        return self.me.node or 0

    def spawn(self, work: Any) -> None:
        """Run a coroutine until it ends or the launch does."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def add(self, peer: Peer) -> None:
        self.peers.append(peer)
        self.spawn(self._listen(peer))

    def drop(self, peer: Peer) -> None:
        if peer in self.peers:
            self.peers.remove(peer)
        peer.close()

    def put(self, message: Message) -> None:
        """Hand a message of this node's own to `next`."""
        self._queue.put_nowait((None, message))

    async def next(self, timeout_s: float) -> tuple[Peer | None, Message] | None:
        """The next message, behind the peer that sent it, or None after this time.

        `{"lost": why}` is the last one of a peer, which is dropped then.
        """
        try:
            return await asyncio.wait_for(self._queue.get(), max(0.0, timeout_s))
        except TimeoutError:
            return None

    async def tell(self, message: Message) -> None:
        """Send to all peers; one that is lost will be noticed by `next`."""
        for peer in self.peers[:]:
            with contextlib.suppress(ConnectionLost):
                await peer.send(message)

    async def _listen(self, peer: Peer) -> None:
        try:
            while True:
                message = await peer.receive()
                peer.silent_ticks = 0
                if message != {"alive": True}:
                    self._queue.put_nowait((peer, message))
        except ConnectionLost as lost:
            self._lose(peer, str(lost))

    def _lose(self, peer: Peer, why: str) -> None:
        if peer in self.peers:
            self.drop(peer)
            self._queue.put_nowait((peer, {"lost": why}))

    async def _beat(self) -> None:
        """Ticks are counted, not time: a process that was stopped itself accuses nobody."""
        while True:
            await asyncio.sleep(_TICK_S)
            for peer in self.peers[:]:
                peer.silent_ticks += 1
                if peer.silent_ticks * _TICK_S > self.silent_s:
                    self._lose(peer, f"no sign of life for {self.silent_s:.0f} s")
                else:
                    with contextlib.suppress(ConnectionLost):
                        await peer.send({"alive": True})

    async def gather(
        self, what: str, value: Message | Awaitable[Message], timeout_s: float
    ) -> list[Message]:
        """Every node's value, in the order of their ranks, on every node.

        Raises:
            LaunchEnded: on every node, with the `problems` that a value names, or because a node
                is lost or late.
        """
        self._round += 1
        self.spawn(self._hand_in(value, self._round))
        values: dict[int, Message] = {}
        deadline = asyncio.get_running_loop().time() + timeout_s
        next_word = asyncio.get_running_loop().time() + SAY_EVERY_S
        problems: list[str] = []
        while len(values) < len(self.nodes) or problems:
            now = asyncio.get_running_loop().time()
            if now >= deadline or (problems and len(values) == len(self.nodes)):
                late = f"{self._awaited(values, self.me.name)} is late with {what} - see its log"
                await self.refuse(problems or [late])
            if now >= next_word:
                next_word = now + SAY_EVERY_S
                say(f"waiting for {self._awaited(values, 'this node')}: {what}")
            received = await self.next(min(deadline, next_word) - now)
            if received is None:
                continue
            peer, message = received
            self.require_no_end(peer, message, what)
            if message.get("round") != self._round:
                continue
            if peer is not None and self.node != 0:
                values = dict(enumerate(message["values"]))
                continue
            values[self.node if peer is None else int(peer.hello.node or 0)] = message["value"]
            if message["value"].get("problems"):
                problems += map(str, message["value"]["problems"])
                now = asyncio.get_running_loop().time()
                wait_s = _MORE_PROBLEMS_S if self.node == 0 else _VERDICT_S
                deadline = min(deadline, now + wait_s)
        in_order = [values[node] for node in range(len(self.nodes))]
        if self.node == 0:
            await self.tell({"round": self._round, "values": in_order})
        return in_order

    async def _hand_in(self, value: Message | Awaitable[Message], number: int) -> None:
        if not isinstance(value, dict):
            try:
                value = await value
            except LaunchEnded as ended:
                value = {"problems": ended.lines}
            except Exception as error:
                value = {"problems": [f"{self.me.name}: {first_line(error)} - see its log"]}
        self._queue.put_nowait((None, {"round": number, "value": value}))
        if self.node != 0:
            await self.tell({"round": number, "value": value})

    def require_no_end(self, peer: Peer | None, message: Message, what: str) -> None:
        """Raises LaunchEnded where another node ends the launch, or has gone away."""
        if isinstance(message.get("problems"), list):
            raise LaunchEnded(int(message.get("code", 2)), map(str, message["problems"]))
        if peer is not None and "lost" in message:
            raise LaunchEnded(
                2,
                [
                    f"{peer.name} went away ({message['lost']}, {what}) - "
                    "see its log, and start every node again"
                ],
            )

    async def refuse(self, problems: Iterable[str], code: int = 2) -> NoReturn:
        """Raise LaunchEnded here, and on every node that still listens."""
        ended = LaunchEnded(code, problems)
        await self.tell({"problems": ended.lines, "code": code})
        raise ended

    def _awaited(self, values: dict[int, Message], own_name: str) -> str:
        """Whom this node waits for."""
        if self.node != 0:
            return self.nodes[0].name if self.node in values else own_name
        missing = [node for node in range(len(self.nodes)) if node not in values]
        return ", ".join(
            own_name if node == self.node else self.nodes[node].name for node in missing
        )


async def connect(ip: str, port: int, timeout_s: float) -> Peer:
    """Raises OSError. A socket that met itself, as one to a free port may, counts as refused."""
    streams = await asyncio.wait_for(
        asyncio.open_connection(ip, port, limit=_LONGEST_HELLO_BYTES), timeout_s
    )
    connection = streams[1].get_extra_info("socket")
    if connection.getsockname() == connection.getpeername():
        streams[1].close()
        raise ConnectionRefusedError
    return Peer(*streams)


async def serve(
    listener: socket.socket, arrive: Callable[[Peer], Awaitable[None]]
) -> asyncio.Server:
    """Hand every connection to `arrive`."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await arrive(Peer(reader, writer))

    return await asyncio.start_server(accept, sock=listener, limit=_LONGEST_HELLO_BYTES)


def say(line: str) -> None:
    logger.info(f"Preflight: {printable(line)}")


def warn(line: str) -> None:
    logger.info(f"Warning: {printable(line)}")


def printable(text: str) -> str:
    """One line without control characters: another machine wrote it."""
    return "".join(c if c.isprintable() else "?" for c in text)[:2000]
