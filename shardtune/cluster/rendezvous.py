"""How the agents find one another: node 0 listens at the master port, the others look for it there.

A node with a problem of its own tells it to the others, if it meets them within seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import socket
import time
from dataclasses import dataclass, replace
from typing import NoReturn

from shardtune.cluster import network
from shardtune.cluster.control import (
    SAY_EVERY_S,
    ConnectionLost,
    Control,
    LaunchEnded,
    Message,
    NodeHello,
    Peer,
    connect,
    say,
    serve,
)
from shardtune.cluster.environment import DEFAULTS, Environment
from shardtune.errors import first_few

_HELLO_TIMEOUT_S = 10.0
_MOST_STRANGERS = 64
# A node with a problem of its own waits so long for others to tell them.
_TELL_S = 3.0
# A node names the likely causes after so long a wait for the others.
_LIKELY_CAUSES_AFTER_S = 40.0
_TRY_EVERY_S = 0.5
_CONNECT_TIMEOUT_S = 4.0  # Linux needs 3 to learn that no machine has an address of its network
# A worker gives up after each result of a connection has lasted so long. `refused` has no limit:
# node 0 may start later.
_SILENT_S = 30.0
_NO_ROUTE_S = 3.0
_STRANGER_S = 10.0
_REFUSED_BY_ITSELF_S = 45.0
_UP_PORTS = (22, 1, 80, 443)
_UP_TIMEOUT_S = 3.0


async def meet(environment: Environment, code: str) -> tuple[Control, Listener | None]:
    """Meet the other nodes. `code` is a digest of the programs that meet.

    Node 0 keeps its listener, so that a node that comes too late is turned away.

    Raises:
        LaunchEnded: not all nodes came in time, they contradict one another, or one has a problem.
    """
    problems = tuple(
        problem if environment.is_alone else f"{environment.name}: {problem}"
        for problem in environment.problems
    )
    me = NodeHello(
        node=environment.node,
        nodes=environment.nodes,
        host=socket.gethostname(),
        address=environment.local_ip or "?",
        port=environment.port,
        token=secrets.token_hex(8),
        code=code,
        problems=problems,
    )
    if environment.port is None or (problems and environment.is_alone):
        raise LaunchEnded(2, problems)
    control = Control(me)
    if environment.node == 0 and (environment.owns_master or environment.master_ip is None):
        listener = Listener(me)
        meeting = _Reception(environment, control, listener)
        try:
            await meeting.wait_for_all()
        except LaunchEnded:
            listener.close()
            raise
        control.spawn(listener.turn_away(control))
        return control, listener
    if environment.master_ip is None:
        raise LaunchEnded(2, problems)
    await _Search(environment, control).find_and_wait()
    return control, None


class Listener:
    """Listens at node 0's master port. Whatever says no hello, such as a port scan, is let go."""

    def __init__(self, me: NodeHello) -> None:
        self.arrivals: asyncio.Queue[Peer] = asyncio.Queue()
        self._me, self._strangers = me, 0
        self._server: asyncio.Server | None = None

    async def open(self, port: int) -> None:
        """Raises OSError."""
        self._server = await serve(network.listen(port), self._greet)

    async def _greet(self, peer: Peer) -> None:
        self._strangers += 1
        try:
            if self._strangers > _MOST_STRANGERS:
                raise ConnectionLost("too many at once")
            message = await asyncio.wait_for(peer.receive(), _HELLO_TIMEOUT_S)
            hello = NodeHello.parse(message, peer.address)
            if hello.port not in (None, self._me.port) or hello.token == self._me.token:
                raise ConnectionLost("it looks for another run, or is this node itself")
            await peer.send({"welcome": time.time(), "host": self._me.host})
        except (ConnectionLost, TimeoutError):
            peer.close()
            return
        finally:
            self._strangers -= 1
        peer.trust(hello)
        self.arrivals.put_nowait(peer)

    async def turn_away(self, control: Control) -> None:
        """Refuse nodes that come too late; this one too, if it takes itself for the only one."""
        while True:
            late = await self.arrivals.get()
            problem, is_forgotten = _why_too_late(control.nodes, late.hello)
            with contextlib.suppress(ConnectionLost):
                await late.send({"problems": [problem]})
            late.close()
            if is_forgotten:
                control.put({"problems": [problem]})

    def close(self) -> None:
        """Free the port; connections stay."""
        if self._server is not None:
            self._server.close()
            self._server = None


def _why_too_late(nodes: list[NodeHello], late: NodeHello) -> tuple[str, bool]:
    me, size = nodes[0].name, len(nodes)
    if size == 1 and late.nodes not in (None, 1):
        return (
            f"NNODES is 1 on {me} and {late.nodes} on {late.name} - "
            "start every node with the same NNODES",
            True,
        )
    if late.nodes == size and late.node is not None and late.node < size:
        known = nodes[late.node]
        return (
            f"two nodes call themselves node {late.node}: {known.host} ({known.address}), which is "
            f"in the run, and {late.host} ({late.address}) - give each its own NODE_RANK",
            False,
        )
    return (
        f"{me} was started with NNODES={size} and has met them all already - start every node with "
        "the same NNODES, or end that run first",
        False,
    )


class _Reception:
    """Node 0 waits for the others."""

    def __init__(self, environment: Environment, control: Control, listener: Listener) -> None:
        self._environment, self._control, self._listener = environment, control, listener
        self._me = control.me
        self._problems = list(self._me.problems)
        self._has_left: dict[int | None, str] = {}
        self._started = time.monotonic()

    async def wait_for_all(self) -> None:
        """Fill `control` with all nodes.

        Raises:
            LaunchEnded: a node has a problem, nodes contradict one another, or not all came in
                time; the nodes that came hear it.
        """
        await self._open()
        self._control.spawn(self._admit())
        deadline = self._started + self._environment.join_timeout_s
        next_word = self._started
        while not self._problems:
            now = time.monotonic()
            missing = self._missing()
            if not missing:
                return await self._begin()
            if now >= deadline:
                self._problems.append(self._nobody_came(missing))
            elif now >= next_word:
                next_word = now + SAY_EVERY_S
                await self._say_missing(missing, deadline - now)
            self._take(await self._control.next(min(deadline, next_word) - now))
        await self._tell_all()
        raise LaunchEnded(2, self._problems)

    async def _open(self) -> None:
        port = self._environment.port
        assert port is not None
        try:
            await self._listener.open(port)
        except OSError as error:
            if self._environment.store_port != port:  # alone, and MASTER_PORT is not asked for
                return
            by = f"not open: {error.strerror}"
            if error.errno == errno.EADDRINUSE:
                by = f"taken by {network.port_holder(port)}"
            self._problems.append(
                f"port {port} of {self._me.name} is {by} - end that (a stale process of the last "
                "run?), or set another MASTER_PORT on every node"
            )

    async def _admit(self) -> None:
        while self._missing() or self._problems:
            peer = await self._listener.arrivals.get()
            self._problems += self._contradictions(peer.hello)
            self._control.add(peer)
            self._control.put({"arrived": peer.name})

    def _take(self, received: tuple[Peer | None, Message] | None) -> None:
        if received is None:
            return
        peer, message = received
        if isinstance(message.get("problems"), list):
            self._problems += map(str, message["problems"])
        elif peer is not None and "lost" in message:
            self._has_left[peer.hello.node] = peer.name
            say(f"{peer.name} has left again")

    async def _begin(self) -> None:
        peers = sorted(self._control.peers, key=lambda peer: peer.hello.node or 0)
        nodes = [self._me, *(peer.hello for peer in peers)]
        self._control.nodes = nodes
        hellos = [{**node.message(), "address": node.address} for node in nodes]
        await self._control.tell({"met": hellos})

    def _missing(self) -> list[int]:
        present = {peer.hello.node for peer in self._control.peers}
        return [node for node in range(1, self._me.nodes or 0) if node not in present]

    async def _say_missing(self, missing: list[int], left_s: float) -> None:
        came = "".join(f", {peer.name} has come" for peer in self._control.peers)
        left = "".join(
            f", {name} has left again" for node, name in self._has_left.items() if node in missing
        )
        line = (
            f"waiting for {_named(missing)} of {self._me.nodes}, {left_s:.0f} s more{came}{left}"
            f" (launch {self._how(missing)}; the way can be tested there: {self._test})"
        )
        if time.monotonic() - self._started > _LIKELY_CAUSES_AFTER_S:
            line += (
                ". Likely by now: it is not started, it has another MASTER_ADDR or MASTER_PORT, or "
                f"a firewall is in the way. Node 0 listens at {self._address}"
            )
        say(line)
        await self._control.tell({"missing": line})

    def _nobody_came(self, missing: list[int]) -> str:
        left = "".join(
            f", {name} had left again" for node, name in self._has_left.items() if node in missing
        )
        return (
            f"{_named(missing)} of {self._me.nodes} did not come to node 0 within "
            f"{self._environment.join_timeout_s:.0f} s{left} - start launch_node1.sh on "
            f"{self._how(missing)}; if it runs, its own log says what it sees, and `{self._test}` "
            "there, while node 0 waits, whether a firewall is in the way"
        )

    @property
    def _address(self) -> str:
        return f"{self._environment.master}:{self._environment.port}"

    @property
    def _test(self) -> str:
        return f"nc -vz {self._environment.master} {self._environment.port}"

    def _how(self, missing: list[int]) -> str:
        """The variables that launch_node1.sh needs there, where they are not its defaults."""
        where = f"MASTER_ADDR={self._environment.master} MASTER_PORT={self._environment.port}"
        if self._me.nodes not in (None, int(DEFAULTS["NNODES"])):
            where += f" NNODES={self._me.nodes}"
        if len(missing) > 1:
            return f"each with {where} and its own NODE_RANK"
        return f"it with {where}{f' NODE_RANK={missing[0]}' if missing != [1] else ''}"

    def _contradictions(self, new: NodeHello) -> list[str]:
        me, problems = self._me, list(new.problems)
        if new.code != me.code:
            problems.append(
                f"the code differs: shardtune/cluster has digest {me.code} on {me.name} and "
                f"{new.code} on {new.name} - bring every node to the same commit, without changes "
                "of its own"
            )
        if new.nodes is not None and me.nodes not in (None, new.nodes):
            problems.append(
                f"NNODES is {me.nodes} on {me.name} and {new.nodes} on {new.name} - "
                "start every node with the same NNODES"
            )
        problems += [
            f"two nodes call themselves node {new.node}: {other.host} ({other.address}) and "
            f"{new.host} ({new.address}) - give each its own NODE_RANK (launch_node0.sh sets 0, "
            "launch_node1.sh 1)"
            for other in (me, *(peer.hello for peer in self._control.peers))
            if new.node is not None and other.node == new.node
        ]
        return problems

    async def _tell_all(self) -> None:
        """Tell the nodes that are here, and for some seconds those that come."""
        informed: set[Peer] = set()
        deadline = time.monotonic() + _TELL_S
        if not self._control.peers and self._me.nodes != 1:
            say(f"staying for {_TELL_S:.0f} s to tell the other nodes that there will be no run")
        while True:
            for peer in self._control.peers:
                if peer not in informed:
                    informed.add(peer)
                    with contextlib.suppress(ConnectionLost):
                        await peer.send({"problems": list(dict.fromkeys(self._problems))})
            expected = max([self._me.nodes or 2, *(p.hello.nodes or 0 for p in informed)])
            if len(informed) >= expected - 1 or time.monotonic() >= deadline:
                return
            self._take(await self._control.next(min(0.5, deadline - time.monotonic())))


@dataclass(frozen=True)
class ConnectResult:
    """What a connection met instead of node 0: `refused`, `silent`, `no route` or `stranger`."""

    kind: str
    words: str


@dataclass(frozen=True)
class Welcome:
    """Node 0's answer, and how far this clock is ahead of its."""

    peer: Peer
    host: str
    clock_ahead_s: float
    clock_error_s: float


async def say_hello(me: NodeHello, ip: str, port: int) -> Welcome | ConnectResult:
    """Try once to meet node 0 at an address."""
    at = f"{ip}:{port}"
    try:
        peer = await connect(ip, port, _CONNECT_TIMEOUT_S)
    except ConnectionRefusedError:
        return ConnectResult(
            "refused",
            f"{at} refuses: that machine is up, and no node 0 listens there (not yet, or it has "
            "ended)",
        )
    except TimeoutError:
        return ConnectResult("silent", f"{at} does not answer (timed out)")
    except OSError as error:
        kind = "no route" if error.errno == errno.ENETUNREACH else "silent"
        reason = os.strerror(error.errno) if error.errno else str(error)
        return ConnectResult(kind, f"{at} cannot be reached ({reason})")
    sent = time.time()
    try:
        await peer.send(me.message())
        welcome = await asyncio.wait_for(peer.receive(), _CONNECT_TIMEOUT_S)
        came = time.time()
        if not isinstance(welcome.get("welcome"), float):
            raise ConnectionLost("it does not welcome this node")
    except (ConnectionLost, TimeoutError):
        peer.close()
        return ConnectResult(
            "stranger", f"something answers at {at} that is not the preflight of node 0"
        )
    host = str(welcome.get("host"))
    peer.trust(replace(me, node=0, host=host, address=ip))
    ahead_s = (sent + came) / 2 - welcome["welcome"]
    return Welcome(peer, host, ahead_s, (came - sent) / 2)


class _Search:
    """Another node than 0 looks for node 0, and finds out why it does not find it."""

    def __init__(self, environment: Environment, control: Control) -> None:
        assert environment.master_ip is not None and environment.port is not None
        self._environment, self._control, self._me = environment, control, control.me
        self._ip, self._port = environment.master_ip, environment.port
        self._is_own = environment.owns_master and environment.interface != "lo"
        self._patience_s = environment.join_timeout_s
        if self._me.problems:
            self._patience_s = min(self._patience_s, _TELL_S)
        self._started = time.monotonic()

    async def find_and_wait(self) -> None:
        """Fill `control` when every node is with node 0.

        Raises:
            LaunchEnded: node 0 was not found, or it refuses.
        """
        welcome = await self._find()
        control, node0 = self._control, f"node 0 ({welcome.host})"
        if not self._me.problems:
            say(f"{self._me.name} has found {node0} at {self._ip}:{self._port}")
        control.add(welcome.peer)
        control.clock_ahead_s = welcome.clock_ahead_s
        control.clock_error_s = welcome.clock_error_s
        limit = self._started + self._patience_s + _TELL_S + _HELLO_TIMEOUT_S
        while True:
            received = await control.next(limit - time.monotonic())
            if received is None:
                self._end(
                    f"{node0} still waits for other nodes after {self._patience_s:.0f} s - "
                    "see its log"
                )
            _, message = received
            if isinstance(message.get("problems"), list):
                # The last line is node 0's.
                local = [p for p in self._me.problems if p not in message["problems"]]
                raise LaunchEnded(2, [*local, *map(str, message["problems"])])
            if "lost" in message and "no sign of life" in message["lost"]:
                self._end(
                    f"{node0} has said nothing for {control.silent_s:.0f} s, it is stopped or its "
                    "machine hangs - see its log, and start every node again"
                )
            if "lost" in message:
                self._end(
                    f"{node0} ended while {self._me.name} was waiting with it "
                    f"({message['lost']}) - see its log, and start every node again"
                )
            if isinstance(message.get("met"), list):
                control.nodes = [
                    NodeHello.parse(node, str(node.get("address"))) for node in message["met"]
                ]
                return
            if "missing" in message:
                say(f"with node 0, {message['missing']}")

    async def _find(self) -> Welcome:
        last_kind, last_words, kind_since, said_at = "", "", self._started, 0.0
        while True:
            now = time.monotonic()
            result = await say_hello(self._me, self._ip, self._port)
            if isinstance(result, Welcome):
                return result
            if result.kind != last_kind:
                last_kind, kind_since = result.kind, now
            if result.words != last_words or now >= said_at + SAY_EVERY_S:
                last_words, said_at = result.words, now
                likely = ""
                if now - self._started > _LIKELY_CAUSES_AFTER_S:
                    likely = f". Likely by now: {self._likely_cause}"
                say(f"{self._me.name} looks for node 0: {result.words}{likely}")
            lasted_s = time.monotonic() - kind_since
            may_last_s = {
                "silent": _SILENT_S,
                "no route": _NO_ROUTE_S,
                "stranger": _STRANGER_S,
            }.get(result.kind, _REFUSED_BY_ITSELF_S if self._is_own else self._patience_s)
            if time.monotonic() >= self._started + self._patience_s or lasted_s >= may_last_s:
                self._end(await asyncio.to_thread(self._verdict, result, lasted_s))
            await asyncio.sleep(max(0.0, now + _TRY_EVERY_S - time.monotonic()))

    @property
    def _likely_cause(self) -> str:
        return (
            f"launch_node0.sh is not started there or has ended (its log says why), or MASTER_ADDR "
            f"{self._environment.master_named} or MASTER_PORT {self._port} is not node 0's"
        )

    def _verdict(self, result: ConnectResult, lasted_s: float) -> str:
        at, me, master = f"{self._ip}:{self._port}", self._me.name, self._environment.master_named
        if result.kind == "stranger":
            return (
                f"{result.words}, seen from {me} - a run that has started (was node 0 started with "
                "NNODES=1?), a node 0 with another MASTER_PORT, a stale process of the last run or "
                "another program holds that port: end it, or set another MASTER_PORT on every node"
            )
        if result.kind == "no route":
            return (
                f"no route to MASTER_ADDR {master} from {me} (`ip route get {self._ip}` there) - "
                f"correct it, or give {me} an address in node 0's network or a route into it"
            )
        if result.kind == "refused" and self._is_own:
            return (
                f"MASTER_ADDR {master} is an address of {me} itself and no node 0 listens at {at} "
                "- set MASTER_ADDR to node 0's address, or start node 0 on this machine first"
            )
        if result.kind == "refused":
            return (
                f"no node 0 came to {at} within {self._patience_s:.0f} s, {self._ip} refuses "
                f"connections to {me} - start launch_node0.sh there, with the same MASTER_PORT (if "
                f"it has ended, its log says why), and check that MASTER_ADDR {master} is node 0's "
                "address and that no firewall rejects it"
            )
        if open_port := network.is_up(self._ip, _UP_PORTS, _UP_TIMEOUT_S):
            return (
                f"port {self._port} of {master} is blocked: from {me}, {result.words}, for "
                f"{lasted_s:.0f} s, while port {open_port} of that machine answers - open it, and "
                "all others between the nodes, in the firewall"
            )
        return (
            f"no machine answers at MASTER_ADDR {master} from {me}, neither on port {self._port} "
            f"for {lasted_s:.0f} s nor on others ({result.words}) - check MASTER_ADDR, node 0, "
            "network and firewall"
        )

    def _end(self, problem: str) -> NoReturn:
        """Raises LaunchEnded: with this problem, or with this node's own problems."""
        raise LaunchEnded(2, self._me.problems or [problem])


def _named(nodes: list[int]) -> str:
    return f"node{'s' if len(nodes) > 1 else ''} {first_few(nodes, 8)}"
