"""The connections between the agents, from their first hello to their last line.

A message is a JSON object on one line. Received text is parsed, never executed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Coroutine
from typing import Any, NoReturn

from pydantic import BaseModel

from shardtune.errors import UserError, first_line
from shardtune.log import logger

Message = dict[str, Any]

LONGEST_BYTES = 32 << 20
SAY_EVERY_S = 5.0
_TICK_S = 1.0
_POLL_S = 0.2


class ConnectionLost(Exception):
    """The other end closed the connection, is lost, or sends something else than messages."""


class NodeHello(BaseModel, frozen=True):
    """How a node introduces itself.

    `node` and `nodes` are None where its environment could not be read. `address` is where its
    connection comes from, `token` a random name, `code` a digest of its programs. `problems` are
    its own.
    """

    node: int | None
    nodes: int | None
    host: str
    address: str
    token: str = ""
    code: str
    problems: list[str]

    @property
    def name(self) -> str:
        return f"node {'?' if self.node is None else self.node} ({self.host})"


class Peer:
    """The connection to another node. `hello` is set once that node has said it."""

    hello: NodeHello

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        address = (writer.get_extra_info("peername") or "?")[0]
        self.address = str(address).removeprefix("::ffff:")
        self.silent_ticks = 0

    def send(self, message: Message) -> None:
        """Send without waiting. Whoever receives from a peer learns that it is lost."""
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def receive(self) -> Message:
        """Raises ConnectionLost."""
        try:
            line = await self._reader.readline()
        except (OSError, ValueError) as error:  # a ValueError: no end of a line within the limit
            raise ConnectionLost(first_line(error)) from error
        if not line:
            raise ConnectionLost("it closed the connection")
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(message := json.loads(line), dict):
                return message
        raise ConnectionLost("it sends something else than messages")

    def close(self) -> None:
        self._writer.close()


class Control:
    """This node's connections: node 0's to all other nodes, another node's to node 0.

    Every node says once a second that it lives. A connection on which nothing has come for
    `silent_s` is lost. `clock_ahead_s` is how far this node's clock is ahead of node 0's.
    """

    def __init__(self, me: NodeHello, silent_s: float = 20.0) -> None:
        self.me = me
        self.nodes: list[NodeHello] = [me]
        self.peers: list[Peer] = []
        self.silent_s = silent_s
        self.clock_ahead_s = 0.0
        self._queue: asyncio.Queue[tuple[int, Message]] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._round = 0
        self._spawn(self._beat())

    @property
    def node(self) -> int:
        return self.me.node or 0

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine until it ends or the launch does."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def add(self, peer: Peer) -> None:
        self.peers.append(peer)
        self._spawn(self._listen(peer))

    def tell(self, message: Message) -> None:
        """Send to all peers."""
        for peer in self.peers:
            peer.send(message)

    def report(self, message: Message) -> None:
        """Send to node 0, which may be this one."""
        if self.node == 0:
            self._queue.put_nowait((0, message))
        else:
            self.tell(message)

    async def next(self, timeout_s: float) -> tuple[int, Message] | None:
        """Return the next message, behind the node that sent it, or None after this time.

        `{"lost": why}` is the last one of a node.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                return await self._queue.get()
        return None

    async def next_of_launch(self, what: str) -> tuple[int, Message] | None:
        """Return the next message while this node waits for `what`, or None after a moment.

        Raises:
            UserError: another node refuses the launch, or is lost.
        """
        received = await self.next(_POLL_S)
        message = received[1] if received else {}
        if "problems" in message:
            raise UserError(*message["problems"])
        if "lost" in message:
            line = f"{message['name']} went away ({message['lost']}, {what})"
            raise UserError(f"{line} - see its log, and start every node again")
        return received

    async def _listen(self, peer: Peer) -> None:
        try:
            while True:
                message = await peer.receive()
                peer.silent_ticks = 0
                if message != {"alive": True}:
                    self._queue.put_nowait((peer.hello.node or 0, message))
        except ConnectionLost as lost:
            self.lose(peer, str(lost))

    def lose(self, peer: Peer, why: str) -> None:
        if peer in self.peers:
            self.peers.remove(peer)
            peer.close()
            self._queue.put_nowait((peer.hello.node or 0, {"lost": why, "name": peer.hello.name}))

    async def _beat(self) -> None:
        """Count ticks, not time: a process that was stopped itself then accuses nobody."""
        while True:
            await asyncio.sleep(_TICK_S)
            for peer in self.peers[:]:
                peer.send({"alive": True})
                peer.silent_ticks += 1
                if peer.silent_ticks * _TICK_S > self.silent_s:
                    self.lose(peer, f"no sign of life for {self.silent_s:.0f} s")

    async def gather(
        self, what: str, value: Message | Awaitable[Message], timeout_s: float
    ) -> list[Message]:
        """Return every node's value in the order of the nodes, on every node.

        Raises:
            UserError: on every node, with the `problems` that a value names, or because a node
                is lost or late.
        """
        self._round += 1
        self._spawn(self._hand_in(value, self._round))
        values: dict[int, Message] = {}
        deadline = time.monotonic() + timeout_s
        next_word = time.monotonic() + SAY_EVERY_S
        while len(values) < len(self.nodes):
            late = ", ".join(node.name for node in self.nodes if node.node not in values)
            if self.node == 0 and time.monotonic() >= deadline:
                self._refuse([f"{late} is late with {what} - see its log"])
            if time.monotonic() >= next_word:
                next_word += SAY_EVERY_S
                say(f"waiting for {late if self.node == 0 else 'all nodes'}: {what}")
            received = await self.next_of_launch(what)
            if received is None or received[1].get("round") != self._round:
                continue
            node, message = received
            if "values" in message:
                return message["values"]
            values[node] = message["value"]
            if problems := values[node].get("problems"):
                self._refuse(problems)
        in_order = [values[node] for node in range(len(self.nodes))]
        self.tell({"round": self._round, "values": in_order})
        return in_order

    async def _hand_in(self, value: Message | Awaitable[Message], number: int) -> None:
        if not isinstance(value, dict):
            value = await value
        self.report({"round": number, "value": value})

    def _refuse(self, problems: list[str]) -> NoReturn:
        """Raise UserError here and on every other node."""
        self.tell(refusal(problems))
        raise UserError(*problems)


def refusal(problems: list[str]) -> Message:
    """Return the message that ends a launch. Agents of other versions understand it, too."""
    return {"problems": problems, "code": 2}


def say(line: str) -> None:
    logger.info(f"Preflight: {printable(line)}")


def warn(line: str) -> None:
    logger.info(f"Warning: {printable(line)}")


def printable(text: str) -> str:
    """Return one line without control characters: another machine wrote it."""
    return "".join(c if c.isprintable() else "?" for c in text)[:2000]
