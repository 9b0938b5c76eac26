"""Node 0 waits for the others, and every node that comes learns why there will be no run, if there will be none."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from shardtune.cluster.control import ConnectionLost, Link, NodeHello, readable
from shardtune.cluster.doors import Doors
from shardtune.cluster.environment import DEFAULTS
from shardtune.cluster.meeting import SAY_EVERY_S, Meeting
from shardtune.cluster.voice import Voice
from shardtune.errors import UserError

# A node that cannot go on stays so long to tell the others.
TELLING_S = 40.0


class Reception:
    """`me` is node 0 with its own problems; `ask` looks whether another master is there, and returns its problems.

    `address` and `port` are where the others must look for it.
    """

    def __init__(
        self,
        me: NodeHello,
        address: str,
        port: int,
        doors: Doors,
        patience_s: float,
        voice: Voice,
        ask: Callable[[], list[str]] | None,
    ) -> None:
        self._me = me
        self._there = f"MASTER_ADDR={address} MASTER_PORT={port}"
        if me.nodes not in (None, int(DEFAULTS["NNODES"])):
            self._there += f" NNODES={me.nodes}"
        self._test = f"nc -vz {address} {port}"
        self._doors = doors
        self._patience_s = patience_s
        self._voice = voice
        self._ask = ask
        self._guests: list[tuple[NodeHello, Link]] = []
        self._have_left: dict[int | None, str] = {}

    def wait_for_all(self) -> Meeting:
        """Return when every node is there.

        Raises:
            UserError: one has a problem, they contradict each other, or not all came in time; who came has been told.
        """
        deadline = time.monotonic() + self._patience_s
        next_word = time.monotonic()
        while not self._voice.problems:
            missing = self._missing()
            if not missing:
                return self._met()
            if time.monotonic() >= deadline:
                self._voice.report([self._nobody_came(missing)])
            elif time.monotonic() >= next_word:
                next_word += SAY_EVERY_S
                self._say_missing(missing, deadline)
            self._turn(min(deadline, next_word))
        self._tell_everyone(until=min(deadline, time.monotonic() + TELLING_S))
        raise UserError(*self._voice.problems)

    def _met(self) -> Meeting:
        in_order = sorted(self._guests, key=lambda guest: guest[0].node or 0)
        members = [self._me, *(member for member, _ in in_order)]
        told = [{**member.hello(), "address": member.address} for member in members]
        meeting = Meeting(
            0,
            members,
            dict(enumerate((link for _, link in in_order), 1)),
            self._voice.say,
            self._doors,
        )
        meeting.send_to_all({"met": told})
        return meeting

    def _missing(self) -> list[int]:
        present = {member.node for member, _ in self._guests}
        return [node for node in range(1, self._me.nodes or 0) if node not in present]

    def _say_missing(self, missing: list[int], deadline: float) -> None:
        came = "".join(f", {member.name} has come" for member, _ in self._guests)
        left = "".join(
            f", {name} has left again" for node, name in self._have_left.items() if node in missing
        )
        left_s = deadline - time.monotonic()
        line = f"waiting for node {_named(missing)} of {self._me.nodes}, {left_s:.0f} s more{came}{left}"
        line += f" (launch {self._how(missing)}; the way can be tested there: {self._test})"
        self._voice.say(line)
        for member, link in self._guests[:]:
            try:
                link.send({"missing": line})
            except ConnectionLost:
                self._lose(member, link)

    def _nobody_came(self, missing: list[int]) -> str:
        left = "".join(
            f", {name} had left again" for node, name in self._have_left.items() if node in missing
        )
        return (
            f"node {_named(missing)} of {self._me.nodes} did not come to node 0 within {self._patience_s:.0f} s{left} "
            f"- start launch_node1.sh on {self._how(missing)}; if it runs, its own log says what it sees, and "
            f"`{self._test}` there, while node 0 waits, whether a firewall is in the way"
        )

    def _how(self, missing: list[int]) -> str:
        """What launch_node1.sh must be told there, where that is not its default."""
        if len(missing) > 1:
            return f"each with {self._there} and its own NODE_RANK"
        return f"it with {self._there}{f' NODE_RANK={missing[0]}' if missing != [1] else ''}"

    def _turn(self, until: float) -> None:
        """What happens until then, or the first thing that does."""
        links = [link for _, link in self._guests]
        ready = readable([*links, *self._doors.sources()], until - time.monotonic())
        for member, link in self._guests[:]:
            if link in ready:
                try:
                    self._voice.report(
                        p
                        for message in link.messages()
                        for p in map(str, message.get("problems", ()))
                    )
                except ConnectionLost:
                    self._lose(member, link)
        for member, link in self._doors.arrivals(ready):
            self._voice.report(self._contradictions(member))
            self._guests.append((member, link))

    def _lose(self, member: NodeHello, link: Link) -> None:
        self._guests.remove((member, link))
        self._have_left[member.node] = member.name
        self._voice.say(f"{member.name} has left again")
        link.close()

    def _contradictions(self, new: NodeHello) -> list[str]:
        problems = list(new.problems)
        if new.preflight != self._me.preflight:
            problems.append(
                f"the code differs: distTest has digest {self._me.preflight} on {self._me.name} and {new.preflight} on "
                f"{new.name} - bring every node to the same commit, without changes of its own"
            )
        if new.nodes is not None and self._me.nodes not in (None, new.nodes):
            problems.append(
                f"NNODES is {self._me.nodes} on {self._me.name} and {new.nodes} on {new.name} - "
                "start every node with the same NNODES"
            )
        problems += [
            f"two nodes call themselves node {new.node}: {other.host} ({other.address}) and {new.host} ({new.address}) "
            "- give each its own NODE_RANK (launch_node0.sh sets 0, launch_node1.sh 1)"
            for other in (self._me, *(member for member, _ in self._guests))
            if new.node is not None and other.node == new.node
        ]
        return problems

    def _tell_everyone(self, until: float) -> None:
        """Stay until as many nodes as there should be have come and been told, or until then."""
        left_s = until - time.monotonic()
        if self._me.nodes != 1 and not self._guests and left_s > 1:
            self._voice.say(
                f"staying for {left_s:.0f} s to tell the other nodes that there will be no run"
            )
        n_told, most = 0, self._me.nodes or 2
        next_question = time.monotonic()
        while True:
            if self._ask and time.monotonic() >= next_question:
                next_question = time.monotonic() + SAY_EVERY_S
                if heard := self._ask():  # the master tells the others
                    self._voice.report(heard)
                    return
            for member, link in self._guests:
                most = max(most, member.nodes or 0)
                with contextlib.suppress(ConnectionLost):
                    link.send({"problems": self._voice.problems})
                link.close()
                n_told += 1
            self._guests = []
            if n_told >= most - 1 or time.monotonic() >= until:
                return
            self._turn(min(until, time.monotonic() + SAY_EVERY_S))


def _named(nodes: list[int]) -> str:
    return ", ".join(map(str, nodes[:8])) + (
        f" and {len(nodes) - 8} more" if len(nodes) > 8 else ""
    )
