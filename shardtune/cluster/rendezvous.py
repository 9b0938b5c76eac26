"""How the agents find one another: node 0 listens at the master port, the others look for it there.

A node with a problem of its own tells it to the others, if it meets them within seconds.
"""

import asyncio
import errno
import math
import os
import re
import secrets
import socket
import time

from shardtune.cluster import network
from shardtune.cluster.control import (
    LONGEST_BYTES,
    OF_OTHERS,
    SAY_EVERY_S,
    WELCOME,
    ConnectionLost,
    Control,
    NodeHello,
    OtherSecret,
    Peer,
    Stranger,
    refusal,
    say,
)
from shardtune.cluster.environment import Environment
from shardtune.errors import UserError, first_few

_HELLO_TIMEOUT_S = 10.0
# A node with a problem waits so long for other nodes, to tell them.
_TELL_S = 3.0
# A node names the likely causes after so long a wait for the others.
_LIKELY_CAUSES_AFTER_S = 40.0
_TRY_EVERY_S = 0.5
_CONNECT_TIMEOUT_S = 4.0  # Linux needs 3 to learn that no machine has an address of its network
# A worker gives up when its attempts have met the same obstacle for so long. Node 0 may start
# later.
_GIVE_UP_AFTER_S = {"refused": math.inf, "itself": 45.0, "silent": 30.0, "stranger": 10.0}


async def meet(environment: Environment, code: str) -> Control:
    """Meet the other nodes. `code` is a digest of the programs that meet. Raises UserError."""
    problems = [
        problem if environment.is_alone else f"{environment.name}: {problem}"
        for problem in environment.problems
    ]
    is_listener = environment.node == 0 and (environment.owns_master or not environment.master_ip)
    nobody_can_hear = environment.port is None or environment.is_alone
    if problems and (nobody_can_hear or not (is_listener or environment.master_ip)):
        raise UserError(*problems)
    me = NodeHello(
        node=environment.node,
        nodes=environment.nodes,
        host=re.sub(r"[^A-Za-z0-9._-]", "_", socket.gethostname())[:64] or "unnamed",
        address=environment.local_ip or "?",
        token=secrets.token_hex(8),
        code=code,
        problems=problems,
    )
    control = Control(me, secret=environment.secret)
    if is_listener and not environment.is_alone:
        await _Reception(environment, control).wait_for_all()
    elif not is_listener:
        await _find_node_0(environment, control)
    return control


class _Reception:
    """Node 0 waits for the others, with one task for each connection."""

    def __init__(self, environment: Environment, control: Control) -> None:
        self._environment, self._control, self._me = environment, control, control.me
        self._problems = list(control.me.problems)
        self._num_came = 0

    async def wait_for_all(self) -> None:
        """Fill `control` with all nodes. Raises UserError, which the nodes that came hear too."""
        port = self._environment.port
        assert port is not None
        try:
            listener = socket.create_server(("", port))
        except OSError as error:
            by = f"not open: {error.strerror}"
            if error.errno == errno.EADDRINUSE:
                by = f"taken by {network.port_holder(port)}"
            problem = (
                f"port {port} of {self._me.name} is {by} - end that (a stale process of the last "
                "run?), or set another MASTER_PORT on every node"
            )
            raise UserError(*self._problems, problem) from error
        server = await asyncio.start_server(self._greet, sock=listener, limit=LONGEST_BYTES)
        await self._wait()
        server.close()
        if self._problems:
            raise UserError(*self._problems)
        peers = sorted(self._control.peers, key=lambda peer: peer.hello.node or 0)
        self._control.nodes = [self._me, *(peer.hello for peer in peers)]
        self._control.tell({"met": self._control.nodes})

    async def _wait(self) -> None:
        """Return when all nodes have come, or when nodes that came know this node's problems."""
        master, port = self._environment.master, self._environment.port
        patience_s = self._environment.join_timeout_s
        started = next_word = time.monotonic()
        while not self._problems:
            now = time.monotonic()
            came = {peer.hello.node for peer in self._control.peers}
            missing = [node for node in range(1, self._me.nodes or 2) if node not in came]
            if not missing:
                return
            who = f"node {first_few(missing, 8)} of {self._me.nodes}"
            where = f"MASTER_ADDR={master} MASTER_PORT={port} NNODES={self._me.nodes}"
            start = f"start it with `{where} NODE_RANK={missing[0]} ./launch_node1.sh`"
            if now >= started + patience_s:
                remedy = (
                    f"{start}; if it runs, its own log says what it sees, and `nc -vz {master} "
                    f"{port}` there, while node 0 waits, whether a firewall is in the way"
                )
                for (address, why), error in self._control.dropped.items():
                    if isinstance(error, OtherSecret):
                        remedy = f"{address} came, and {why}: set one JOIN_SECRET on every node"
                self._problems.append(
                    f"{who} did not come to node 0 within {patience_s:.0f} s - {remedy}"
                )
            elif now >= next_word:
                next_word = now + SAY_EVERY_S
                say(
                    f"waiting for {who}, {started + patience_s - now:.0f} s more ({start}; the way "
                    f"can be tested there: nc -vz {master} {port}){_likely_causes(started)}"
                )
            await self._control.next(0.1)
        self._control.tell(refusal(self._problems))
        deadline = time.monotonic() + _TELL_S
        while self._num_came < (self._me.nodes or 2) - 1 and time.monotonic() < deadline:
            await self._control.next(0.1)

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take in a node, and let go of anybody else, such as a port scan."""
        me, control, peer = self._me, self._control, Peer(reader, writer, self._control.secret)
        try:
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                try:
                    await peer.receive(peer.read_hello)
                finally:
                    if hasattr(peer, "hello"):  # a node with another JOIN_SECRET learns of it
                        peer.send({"welcome": time.time(), "host": me.host})
                await peer.receive(OF_OTHERS)  # a replayed hello would get no further
            hello = peer.hello
            is_out = hello.node is not None and hello.node >= (me.nodes or math.inf)
            if is_out or (hello.node is None and not hello.problems):
                what = f"NODE_RANK is {hello.node} and NNODES {me.nodes} on {me.name}"
                peer.send(refusal(hello.problems or [f"{what} - correct one of the two"]))
                raise Stranger(f"it is none of the {me.nodes} nodes")
            if len(control.nodes) > 1:
                raise ConnectionLost("all have met in the meantime")
        except (ConnectionLost, TimeoutError, asyncio.CancelledError) as error:
            is_silent = isinstance(error, TimeoutError)
            control.drop(peer, Stranger("it sends no message") if is_silent else error)
            return
        if hello.code != me.code:  # the last line does not quote a stranger
            peer.hello = hello.model_copy(update={"host": peer.address, "problems": []})
        self._problems += self._contradictions(peer.hello)
        if self._problems:
            peer.send(refusal([*hello.problems, *self._problems]))
        self._num_came += 1
        control.add(peer)

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


class NotFound(Exception):
    """An attempt met something other than node 0: a key of _GIVE_UP_AFTER_S, and a description."""

    def __init__(self, kind: str, words: str) -> None:
        self.kind = kind
        super().__init__(words)


async def say_hello(control: Control, ip: str, port: int) -> None:
    """Try once to meet node 0 at an address. Raises NotFound."""
    at = f"{ip}:{port}"
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            streams = await asyncio.open_connection(ip, port, limit=LONGEST_BYTES)
    except ConnectionRefusedError as error:
        words = f"{at} refuses: that machine is up, and no node 0 listens there"
        raise NotFound("refused", words) from error
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else "timed out"
        raise NotFound("silent", f"{at} does not answer ({reason})") from error
    peer, sent = Peer(*streams, control.secret), time.time()
    try:
        peer.send(vars(control.me))
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            message = await peer.receive(WELCOME)
        came = time.time()
    except (ConnectionLost, TimeoutError) as error:
        peer.close()
        if isinstance(error, OtherSecret):
            raise NotFound("secret", f"node 0 answers at {at}: {error}") from error
        words = f"something answers at {at} that is not the preflight of node 0"
        raise NotFound("stranger", words) from error
    peer.hello = control.me.model_copy(update={"node": 0, "host": message["host"], "address": ip})
    control.clock_ahead_s = (sent + came) / 2 - message["welcome"]
    peer.send({"alive": True})
    control.add(peer)


async def _find_node_0(environment: Environment, control: Control) -> None:
    """Fill `control` when every node is with node 0. Raises UserError."""
    me, ip, port = control.me, environment.master_ip, environment.port
    assert ip is not None and port is not None
    patience_s = environment.join_timeout_s
    if me.problems:
        patience_s = min(patience_s, _TELL_S)
    started = kind_since = time.monotonic()
    next_word, last_kind = started, ""
    while not control.peers:
        now = time.monotonic()
        try:
            await say_hello(control, ip, port)
        except NotFound as result:
            kind = result.kind
            if kind == "refused" and environment.owns_master and environment.interface != "lo":
                kind = "itself"
            if kind != last_kind:
                last_kind, kind_since, next_word = kind, now, now
            if now >= next_word:
                next_word = now + SAY_EVERY_S
                say(f"{me.name} looks for node 0: {result}{_likely_causes(started)}")
            lasted_s, waited_s = time.monotonic() - kind_since, time.monotonic() - started
            if lasted_s >= _GIVE_UP_AFTER_S.get(kind, 0.0) or waited_s >= patience_s:
                problem = _why_not_found(kind, str(result), lasted_s, environment)
                raise UserError(*(me.problems or [problem])) from result
            await asyncio.sleep(max(0.0, now + _TRY_EVERY_S - time.monotonic()))
    if not me.problems:
        say(f"{me.name} has found {control.peers[0].hello.name} at {ip}:{port}")
    message = None
    while message is None or "met" not in message[1]:
        message = await control.next_of_launch("waiting for all nodes")
    control.nodes = message[1]["met"]


def _why_not_found(kind: str, words: str, lasted_s: float, environment: Environment) -> str:
    me, master, port = environment.name, environment.master_named, environment.port
    if kind == "secret":
        return f"{words}, {me} - set the same JOIN_SECRET on every node, or on none"
    if kind == "stranger":
        return (
            f"{words}, seen from {me} - a run that has started (was node 0 started with "
            "NNODES=1?), a node 0 with another MASTER_PORT, a stale process of the last run or "
            "another program holds that port: end it, or set another MASTER_PORT on every node"
        )
    if kind == "itself":
        return (
            f"MASTER_ADDR {master} is an address of {me} itself and no node 0 listens at port "
            f"{port} - set MASTER_ADDR to node 0's address, or start node 0 on this machine first"
        )
    if kind == "refused":
        return (
            f"no node 0 came to {environment.master_ip}:{port} within {lasted_s:.0f} s, "
            f"{environment.master_ip} refuses connections to {me} - start launch_node0.sh there, "
            "with the same MASTER_PORT (if it has ended, its log says why), and check that "
            f"MASTER_ADDR {master} is node 0's address and that no firewall rejects it"
        )
    return (
        f"nothing answers at MASTER_ADDR {master} from {me} for {lasted_s:.0f} s ({words}) - "
        f"check that this is node 0's address and that its machine is up (`ping {master}`); if it "
        f"is, port {port} is blocked: open it, and all others between the nodes, in the firewall"
    )


def _likely_causes(started: float) -> str:
    if time.monotonic() - started < _LIKELY_CAUSES_AFTER_S:
        return ""
    return (
        ". Likely by now: the other node is not started or has ended (its log says why), it has "
        "another MASTER_ADDR or MASTER_PORT, or a firewall is in the way"
    )
