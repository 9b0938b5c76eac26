"""How agents find one another and stay connected, in one process over real sockets of loopback."""

import asyncio
import contextlib
import functools
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
from helpers.commands import a_free_port
from helpers.documented import require_error_line

from shardtune.cluster import control, preflight, rendezvous
from shardtune.cluster.control import Control, NodeHello, Peer
from shardtune.cluster.environment import Environment, read_environment
from shardtune.cluster.rendezvous import NotFound, meet, say_hello
from shardtune.errors import UserError

LOOPBACK = {"MASTER_ADDR": "127.0.0.1", "NCCL_SOCKET_IFNAME": "lo", "GPUS_PER_NODE": "2"}
NODES = [
    NodeHello(
        node=node,
        nodes=2,
        host=f"host{node}",
        address="127.0.0.1",
        token="",
        code="c0de",
        problems=[],
    )
    for node in range(2)
]


def node(number: int, port: str, nodes: int = 2, **changes: Any) -> Environment:
    """A node of this machine whose own problems are those named in `changes`, or none."""
    values = LOOPBACK | {"MASTER_PORT": port, "NODE_RANK": str(number), "NNODES": str(nodes)}
    return replace(
        read_environment(values, []), **{"problems": (), "join_timeout_s": 20.0} | changes
    )


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test that is a coroutine."""

    @functools.wraps(test)
    def run(*arguments: Any, **options: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **options), 60))

    return run


async def refusal(work: Awaitable[object]) -> str:
    """The last line of a node that does this."""
    with pytest.raises(UserError) as ended:
        await work
    assert ended.value.code == 2
    line = f"ERROR: {ended.value.problems[-1]}"
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


@pytest.mark.parametrize("order", [*permutations(range(3))])
@in_loop
async def test_three_nodes_meet_in_whatever_order_they_come(order: tuple[int, ...]) -> None:
    port = a_free_port()

    async def come(number: int) -> Control:
        await asyncio.sleep(0.1 * order.index(number))
        return await meet(node(number, port, nodes=3), "c0de")

    met = await asyncio.gather(*map(come, range(3)))
    for met_control in met:
        assert [hello.node for hello in met_control.nodes] == [0, 1, 2]
        assert abs(met_control.clock_ahead_s) < 1
    texts = [{"text": str(number) * 200_000} for number in range(3)]  # longer than a packet
    values = await asyncio.gather(*(each.gather("a text", texts[each.node], 9) for each in met))
    assert values == [texts] * 3


@pytest.mark.parametrize(
    ("sick", "worker", "words"),
    [
        (0, {"problems": ()}, "node 0 ({host}): no disk - buy one"),
        (1, {"problems": ("no disk - buy one",)}, "node 1 ({host}): no disk - buy one"),
        (None, {"code": "07e7"}, "the code differs: shardtune/cluster has digest c0de on node 0"),
        (None, {"node": 0}, "two nodes call themselves node 0: {host} (127.0.0.1) and "),
        (None, {"nodes": 3}, "NNODES is 2 on node 0 ({host}) and 3 on node 1 ({host}) - start"),
    ],
)
@in_loop
async def test_a_problem_of_one_node_ends_both_at_once(
    sick: int | None, worker: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_TELL_S", 1.0)
    port = a_free_port()
    first = node(0, port, problems=("no disk - buy one",) if sick == 0 else ())
    number, nodes = worker.get("node", 1), worker.get("nodes", 2)
    second = node(1, port, nodes, problems=worker.get("problems", ()))
    # A second node 0 that owns the address would listen: it is another machine.
    second = replace(second, node=number, owns_master=number != 0)
    codes = "c0de", worker.get("code", "c0de")
    ends = (refusal(meet(each, code)) for each, code in zip((first, second), codes, strict=True))
    for line in await asyncio.gather(*ends):
        assert line.startswith("ERROR: " + words.format(host=socket.gethostname()))


async def come(number: int, nodes: int, port: str) -> Control:
    """Say hello as this node."""
    control = Control(NODES[1].model_copy(update={"node": number, "nodes": nodes}))
    await say_hello(control, "127.0.0.1", int(port))
    return control


@in_loop
async def test_node_0_says_how_to_launch_the_first_missing_node(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_TELL_S", 0.0)
    port = a_free_port()
    first = node(0, port, 4, master="node0", join_timeout_s=0.5)
    waiting = asyncio.create_task(refusal(meet(first, "c0de")))
    await asyncio.sleep(0.1)
    await come(1, 4, port)
    how = f"`MASTER_ADDR=node0 MASTER_PORT={port} NNODES=4 NODE_RANK=2 ./launch_node1.sh`"
    line = await waiting
    assert line.startswith("ERROR: node 2, 3 of 4 ") and how in line and how in lines[-1]


@in_loop
async def test_a_node_may_leave_and_come_again_but_not_twice() -> None:
    port = a_free_port()
    waiting = asyncio.create_task(refusal(meet(node(0, port, nodes=3), "c0de")))
    await asyncio.sleep(0.1)
    (await come(1, 3, port)).peers[0].close()
    await asyncio.sleep(0.3)
    again = await come(1, 3, port)
    await asyncio.sleep(0.3)
    assert not waiting.done()
    twice = await come(1, 3, port)
    line = await waiting
    assert "two nodes call themselves node 1: host1 (127.0.0.1) and host1" in line
    for each in (again, twice):
        received = await each.next(1)
        assert received and received[1]["problems"] == [line.removeprefix("ERROR: ")]


@pytest.mark.parametrize(
    "noise", [b"GET / HTTP/1.1\r\n\r\n", b'{"node": []}\n', b"[" * 99_999 + b"\n"]
)
@in_loop
async def test_strangers_at_the_master_port_are_let_go(noise: bytes) -> None:
    port = a_free_port()
    first = asyncio.create_task(meet(node(0, port), "c0de"))
    await asyncio.sleep(0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
    with contextlib.suppress(ConnectionError):
        writer.write(noise)
        assert await asyncio.wait_for(reader.read(), 5) == b""
    met = await asyncio.gather(first, meet(node(1, port), "c0de"))
    assert [len(each.nodes) for each in met] == [2, 2]


@pytest.mark.parametrize(
    ("result", "is_own", "words"),
    [
        ("stranger", False, "it answered so, seen from node 1 ("),
        ("refused", True, "MASTER_ADDR 127.0.0.1 is an address of node 1 ("),
        ("refused", False, "no node 0 came to 127.0.0.1:{port} within 0 s, 127.0.0.1 refuses"),
        ("silent", False, "nothing answers at MASTER_ADDR 127.0.0.1 from node 1 ("),
    ],
)
@in_loop
async def test_a_worker_says_why_it_does_not_find_node_0(
    result: str, is_own: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(*_: object) -> None:
        raise NotFound(result, "it answered so")

    monkeypatch.setattr(rendezvous, "say_hello", answer)
    limits = dict.fromkeys(rendezvous._GIVE_UP_AFTER_S, 0.0)
    monkeypatch.setattr(rendezvous, "_GIVE_UP_AFTER_S", limits)
    port = a_free_port()
    own = {"interface": "eth0", "owns_master": True} if is_own else {"owns_master": False}
    assert words.format(port=port) in await refusal(meet(node(1, port, **own), "c0de"))


@in_loop
async def test_a_port_of_node_0_that_cannot_be_opened_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = await refusal(meet(node(0, port), "c0de"))
        assert f"is taken by process {os.getpid()} (`" in line

    def refuse(address: object) -> socket.socket:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket, "create_server", refuse)
    assert "is not open: Permission denied - " in await refusal(meet(node(0, "80"), "c0de"))


# Nodes that have met.


@contextlib.asynccontextmanager
async def two_that_have_met() -> AsyncIterator[tuple[Control, Control]]:
    first, second = Control(NODES[0]), Control(NODES[1])

    async def greet(*streams: Any) -> None:
        peer = Peer(*streams)
        peer.hello = NODES[1]
        await peer.receive(peer.read_hello)
        peer.send({"welcome": 0.0, "host": "host0"})
        first.add(peer)

    listener = socket.create_server(("127.0.0.1", 0))
    server = await asyncio.start_server(greet, sock=listener)
    await say_hello(second, *listener.getsockname())
    first.nodes = second.nodes = NODES
    yield first, second
    server.close()


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("late", "is late with the measurements - see its log"),
        ("gone", "went away (it closed the connection, "),
        ("silent", "went away (no sign of life for 0 s, "),
    ],
)
@in_loop
async def test_a_node_that_does_not_answer_is_named(
    what: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_TICK_S", 0.1)
    async with two_that_have_met() as (first, second):
        if what == "gone":
            second.peers[0].close()
        elif what == "silent":
            first.silent_s = 0.5
            await asyncio.sleep(1)
            assert first.peers  # it says that it lives
            for task in second._tasks:
                task.cancel()
        line = await refusal(first.gather("the measurements", {}, 0.1 if what == "late" else 9))
    assert line.startswith("ERROR: node 1 (host1) ") and words in line


@pytest.mark.parametrize(
    ("answered", "words"),
    [
        (None, "cannot reach node 1 (host1) at port {port} of 127.0.0.1 (Connection refused)"),
        (0, "node 1 (host1) at port {port} of 127.0.0.1, and 64 bytes do not come "),
        (1, "small messages pass between node 0 (host0) and node 1 (host1), large ones do not"),
        (2, "node 1 (host1) at port {port} of 127.0.0.1, and 1048576 bytes do not "),
    ],
)
@in_loop
async def test_trouble_on_the_way_to_another_node_is_named_on_both(
    answered: int | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sends back only so many messages. The other node hears of it too."""
    monkeypatch.setattr(preflight, "_TIMEOUT_S", 0.5)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for size in preflight._SIZES[:answered]:
            writer.write(await reader.readexactly(size))
        await reader.read(-1)
        writer.close()

    async with two_that_have_met() as (first, second):
        other = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = other.sockets[0].getsockname()[1]
        if answered is None:
            other.close()
        trying = refusal(preflight.require_paths(first, node(0, "29600")))
        line = asyncio.create_task(trying)
        await second.gather("", {"ip": "127.0.0.1", "port": port, "mtu": "lo 1500"}, 9)
        assert await refusal(second.gather("", {}, 9)) == await line
        assert words.format(port=port) in await line


@in_loop
async def test_the_way_between_two_nodes_is_tried_with_real_messages() -> None:
    async with two_that_have_met() as controls:
        await asyncio.gather(
            *(
                preflight.require_paths(each, node(number, "29600"))
                for number, each in enumerate(controls)
            )
        )
