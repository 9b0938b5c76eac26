"""Nodes that have met: node 0 holds a connection to each other node, and what one refuses is refused by all."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn

from shardtune.cluster.children import Child
from shardtune.cluster.control import ConnectionLost, Link, Message, NodeHello, readable
from shardtune.cluster.doors import Doors
from shardtune.errors import UserError

SAY_EVERY_S = 5.0
# After one node's refusal node 0 waits so long for those of others, and another node so long for node 0's word.
_MORE_PROBLEMS_S = 1.0
_VERDICT_S = 10.0
SILENT_S = 20.0  # a node says that it lives every SAY_EVERY_S, whatever it does


class Meeting:
    """One node's side of it. `links` are node 0's to every other node, or another's to node 0.

    `clock_ahead_s` is how far this node's clock is ahead of node 0's, give or take `clock_error_s`.
    """

    def __init__(
        self,
        node: int,
        members: list[NodeHello],
        links: Mapping[int, Link],
        say: Callable[[str], None],
        doors: Doors | None = None,
        clock_ahead_s: float = 0.0,
        clock_error_s: float = 0.0,
    ) -> None:
        self.node = node
        self.members = members
        self.clock_ahead_s, self.clock_error_s = clock_ahead_s, clock_error_s
        self._say = say
        self._links = dict(links)
        self._doors = doors
        self._round = 0

    def gather(self, what: str, own: Message | Child, timeout_s: float) -> list[Message]:
        """Every node's value, in the order of their ranks, on every node; a Child's is the one that it reports.

        Raises:
            UserError: on every node, with the `problems` that a value names, or because a node is lost or late.
        """
        self._round += 1
        values: dict[int, Message] = {}
        if isinstance(own, dict):
            self._hand_in(own, values)
        elif own.has_unread:
            self._hand_in(own.result() or {}, values)
        deadline = time.monotonic() + timeout_s
        next_word = time.monotonic() + SAY_EVERY_S
        heard = dict.fromkeys(self._links, time.monotonic())
        is_refused = False
        while len(values) < len(self.members) or is_refused:
            if time.monotonic() >= deadline or (is_refused and len(values) == len(self.members)):
                self.refuse(
                    _problems(values)
                    or [
                        f"{self._awaited(values, self.members[self.node].name)} is late with {what} - see its log"
                    ]
                )
            if time.monotonic() >= next_word:
                next_word += SAY_EVERY_S
                self._say(f"waiting for {self._awaited(values, own_name='this node')}: {what}")
                for node in list(self._links):
                    self._send(node, {"alive": True})
            for node in [node for node, at in heard.items() if time.monotonic() - at > SILENT_S]:
                self._lose(
                    node,
                    f"no sign of life for {SILENT_S:.0f} s, it is stopped, its machine hangs or the network is down",
                )
            for node, message in self._receive(own, values, min(deadline, next_word), what):
                if node in heard:
                    heard[node] = time.monotonic()
                if node == self.node:
                    self._hand_in(message, values)
                elif isinstance(message.get("problems"), list):
                    self.refuse(map(str, message["problems"]))
                elif message.get("round") == self._round and isinstance(message.get("value"), dict):
                    values[node] = message["value"]
                elif message.get("round") == self._round and isinstance(
                    message.get("values"), list
                ):
                    values = dict(enumerate(message["values"]))
            if not is_refused and _problems(values):
                is_refused = True
                deadline = min(
                    deadline,
                    time.monotonic() + (_MORE_PROBLEMS_S if self.node == 0 else _VERDICT_S),
                )
        in_order = [values[node] for node in range(len(self.members))]
        if self.node == 0:
            self.send_to_all({"round": self._round, "values": in_order})
        return in_order

    def send_to_all(self, message: Message) -> None:
        """Raises Refused where a node is lost."""
        for node in list(self._links):
            self._send(node, message)

    def be_quiet(self) -> None:
        """Do not say any more whom this node waits for."""
        self._say = lambda line: None

    def close_doors(self) -> None:
        """Free the port; the connections stay."""
        if self._doors:
            self._doors.close()
            self._doors = None

    def refuse(self, problems: Iterable[str]) -> NoReturn:
        """Raise Refused here, and on every node that still listens."""
        unique = list(dict.fromkeys(problems))
        for link in self._links.values():
            with contextlib.suppress(ConnectionLost):
                link.send({"problems": unique})
        raise UserError(*unique)

    def _receive(
        self, own: Message | Child, values: dict[int, Message], until: float, what: str
    ) -> list[tuple[int, Message]]:
        """What has come from other nodes and from this one's own child, by the rank of the node."""
        child = own if isinstance(own, Child) and self.node not in values else None
        at_doors = self._doors.sources() if self._doors else []
        sources = [*self._links.values(), *at_doors, *([child] if child else [])]
        ready = readable(sources, until - time.monotonic())
        if self._doors:
            for member, link in self._doors.arrivals(ready):
                self._turn_away(member, link)
        received = []
        for node, link in list(self._links.items()):
            if link in ready:
                try:
                    received += [(node, message) for message in link.messages()]
                except ConnectionLost as gone:
                    self._lose(node, f"{gone}, {what}")
        if child in ready and child and (message := child.result()) is not None:
            received.append((self.node, message))
        return received

    def _turn_away(self, late: NodeHello, link: Link) -> None:
        """Have it refuse; and this node too, if it took itself for the only one."""
        me, nodes = self.members[0].name, len(self.members)
        is_forgotten = nodes == 1 and late.nodes not in (None, 1)
        if is_forgotten:
            problem = f"NNODES is {nodes} on {me} and {late.nodes} on {late.name} - start every node with the same NNODES"
        elif late.nodes == nodes and late.node is not None and late.node < nodes:
            known = self.members[late.node]
            problem = (
                f"two nodes call themselves node {late.node}: {known.host} ({known.address}), which is in the run, "
                f"and {late.host} ({late.address}) - give each its own NODE_RANK"
            )
        else:
            problem = (
                f"{me} was started with NNODES={nodes} and has met them all already - start every node with the same "
                "NNODES, or end that run first"
            )
        with contextlib.suppress(ConnectionLost):
            link.send({"problems": [problem]})
        link.close()
        if is_forgotten:
            self.refuse([problem])

    def _hand_in(self, value: Message, values: dict[int, Message]) -> None:
        values[self.node] = value
        if self.node != 0:
            self._send(0, {"round": self._round, "value": value})

    def _send(self, node: int, message: Message) -> None:
        try:
            self._links[node].send(message)
        except ConnectionLost as gone:
            self._lose(node, str(gone))

    def _lose(self, node: int, why: str) -> NoReturn:
        link = self._links.pop(node)
        with contextlib.suppress(
            ConnectionLost
        ):  # its last words, if it has not been read to the end
            while readable([link], 0):
                for message in link.messages():
                    if isinstance(message.get("problems"), list):
                        self.refuse(map(str, message["problems"]))
        self.refuse(
            [
                f"{self.members[node].name} went away ({why}) - see its log, and start every node again"
            ]
        )

    def _awaited(self, values: dict[int, Message], own_name: str) -> str:
        """Whom this node waits for."""
        if self.node != 0:
            return self.members[0].name if self.node in values else own_name
        missing = [node for node in range(len(self.members)) if node not in values]
        return ", ".join(
            own_name if node == self.node else self.members[node].name for node in missing
        )


def _problems(values: Mapping[int, Message]) -> list[str]:
    return [problem for node in sorted(values) for problem in values[node].get("problems") or ()]
