"""Another node than 0 looks for node 0, says what it sees, and finds out why it does not see it."""

from __future__ import annotations

import contextlib
import errno
import time
from dataclasses import dataclass, replace
from typing import NoReturn

from shardtune.cluster.control import ConnectionLost, Link, Message, NodeHello, connect
from shardtune.cluster.doors import side_port
from shardtune.cluster.meeting import SAY_EVERY_S, SILENT_S, Meeting
from shardtune.cluster.network import is_up
from shardtune.cluster.reception import TELLING_S
from shardtune.cluster.voice import Voice
from shardtune.errors import UserError

_KNOCK_EVERY_S = 1.0
_KNOCK_TIMEOUT_S = 4.0  # Linux needs 3 to find out that an address of its own network is nobody's
_SIDE_DOOR_TIMEOUT_S = 2.0
# How long each sight may last before it is taken for what will not change; `refused` may: node 0 starts later.
_SILENT_S = 30.0
_NO_ROUTE_S = 3.0
_STRANGER_S = 10.0
_REFUSED_BY_ITSELF_S = 45.0
_ASK_SIDE_DOOR_EVERY_S = 10.0  # while the master port refuses, as it does before node 0 is started
_UP_PORTS = (22, 1, 80, 443)
_UP_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class ConnectResult:
    """What a knock met instead of node 0: `refused`, `silent`, `no route` or `stranger`, and in words."""

    kind: str
    words: str


@dataclass(frozen=True)
class Welcome:
    """Node 0's answer, what it has sent behind it, and how far this clock is ahead of its."""

    link: Link
    port: int
    host: str
    behind: list[Message]
    clock_ahead_s: float
    clock_error_s: float


def knock(
    me: NodeHello, ip: str, port: int, timeout_s: float = _KNOCK_TIMEOUT_S
) -> Welcome | ConnectResult:
    """Say hello at an address once."""
    at = f"{ip}:{port}"
    try:
        link = connect(ip, port, timeout_s)
    except ConnectionRefusedError:
        return ConnectResult(
            "refused",
            f"{at} refuses: that machine is up, and no node 0 listens there (not yet, or it has ended)",
        )
    except TimeoutError:
        return ConnectResult("silent", f"{at} does not answer (timed out)")
    except OSError as error:
        kind = "no route" if error.errno == errno.ENETUNREACH else "silent"
        return ConnectResult(kind, f"{at} cannot be reached ({error.strerror})")
    sent = time.time()
    try:
        link.send(me.hello())
        welcome, *behind = link.receive(timeout_s)
        came = time.time()
        if not isinstance(welcome.get("welcome"), float):
            raise ConnectionLost("no welcome")
        ahead_s = (sent + came) / 2 - welcome["welcome"]
        return Welcome(link, port, str(welcome.get("host")), behind, ahead_s, (came - sent) / 2)
    except (ConnectionLost, TimeoutError):
        link.close()
        return ConnectResult(
            "stranger", f"something answers at {at} that is not the preflight of node 0"
        )


class Knocking:
    """`me` with its problems, and where it looks for node 0: `master` is how lines call `ip`.

    `is_own` if that is an address of this very machine.
    """

    def __init__(
        self,
        me: NodeHello,
        master: str,
        ip: str,
        port: int,
        is_own: bool,
        patience_s: float,
        voice: Voice,
    ) -> None:
        self._me, self._master, self._ip, self._port, self._is_own = me, master, ip, port, is_own
        self._patience_s = min(patience_s, TELLING_S) if me.problems else patience_s
        self._voice = voice
        self._started = time.monotonic()

    def meet(self) -> Meeting:
        """Return when every node is with node 0.

        Raises:
            UserError: node 0 was not found, or it refuses.
        """
        welcome = self._find()
        if not self._me.problems:
            self._voice.say(
                f"{self._me.name} has found node 0 ({welcome.host}) at {self._ip}:{welcome.port}"
            )
        link, messages = welcome.link, welcome.behind
        limit = self._started + self._patience_s + TELLING_S
        try:
            while True:
                for message in messages:
                    if isinstance(message.get("problems"), list):
                        self._voice.report(map(str, message["problems"]))
                        raise UserError(*self._voice.problems)
                    if isinstance(message.get("met"), list):
                        members = [
                            NodeHello.of(hello, str(hello.get("address")))
                            for hello in message["met"]
                        ]
                        assert self._me.node is not None
                        ahead = (welcome.clock_ahead_s, welcome.clock_error_s)
                        return Meeting(
                            self._me.node, members, {0: link}, self._voice.say, None, *ahead
                        )
                    if "missing" in message:
                        self._voice.say(f"with node 0, {message['missing']}")
                messages = link.receive(min(limit - time.monotonic(), SILENT_S))
        except ConnectionLost as gone:
            self._refuse(
                f"node 0 ({welcome.host}) ended while {self._me.name} was waiting with it ({gone}) - see its log, and "
                "start every node again"
            )
        except TimeoutError:
            if time.monotonic() < limit:
                self._refuse(
                    f"node 0 ({welcome.host}) has said nothing for {SILENT_S:.0f} s, its preflight is stopped or its "
                    "machine hangs - see its log, and start every node again"
                )
            self._refuse(
                f"node 0 ({welcome.host}) still waits for other nodes after {self._patience_s:.0f} s - see its log"
            )

    def _find(self) -> Welcome:
        seen_kind, seen_since, said = "", self._started, ("", 0.0)
        asked_side = self._started
        while True:
            now = time.monotonic()
            sight = knock(self._me, self._ip, self._port)
            if isinstance(sight, Welcome):
                return sight
            if sight.kind != seen_kind:
                seen_kind, seen_since = sight.kind, now
            if sight.words != said[0] or now >= said[1] + SAY_EVERY_S:
                said = (sight.words, now)
                self._voice.say(f"{self._me.name} looks for node 0: {sight.words}")
            lasted_s = time.monotonic() - seen_since
            is_late = time.monotonic() >= self._started + self._patience_s
            may_last_s = {
                "silent": _SILENT_S,
                "no route": _NO_ROUTE_S,
                "stranger": _STRANGER_S,
            }.get(sight.kind, _REFUSED_BY_ITSELF_S if self._is_own else self._patience_s)
            is_over = is_late or lasted_s >= may_last_s
            if (
                is_over
                or sight.kind != "refused"
                or time.monotonic() >= asked_side + _ASK_SIDE_DOOR_EVERY_S
            ):
                asked_side = time.monotonic()
                if welcome := self._ask_side_door(sight):
                    return welcome
            if is_over:
                self._refuse(self._verdict(sight, lasted_s))
            time.sleep(max(0.0, now + _KNOCK_EVERY_S - time.monotonic()))

    def _ask_side_door(self, sight: ConnectResult) -> Welcome | None:
        """Node 0 by its other port, told that the right one does not work from here; None where that is not so."""
        side = side_port(self._port)
        if not is_up(self._ip, [side], _SIDE_DOOR_TIMEOUT_S):
            return None
        again = knock(self._me, self._ip, self._port)
        if isinstance(again, Welcome):  # it has just begun to listen
            return again
        if sight.kind == "stranger":  # then node 0 knows by whom its port is taken
            return self._problems_at(side)
        problem = (
            f"port {self._port} of node 0 is blocked on the way from {self._me.name}: {sight.words}, while node 0 "
            f"answers at its port {side} - open port {self._port}, and all others between the nodes, in the firewall"
        )
        found = knock(replace(self._me, problems=(*self._me.problems, problem)), self._ip, side)
        return found if isinstance(found, Welcome) else None

    def _problems_at(self, side: int) -> Welcome | None:
        found = knock(self._me, self._ip, side)
        if not isinstance(found, Welcome):
            return None
        with contextlib.suppress(ConnectionLost, TimeoutError):
            behind = found.behind or found.link.receive(_KNOCK_TIMEOUT_S)
            if "problems" in behind[0]:
                return replace(found, behind=behind)
        found.link.close()
        return None

    def _verdict(self, sight: ConnectResult, lasted_s: float) -> str:
        at, me = f"{self._ip}:{self._port}", self._me.name
        if sight.kind == "stranger":
            return (
                f"{sight.words}, seen from {me} - a run that has started (was node 0 started with NNODES=1?), a node 0 "
                "with another MASTER_PORT, a stale process of the last run or another program holds that port: end it, "
                "or set another MASTER_PORT on every node"
            )
        if sight.kind == "no route":
            return (
                f"no route to MASTER_ADDR {self._master} from {me} (`ip route get {self._ip}` there) - correct it, "
                f"or give {me} an address in node 0's network or a route into it"
            )
        if sight.kind == "refused" and self._is_own:
            return (
                f"MASTER_ADDR {self._master} is an address of {me} itself and no node 0 listens at {at} - set "
                "MASTER_ADDR to node 0's address, or start node 0 on this machine first"
            )
        if sight.kind == "refused":
            return (
                f"no node 0 came to {at} within {self._patience_s:.0f} s, {self._ip} refuses connections to {me} - "
                f"start launch_node0.sh there, with the same MASTER_PORT (if it has ended, its log says why), and "
                f"check that MASTER_ADDR {self._master} is node 0's address and that no firewall rejects it"
            )
        if open_port := is_up(self._ip, _UP_PORTS, _UP_TIMEOUT_S):
            return (
                f"port {self._port} of {self._master} is blocked: from {me}, {sight.words}, for {lasted_s:.0f} s, "
                f"while port {open_port} of that machine answers - open it, and all others between the nodes, in the "
                "firewall"
            )
        return (
            f"no machine answers at MASTER_ADDR {self._master} from {me}, neither on port {self._port} for "
            f"{lasted_s:.0f} s nor on others ({sight.words}) - check MASTER_ADDR, node 0, network and firewall"
        )

    def _refuse(self, problem: str) -> NoReturn:
        self._voice.report([problem] if not self._me.problems else [])
        raise UserError(*self._voice.problems)
