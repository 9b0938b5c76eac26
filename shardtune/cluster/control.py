"""The connections between the agents, from their first hello to their last line.

A message is a JSON object on one line, with its HMAC behind it where JOIN_SECRET is set. Received
text is parsed, never executed. A message of another shape, or without a valid HMAC, ends the
connection.
"""

import asyncio
import contextlib
import hmac
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Annotated, Any, NoReturn

from pydantic import AfterValidator, BaseModel, Field, TypeAdapter

from shardtune.cluster.stuck import RankStatus
from shardtune.distributed.rank_record import Failure
from shardtune.errors import UserError, first_line
from shardtune.log import logger

Message = dict[str, Any]

LONGEST_BYTES = 32 << 20
SAY_EVERY_S = 5.0
_TICK_S = 1.0
_POLL_S = 0.2


class ConnectionLost(Exception):
    """The other end closed the connection, or is lost."""


class Stranger(ConnectionLost):
    """The other end is not a node of this run."""


class OtherSecret(Stranger):
    """Its message is not authentic."""


Host = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]


class NodeHello(BaseModel, frozen=True):
    """How a node introduces itself.

    `node` and `nodes` are None where its environment could not be read. `address` is where its
    connection comes from, `token` a random name, `code` a digest of its programs. `problems` are
    its own.
    """

    node: int | None = Field(ge=0, lt=100_000)
    nodes: int | None = Field(ge=1, lt=100_000)
    host: Host
    address: str
    token: str = ""
    code: str = Field(pattern="^[0-9a-f]{1,16}$")
    problems: list[str]

    @property
    def name(self) -> str:
        return f"node {'?' if self.node is None else self.node} ({self.host})"


def _one_of(*kinds: dict[str, Any]) -> Callable[[Message], Message]:
    """Return a function that reads a message, and accepts only these kinds' keys and types."""
    known = {frozenset(kind): {key: TypeAdapter(kind[key]) for key in kind} for kind in kinds}

    def read(message: Message) -> Message:
        types = known[frozenset(message)]
        return {key: types[key].validate_python(value) for key, value in message.items()}

    return read


def _require_lines(value: Message) -> Message:
    TypeAdapter(list[str]).validate_python(value.get("problems", []))
    return value


Value = Annotated[Message, AfterValidator(_require_lines)]
WELCOME = _one_of({"welcome": float, "host": Host})
OF_NODE_0 = _one_of(
    *({"alive": bool}, {"met": list[NodeHello]}, {"round": int, "values": list[Value]}),
    *({"problems": list[str], "code": int}, {"end": Failure}),
)
OF_OTHERS = _one_of(
    *({"alive": bool}, {"round": int, "value": Value}, {"attempt": int, "failure": Failure}),
    {"attempt": int, "status": list[RankStatus], "finished": bool},
)


class Peer:
    """The connection to another node. `hello` is set once that node has said it."""

    hello: NodeHello

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes = b""
    ) -> None:
        self._reader, self._writer, self._secret = reader, writer, secret
        self._nonce = self._their_nonce = ""
        self._num_sent = self._num_received = 0
        address = (writer.get_extra_info("peername") or "?")[0]
        self.address = str(address).removeprefix("::ffff:")
        self.silent_ticks = 0

    def send(self, message: Message) -> None:
        """Send without waiting. `receive` raises if the peer is lost."""
        if self._num_sent == 0:
            self._nonce = secrets.token_hex(16)
            message = message | {"nonce": self._nonce}
        body = json.dumps(message, default=vars).encode()
        self._writer.write(body + self._mac(self._nonce, self._their_nonce, self._num_sent, body))
        self._writer.write(b"\n")
        self._num_sent += 1

    async def receive(self, read: Callable[[Message], Message]) -> Message:
        """Return what `read` makes of the next message. Raises ConnectionLost."""
        try:
            if not (line := await self._reader.readline()):
                raise ConnectionLost("it closed the connection")
            body, tab, digest = line.rstrip(b"\n").partition(b"\t")
            message = {**json.loads(body)}  # raises a TypeError unless it is an object
            if self._num_received == 0:
                self._their_nonce = message.pop("nonce", "")
            received = read(message)
        except OSError as error:
            raise ConnectionLost(first_line(error)) from error
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise Stranger("it sends something else than messages") from error
        mac = self._mac(self._their_nonce, self._nonce, self._num_received, body)
        if not hmac.compare_digest(mac, tab + digest):
            secret = "another JOIN_SECRET than" if digest else "no JOIN_SECRET, unlike"
            secret = secret if self._secret else "a JOIN_SECRET, unlike"
            raise OtherSecret(f"it has {secret} this node")
        self._num_received += 1
        return received

    def _mac(self, sender: str, receiver: str, number: int, body: bytes) -> bytes:
        """Sign the message with both ends' random texts and its number: a copy is not valid."""
        signed = json.dumps([sender, receiver, number]).encode() + body
        mac = hmac.new(self._secret, signed, "sha256").hexdigest()
        return b"\t" + mac.encode() if self._secret else b""

    def read_hello(self, message: Message) -> Message:
        self.hello = NodeHello(**message | {"address": self.address})
        return message

    def close(self) -> None:
        self._writer.close()


class Control:
    """This node's connections: node 0's to all other nodes, another node's to node 0.

    Every node says once a second that it lives. A connection on which nothing has come for
    `silent_s` is lost. `clock_ahead_s` is how far this node's clock is ahead of node 0's.
    """

    def __init__(self, me: NodeHello, secret: bytes = b"") -> None:
        self.me, self.secret = me, secret
        self.nodes: list[NodeHello] = [me]
        self.peers: list[Peer] = []
        self.silent_s = 20.0
        self.clock_ahead_s = 0.0
        self._queue: asyncio.Queue[tuple[int, Message]] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self.dropped: dict[tuple[str, str], Stranger] = {}
        self._round = 0
        self._spawn(self._beat())

    @property
    def node(self) -> int:
        return self.me.node or 0

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def add(self, peer: Peer) -> None:
        self.peers.append(peer)
        self._spawn(self._listen(peer))

    def tell(self, message: Message) -> None:
        for peer in self.peers:
            peer.send(message)

    def report(self, message: Message) -> None:
        """Send to node 0, which may be this one."""
        if self.node == 0:
            self._queue.put_nowait((0, message))
        else:
            self.tell(message)

    async def next(self, timeout_s: float) -> tuple[int, Message] | None:
        """Return the next message with its node's number, or None after this time.

        A node's last message is `{"lost": why}`.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                return await self._queue.get()
        return None

    async def next_of_launch(self, what: str) -> tuple[int, Message] | None:
        """Return the next message while this node waits for `what`, or None after a moment.

        Raises UserError.
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
                message = await peer.receive(OF_OTHERS if peer.hello.node else OF_NODE_0)
                peer.silent_ticks = 0
                if message != {"alive": True}:
                    self._queue.put_nowait((peer.hello.node or 0, message))
        except ConnectionLost as lost:
            self.lose(peer, lost)

    def drop(self, peer: Peer, why: object) -> None:
        """Close a connection. If it was a stranger's, warn once for each address and cause."""
        peer.close()
        if isinstance(why, Stranger) and (peer.address, str(why)) not in self.dropped:
            self.dropped[peer.address, str(why)] = why
            node = peer.hello.node if hasattr(peer, "hello") else None
            claim = "" if node is None else f", as node {node},"
            warn(f"the connection with {peer.address}{claim} is dropped: {why}")

    def lose(self, peer: Peer, why: object) -> None:
        if peer in self.peers:
            self.peers.remove(peer)
            self.drop(peer, why)
            message = {"lost": str(why), "name": peer.hello.name}
            self._queue.put_nowait((peer.hello.node or 0, message))

    async def _beat(self) -> None:
        """Count ticks, not time: after a stop of this process no other node looks silent."""
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
        """Return every node's value in the order of the nodes, on every node. Raises UserError."""
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
    logger.warning(printable(line))


def printable(text: str) -> str:
    """Return one line without control characters: another machine wrote it."""
    return "".join(c if c.isprintable() else "?" for c in text)[:2000]
