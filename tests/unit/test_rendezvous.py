"""How agents find one another and stay connected, in one process over real sockets of loopback."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
from helpers.commands import a_free_port
from helpers.documented import require_error_line

from shardtune.cluster import connectivity, control, network, rendezvous
from shardtune.cluster.control import Control, LaunchEnded, NodeHello, Peer, connect, serve
from shardtune.cluster.environment import Environment, read_environment
from shardtune.cluster.rendezvous import ConnectResult, Listener, Welcome, meet, say_hello

LOOPBACK = {"MASTER_ADDR": "127.0.0.1", "NCCL_SOCKET_IFNAME": "lo", "GPUS_PER_NODE": "2"}
NODES = [
    NodeHello(node, 2, f"host{node}", "127.0.0.1", 29600, str(node), "digest") for node in range(2)
]


def node(number: int, port: str, nodes: int = 2, **changes: Any) -> Environment:
    """A node of this machine whose own problems are those named in `changes`, or none."""
    values = LOOPBACK | {"MASTER_PORT": port, "NODE_RANK": str(number), "NNODES": str(nodes)}
    return replace(
        read_environment(values, []), **{"problems": (), "join_timeout_s": 20.0} | changes
    )


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


async def refusal(work: Awaitable[object]) -> str:
    """The last line of a node that does this."""
    with pytest.raises(LaunchEnded) as ended:
        await work
    assert ended.value.code == 2
    line = f"ERROR: {ended.value.lines[-1]}"
    require_error_line(line)
    return line


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines that nodes print while they meet, each of them at once."""
    shown: list[str] = []
    for module in (control, rendezvous):
        monkeypatch.setattr(module, "say", shown.append)
        monkeypatch.setattr(module, "SAY_EVERY_S", 0.05)
    return shown


# Nodes that look for each other.


def test_three_nodes_meet() -> None:
    async def test() -> None:
        port = a_free_port()
        met = await asyncio.gather(*(meet(node(n, port, nodes=3), "code") for n in (2, 0, 1)))
        for met_control, _ in met:
            assert [hello.node for hello in met_control.nodes] == [0, 1, 2]
            assert abs(met_control.clock_ahead_s) < 1
        values = await asyncio.gather(
            *(each.gather("a number", {"of": each.node}, 9) for each, _ in met)
        )
        assert values == [[{"of": 0}, {"of": 1}, {"of": 2}]] * 3

    run(test())


@pytest.mark.parametrize(
    ("sick", "worker", "words"),
    [
        (0, {"problems": ()}, "node 0 ({host}): no disk - buy one"),
        (1, {"problems": ("no disk - buy one",)}, "node 1 ({host}): no disk - buy one"),
        (None, {"node": 0}, "two nodes call themselves node 0: {host} (127.0.0.1) and "),
        (None, {"nodes": 3}, "NNODES is 2 on node 0 ({host}) and 3 on node 1 ({host}) - start"),
    ],
)
def test_a_problem_of_one_node_ends_both_at_once(
    sick: int | None, worker: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_TELL_S", 1.0)

    async def test() -> None:
        port, started = a_free_port(), time.monotonic()
        first = node(0, port, problems=("no disk - buy one",) if sick == 0 else ())
        number, nodes = worker.get("node", 1), worker.get("nodes", 2)
        second = node(1, port, nodes, problems=worker.get("problems", ()))
        # A second node 0 that owns the address would listen: it is another machine.
        second = replace(second, node=number, owns_master=number != 0)
        ends = (refusal(meet(each, "code")) for each in (first, second))
        for line in await asyncio.gather(*ends):
            assert line.startswith("ERROR: " + words.format(host=socket.gethostname()))
        assert time.monotonic() - started < 5

    run(test())


def test_programs_that_differ_are_refused() -> None:
    async def test() -> None:
        port = a_free_port()
        ends = (refusal(meet(node(n, port), f"digest{n}")) for n in range(2))
        for line in await asyncio.gather(*ends):
            assert "the code differs: shardtune/cluster has digest digest0 on node 0" in line

    run(test())


def test_a_problem_of_node_0_gives_the_prompt_back_within_5_s() -> None:
    """It stays only to tell nodes that come."""

    async def test() -> None:
        started = time.monotonic()
        line = await refusal(meet(node(0, a_free_port(), problems=("no disk - buy one",)), "code"))
        assert "no disk" in line and time.monotonic() - started < 5

    run(test())


def test_both_nodes_say_likely_causes_and_go_on_waiting(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have different ports."""
    assert rendezvous._LIKELY_CAUSES_AFTER_S < 60
    monkeypatch.setattr(rendezvous, "_LIKELY_CAUSES_AFTER_S", 0.5)
    monkeypatch.setattr(rendezvous, "_TRY_EVERY_S", 0.1)
    monkeypatch.setattr(rendezvous, "_TELL_S", 0.1)

    async def test() -> None:
        ports = [a_free_port(), a_free_port()]
        ends = (refusal(meet(node(n, ports[n], join_timeout_s=1.0), "code")) for n in range(2))
        first, second = await asyncio.gather(*ends)
        assert "node 1 of 2 did not come to node 0 within 1 s" in first
        assert f"no node 0 came to 127.0.0.1:{ports[1]} within 1 s" in second

    run(test())
    for likely in ("it is not started, it has another MASTER", "launch_node0.sh is not started"):
        first = next(
            number for number, line in enumerate(lines) if "Likely by now: " + likely in line
        )
        assert any("Likely by now" not in line for line in lines[:first])


@pytest.mark.parametrize(
    ("nodes", "came", "how"),
    [
        (2, [], "it with MASTER_ADDR=node0 MASTER_PORT={port}"),
        (3, [2], "it with MASTER_ADDR=node0 MASTER_PORT={port} NNODES=3"),
        (3, [1], "it with MASTER_ADDR=node0 MASTER_PORT={port} NNODES=3 NODE_RANK=2"),
        (4, [1], "each with MASTER_ADDR=node0 MASTER_PORT={port} NNODES=4 and its own NODE_RANK"),
    ],
)
def test_node_0_says_how_to_launch_a_missing_node(
    nodes: int, came: list[int], how: str, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_TELL_S", 0.0)
    port = a_free_port()
    how = how.format(port=port)

    async def test() -> None:
        first = node(0, port, nodes, master="node0", join_timeout_s=0.5)
        waiting = asyncio.create_task(refusal(meet(first, "code")))
        await asyncio.sleep(0.1)
        present = replace(NODES[1], nodes=nodes, port=int(port), code="code")
        welcomes = [await say_hello(replace(present, node=n), "127.0.0.1", int(port)) for n in came]
        assert all(isinstance(welcome, Welcome) for welcome in welcomes)
        assert f" - start launch_node1.sh on {how}; if it runs" in await waiting
        assert f" (launch {how}; the way can be tested there: nc -vz node0 {port})" in lines[-2]

    run(test())


def test_a_node_may_leave_and_come_again_but_not_twice(lines: list[str]) -> None:
    async def test() -> None:
        port = a_free_port()
        waiting = asyncio.create_task(refusal(meet(node(0, port, nodes=3), "code")))
        await asyncio.sleep(0.1)
        second = replace(NODES[1], nodes=3, port=int(port), code="code")
        first_time = await say_hello(second, "127.0.0.1", int(port))
        assert isinstance(first_time, Welcome)
        first_time.peer.close()
        while not any("has left again" in line for line in lines):
            await asyncio.sleep(0.05)
        again = [await say_hello(second, "127.0.0.1", int(port)) for _ in range(2)]
        line = await waiting
        assert "two nodes call themselves node 1: host1 (127.0.0.1) and host1" in line
        for welcome in again:
            assert isinstance(welcome, Welcome)
            message = {}
            while "problems" not in message:
                message = await welcome.peer.receive()
            assert message["problems"] == [line.removeprefix("ERROR: ")]

    run(test())


def test_a_third_node_hears_too_that_two_were_expected() -> None:
    async def test() -> None:
        port = a_free_port()
        environments = [node(0, port), node(1, port, nodes=3), node(2, port, nodes=3)]
        ends = [asyncio.create_task(refusal(meet(environments[n], "code"))) for n in (0, 1)]
        await asyncio.sleep(1)
        ends.append(asyncio.create_task(refusal(meet(environments[2], "code"))))
        for line in await asyncio.gather(*ends):
            assert "NNODES is 2 on node 0" in line

    run(test())


def test_a_hello_of_an_older_version_is_read() -> None:
    """Its programs differ, and that is what it is told."""
    older = {"hello": control.PROTOCOL, "node": 1, "nodes": 2, "host": "older", "problems": []}
    hello = NodeHello.parse(older, "127.0.0.1")
    assert (hello.name, hello.port) == ("node 1 (older)", None)


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n", b'13\n{"hello": []}', b"[" * 99_999])
def test_strangers_at_the_master_port_are_let_go(noise: bytes) -> None:
    async def test() -> None:
        listener, port = Listener(NODES[0]), int(a_free_port())
        await listener.open(port)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionError):
            writer.write(noise)
            assert await asyncio.wait_for(reader.read(), 5) == b""
        assert isinstance(await say_hello(NODES[1], "127.0.0.1", port), Welcome)
        other_run = replace(NODES[1], port=29_700)
        result = await say_hello(other_run, "127.0.0.1", port)
        assert isinstance(result, ConnectResult) and result.kind == "stranger"

    run(test())


@pytest.mark.parametrize(
    ("met", "late", "words"),
    [
        (
            2,
            NODES[1],
            "two nodes call themselves node 1: host1 (127.0.0.1), which is in the run, and late (",
        ),
        (
            2,
            replace(NODES[1], node=2, nodes=3),
            "node 0 (host0) was started with NNODES=2 and has met them all already",
        ),
        (1, NODES[1], "NNODES is 1 on node 0 (host0) and 2 on node 1 (late)"),
    ],
)
def test_a_node_that_comes_when_all_have_met_is_refused(
    met: int, late: NodeHello, words: str
) -> None:
    """Node 0 goes on, unless it took itself for the only one."""

    async def test() -> None:
        listener, port, first = Listener(NODES[0]), int(a_free_port()), Control(NODES[0])
        first.nodes = NODES[:met]
        await listener.open(port)
        first.spawn(listener.turn_away(first))
        welcome = await say_hello(replace(late, host="late", token="late"), "127.0.0.1", port)
        assert isinstance(welcome, Welcome)
        (problem,) = (await welcome.peer.receive())["problems"]
        assert problem.startswith(words)
        require_error_line(f"ERROR: {problem}")
        if met == 2:
            assert await first.next(0.2) is None
        else:
            never: asyncio.Future[dict[str, Any]] = asyncio.Future()
            assert words in await refusal(first.gather("a fact", never, 9))

    run(test())


def test_a_worker_gives_up_when_node_0_waits_longer_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, "_TELL_S", 0.1)
    monkeypatch.setattr(rendezvous, "_HELLO_TIMEOUT_S", 0.5)

    async def test() -> None:
        port = a_free_port()
        first = asyncio.create_task(refusal(meet(node(0, port, 3, join_timeout_s=2.0), "code")))
        await asyncio.sleep(0.1)
        line = await refusal(meet(node(1, port, 3, join_timeout_s=0.3), "code"))
        assert "still waits for other nodes after 0 s - see its log" in line
        assert "node 2 of 3 did not come to node 0 within 2 s" in await first

    run(test())


@pytest.mark.parametrize(
    ("result", "is_own", "open_port", "words"),
    [
        (
            "stranger",
            False,
            None,
            "a run that has started (was node 0 started with NNODES=1?), a node 0",
        ),
        ("no route", False, None, "no route to MASTER_ADDR 127.0.0.1 from node 1 ("),
        ("refused", True, None, "MASTER_ADDR 127.0.0.1 is an address of node 1 ("),
        (
            "refused",
            False,
            None,
            "no node 0 came to 127.0.0.1:{port} within 20 s, 127.0.0.1 refuses",
        ),
        ("silent", False, 22, "port {port} of 127.0.0.1 is blocked: from node 1 ("),
        ("silent", False, None, "no machine answers at MASTER_ADDR 127.0.0.1 from node 1 ("),
    ],
)
def test_why_a_worker_does_not_find_node_0(
    result: str, is_own: bool, open_port: int | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(*_: object) -> ConnectResult:
        return ConnectResult(result, "it answered so")

    monkeypatch.setattr(rendezvous, "say_hello", answer)
    monkeypatch.setattr(network, "is_up", lambda *_: open_port)
    for name in ("_SILENT_S", "_NO_ROUTE_S", "_STRANGER_S", "_REFUSED_BY_ITSELF_S"):
        monkeypatch.setattr(rendezvous, name, 0.0)
    if result == "refused" and not is_own:  # it may start later
        monkeypatch.setattr(rendezvous, "_Search", _impatient(rendezvous._Search))
    port = a_free_port()
    own = {"interface": "eth0", "owns_master": True} if is_own else {"owns_master": False}
    run(_expect(meet(node(1, port, **own), "code"), words.format(port=port)))


def _impatient(search: type[Any]) -> Callable[..., Any]:
    def make(*arguments: Any) -> Any:
        made = search(*arguments)
        made._started -= 20
        return made

    return make


async def _expect(work: Awaitable[object], words: str) -> None:
    assert words in await refusal(work)


def test_a_port_of_node_0_that_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_TELL_S", 0.1)
    with network.listen(0) as taken:
        port = str(taken.getsockname()[1])
        for nodes in (1, 2):
            words = f"is taken by process {os.getpid()} (`"
            run(_expect(meet(node(0, port, nodes), "code"), words))

    def refuse(port: int) -> socket.socket:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(network, "listen", refuse)
    run(_expect(meet(node(0, "80"), "code"), "is not open: Permission denied - "))


def test_one_node_alone_listens_only_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """MASTER_PORT is set, or the default is used, which need not be free."""

    async def test() -> None:
        with network.listen(0) as taken:
            port = taken.getsockname()[1]
            alone = replace(node(0, str(port), nodes=1), store_port=int(a_free_port()))
            met, _ = await meet(alone, "code")
            assert met.nodes == [met.me]
        met, listener = await meet(alone, "code")
        line = await refusal(meet(replace(node(1, str(port))), "code"))
        assert "NNODES is 1 on node 0 (" in line
        message = await met.next(1)
        assert message is not None and message[1] == {"problems": [line.removeprefix("ERROR: ")]}
        assert listener is not None
        listener.close()

    run(test())


# Nodes that have met.


@contextlib.asynccontextmanager
async def two_that_have_met() -> AsyncIterator[tuple[Control, Control]]:
    arrivals: asyncio.Queue[Peer] = asyncio.Queue()
    listener = network.listen(0, "127.0.0.1")
    server = await serve(listener, arrivals.put)
    to_first = await connect("127.0.0.1", listener.getsockname()[1], 5)
    to_second = await arrivals.get()
    controls = Control(NODES[0]), Control(NODES[1])
    for each, peer, hello in zip(controls, (to_second, to_first), NODES[::-1], strict=True):
        peer.trust(hello)
        each.nodes = NODES
        each.add(peer)
    yield controls
    server.close()


def test_a_node_that_is_late_is_named() -> None:
    """It names itself by name too, and while it waits says that it waits for itself."""

    async def test() -> None:
        async with two_that_have_met() as (first, _):
            line = await refusal(first.gather("a look at run.dir", {}, 0.1))
        assert line == "ERROR: node 1 (host1) is late with a look at run.dir - see its log"

    run(test())


def test_a_node_does_not_call_itself_as_if_it_were_another(lines: list[str]) -> None:
    async def test() -> None:
        async with two_that_have_met() as (_, second):
            never: asyncio.Future[dict[str, Any]] = asyncio.Future()
            line = await refusal(second.gather("the facts", never, 0.3))
        assert lines[0] == "waiting for this node: the facts"
        assert line == "ERROR: node 1 (host1) is late with the facts - see its log"

    run(test())


def test_a_node_that_goes_away_is_named() -> None:
    async def test() -> None:
        async with two_that_have_met() as (first, second):
            second.drop(second.peers[0])
            line = await refusal(first.gather("the measurements", {}, 9))
        assert line.startswith("ERROR: node 1 (host1) went away (it closed the connection, the me")

    run(test())


def test_a_node_that_falls_silent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_TICK_S", 0.1)

    async def test() -> None:
        async with two_that_have_met() as (first, second):
            first.silent_s = 0.5
            await asyncio.sleep(1)
            assert first.peers  # it says that it lives
            for task in second._tasks:
                task.cancel()
            line = await refusal(first.gather("the measurements", {}, 9))
        assert "node 1 (host1) went away (no sign of life for 0 s, " in line

    run(test())


@pytest.mark.parametrize(
    ("answered", "words"),
    [
        (None, "cannot reach node 1 (host1) at port {port} of 127.0.0.1 (Connection refused): por"),
        (0, "connects to node 1 (host1) at port {port} of 127.0.0.1, and 64 bytes do not come "),
        (1, "small messages pass between node 0 (host0) and node 1 (host1), large ones do not: "),
        (2, "connects to node 1 (host1) at port {port} of 127.0.0.1, and 1048576 bytes do not "),
    ],
)
def test_trouble_on_the_way_to_another_node(
    answered: int | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sends back only so many messages. The other node hears of it too."""
    monkeypatch.setattr(connectivity, "_TIMEOUT_S", 0.5)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for size in connectivity._SIZES[:answered]:
            writer.write(await reader.readexactly(size))
        await reader.read(-1)
        writer.close()

    async def test() -> None:
        async with two_that_have_met() as (first, second):
            other = await asyncio.start_server(answer, "127.0.0.1", 0)
            port = other.sockets[0].getsockname()[1]
            if answered is None:
                other.close()
            trying = refusal(connectivity.require_paths(first, node(0, "29600")))
            line = asyncio.create_task(trying)
            await second.gather("", {"ip": "127.0.0.1", "port": port, "mtu": "lo 1500"}, 9)
            assert await refusal(second.gather("", {}, 9)) == await line
            assert words.format(port=port) in await line

    run(test())


def test_the_way_between_two_nodes_is_tried_with_real_messages() -> None:
    async def test() -> None:
        async with two_that_have_met() as controls:
            await asyncio.gather(
                *(
                    connectivity.require_paths(each, node(number, "29600"))
                    for number, each in enumerate(controls)
                )
            )

    run(test())


def test_messages_longer_than_a_hello_pass_only_between_nodes_that_have_met() -> None:
    text = "x" * random.randrange(100_000, 200_000)

    async def test() -> None:
        async with two_that_have_met() as (first, second):
            values = await asyncio.gather(
                *(each.gather("a text", {"text": text}, 9) for each in (first, second))
            )
        assert values == [[{"text": text}] * 2] * 2

    run(test())
