"""Nodes that look for each other or have met, as objects over real sockets: what each says of the other."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from conftest import a_free_port
from helpers.documented import require_documented

from distTest import preflight
from shardtune.cluster import connectivity as paths
from shardtune.cluster import environment as settings
from shardtune.cluster import knocking, meeting, network
from shardtune.cluster import microbenchmark as ranks
from shardtune.cluster import node_info as facts
from shardtune.cluster.children import Child
from shardtune.cluster.control import Link, NodeHello, readable
from shardtune.cluster.doors import Doors, side_port
from shardtune.cluster.meeting import Meeting
from shardtune.cluster.reception import Reception
from shardtune.cluster.voice import Voice
from shardtune.errors import UserError

LOOPBACK = {"MASTER_ADDR": "127.0.0.1", "NCCL_SOCKET_IFNAME": "lo", "GPUS_PER_NODE": "2"}
NODES = [
    NodeHello(node, 2, f"host{node}", "127.0.0.1", 29600, str(node), "digest") for node in range(2)
]


def quiet(line: str) -> None:
    pass


def problem_of(work: Callable[[], object]) -> str:
    """The last line of a node that does this."""
    with pytest.raises(UserError) as refused:
        work()
    line = f"ERROR: {refused.value.problems[-1]}"
    require_documented("preflight", line)
    return line


@contextlib.contextmanager
def two_that_have_met(doors: Doors | None = None) -> Iterator[tuple[Meeting, Meeting]]:
    links = [Link(end, "127.0.0.1") for end in socket.socketpair()]
    try:
        yield (
            Meeting(0, NODES, {1: links[0]}, quiet, doors),
            Meeting(1, NODES, {0: links[1]}, quiet),
        )
    finally:
        for link in links:
            link.close()


@contextlib.contextmanager
def beside(work: Callable[[], object]) -> Iterator[None]:
    """What another node does meanwhile, which may be refused too."""

    def refusable() -> None:
        with contextlib.suppress(UserError):
            work()

    thread = threading.Thread(target=refusable)
    thread.start()
    yield
    thread.join()


def test_a_node_that_is_late() -> None:
    with two_that_have_met() as (first, _):
        line = problem_of(lambda: first.gather("a look at run.dir", {}, 0.1))
    assert line == "ERROR: node 1 (host1) is late with a look at run.dir - see its log"


def test_a_node_that_goes_away() -> None:
    with two_that_have_met() as (first, second):
        vars(second)["_links"][0].close()
        line = problem_of(lambda: first.gather("the measurements", {}, 9))
    assert line.startswith(
        "ERROR: node 1 (host1) went away (it closed the connection, the measurements) - "
    )


@pytest.mark.parametrize(
    ("met", "late", "words"),
    [
        (
            2,
            NODES[1],
            "two nodes call themselves node 1: host1 (127.0.0.1), which is in the run, and late (127.0.0.1)",
        ),
        (
            2,
            replace(NODES[1], node=2, nodes=3),
            "node 0 (host0) was started with NNODES=2 and has met them all already",
        ),
        (1, NODES[1], "NNODES is 1 on node 0 (host0) and 2 on node 1 (late)"),
    ],
)
def test_a_node_that_comes_when_all_have_met(met: int, late: NodeHello, words: str) -> None:
    """It is refused, and node 0 goes on, unless it took itself for the only one."""
    port, doors = int(a_free_port()), Doors(NODES[0])
    doors.open(port, is_main=True)
    helper = Child("node 0 (host0)", lambda link: time.sleep(99))
    first = Meeting(0, NODES[:met], {}, quiet, doors)

    def come() -> None:
        found = knocking.knock(
            replace(late, host="late", token="late", port=None), "127.0.0.1", port, 5
        )
        assert isinstance(found, knocking.Welcome)
        (message,) = found.behind or found.link.receive(5)
        assert message["problems"][0].startswith(words)
        told.append(f"ERROR: {message['problems'][0]}")

    told: list[str] = []
    try:
        with beside(come), pytest.raises(UserError) as refused:
            first.gather("the facts of its devices", helper, 0.5)
    finally:
        helper.end()
        first.close_doors()
    require_documented("preflight", told[0])
    assert (refused.value.problems[0].startswith(words)) == (met == 1)


@pytest.mark.parametrize(
    ("answer", "how"), [("none", "hears nothing for 5 s"), ("an end", "is cut off")]
)
def test_a_port_that_somebody_else_answers(
    answer: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "_MESSAGE_TIMEOUT_S", 0.2)
    mine = settings.read_settings(LOOPBACK, [])
    with two_that_have_met() as (first, second), socket.create_server(("127.0.0.1", 0)) as other:

        def be_second() -> None:
            second.gather(
                "ports", {"ip": "127.0.0.1", "port": other.getsockname()[1], "mtu": "lo 1500"}, 9
            )
            if answer == "an end":
                other.accept()[0].close()
            second.gather("connections", {"problems": []}, 9)

        with beside(be_second):
            line = problem_of(lambda: paths.require_paths(first, mine))
    assert (
        line.startswith("ERROR: node 0 (host0) connects to node 1 (host1) at port ") and how in line
    )


def test_a_node_0_that_waits_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """For longer than this one does."""
    monkeypatch.setattr(knocking, "TELLING_S", 0.2)
    port, doors = int(a_free_port()), Doors(NODES[0])
    doors.open(port, is_main=True)
    me = replace(NODES[1], port=None)

    came: list[tuple[NodeHello, Link]] = []

    def welcome() -> None:
        while not came:
            came.extend(doors.arrivals(readable(doors.sources(), 5)))

    with beside(welcome):
        line = problem_of(
            knocking.Knocking(me, "127.0.0.1", "127.0.0.1", port, False, 0.3, Voice()).meet
        )
    doors.close()
    assert line == "ERROR: node 0 (host0) still waits for other nodes after 0 s - see its log"


def test_a_node_0_whose_port_a_stranger_has(capsys: pytest.CaptureFixture[str]) -> None:
    """It is said where it was met."""
    port, doors = int(a_free_port()), Doors(NODES[0])
    stranger = network.listen(port)
    doors.open(side_port(port), is_main=False)

    def turn_away() -> None:
        while True:
            stranger.accept()[0].close()

    def refuse() -> None:
        while not (arrived := doors.arrivals(readable(doors.sources(), 5))):
            pass
        arrived[0][1].send(
            {
                "problems": [
                    f"port {port} of node 0 (host0) is taken by process 7 (`cat`) - end that"
                ]
            }
        )

    threading.Thread(target=turn_away, daemon=True).start()
    me = replace(NODES[1], port=None)
    with beside(refuse):
        problem_of(knocking.Knocking(me, "127.0.0.1", "127.0.0.1", port, False, 9, Voice()).meet)
    doors.close()
    assert f"has found node 0 (host0) at 127.0.0.1:{side_port(port)}\n" in capsys.readouterr().out


@pytest.mark.full
def test_a_node_0_that_trains_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was started with NNODES=1: torchrun's store is what the other finds there."""
    monkeypatch.setattr(knocking, "_STRANGER_S", 0)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    line = problem_of(
        knocking.Knocking(NODES[1], "127.0.0.1", "127.0.0.1", store.port, False, 9, Voice()).meet
    )
    assert (
        "that is not the preflight of node 0, seen from node 1 (host1) - a run that has started (was node 0 "
        in line
    )
    store.set("still", "serves")


def test_a_port_that_is_taken_before_torchrun_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_PORT_FREE_TIMEOUT_S", 0)
    with network.listen(0) as taken:
        port = taken.getsockname()[1]
        line = problem_of(lambda: vars(preflight)["_require_free"](port))
    assert line.startswith(
        f"ERROR: port {port} was free and is taken now by process {os.getpid()} (`"
    )


def test_a_port_that_may_not_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(port: int) -> socket.socket:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("shardtune.cluster.doors.listen", refuse)
    voice = Voice()
    vars(preflight)["_open_doors"](settings.read_settings(LOOPBACK, []), NODES[0], voice)
    assert voice.problems[0].startswith(
        "port 29600 of node 0 (host0) is not open: Permission denied - "
    )
    require_documented("preflight", f"ERROR: {voice.problems[0]}")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"MASTER_ADDR": "no.such.name.invalid"},
            "MASTER_ADDR is 'no.such.name.invalid', which resolves to no address",
        ),
        *(
            (
                {"MASTER_ADDR": name},
                f"MASTER_ADDR is '{name}', which resolves to no address (a part of it between dots is ",
            )
            for name in ("127.0.0..1", "a" * 64)
        ),
        ({"MASTER_ADDR": "0.0.0.0"}, "MASTER_ADDR is '0.0.0.0', which is no machine's address - "),
        ({"GPUS_PER_NODE": "0"}, "GPUS_PER_NODE is '0' - set it to a whole number from 1 to 9999"),
        ({"NODE_RANK": "2"}, "NODE_RANK is '2' and NNODES '2' - "),
    ],
)
def test_an_environment_that_is_refused(changed: dict[str, str], words: str) -> None:
    found = settings.read_settings(LOOPBACK | changed, ["data.train=/nowhere/train.jsonl"])
    (line,) = [f"ERROR: {problem}" for problem in found.problems if problem.startswith(words)]
    require_documented("preflight", line)


def test_an_interface_that_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.net_if_stats", lambda: {"lo": SimpleNamespace(isup=False)})
    (line,) = [
        f"ERROR: {problem}"
        for problem in settings.read_settings(LOOPBACK, []).problems
        if "down" in problem
    ]
    assert line.startswith(
        "ERROR: NCCL_SOCKET_IFNAME is 'lo', and that interface is down - `ip link set lo up` as root"
    )
    require_documented("preflight", line)


def test_an_address_that_is_read_as_another() -> None:
    """The digits of a number that begins with 0 are octal."""
    found = settings.read_settings(LOOPBACK | {"MASTER_ADDR": "127.0.0.010"}, [])
    assert (found.master_ip, found.master_named) == ("127.0.0.8", "127.0.0.010 (127.0.0.8)")
    assert settings.read_settings(LOOPBACK, []).master_named == "127.0.0.1"


def test_a_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    (problem,) = settings.read_settings(LOOPBACK, []).problems
    assert (
        problem
        == "the directory that this was started in does not exist any more - `cd` into one that does"
    )
    require_documented("preflight", f"ERROR: {problem}")


@pytest.mark.parametrize(
    ("nodes", "came", "told"),
    [
        (2, [], "it with MASTER_ADDR=node0 MASTER_PORT=29600;"),
        (3, [2], "it with MASTER_ADDR=node0 MASTER_PORT=29600 NNODES=3;"),
        (3, [1], "it with MASTER_ADDR=node0 MASTER_PORT=29600 NNODES=3 NODE_RANK=2;"),
        (4, [1], "each with MASTER_ADDR=node0 MASTER_PORT=29600 NNODES=4 and its own NODE_RANK;"),
    ],
)
def test_how_a_missing_node_is_launched(
    nodes: int, came: list[int], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What launch_node1.sh does not know by itself."""
    me = replace(NODES[0], nodes=nodes)
    reception = Reception(me, "node0", 29600, Doors(me), 0.1, Voice(), None)
    with contextlib.ExitStack() as opened:
        for node in came:
            ends = [opened.enter_context(end) for end in socket.socketpair()]
            vars(reception)["_guests"].append(
                (replace(NODES[1], node=node, nodes=nodes), Link(ends[0], "127.0.0.1"))
            )
        line = problem_of(reception.wait_for_all)
    assert f" - start launch_node1.sh on {told} if it runs" in line
    assert f" (launch {told} the way" in capsys.readouterr().out


def test_whom_a_node_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not call itself as if it were another one."""
    monkeypatch.setattr(meeting, "SAY_EVERY_S", 0.05)
    said: list[str] = []
    helper = Child("a child", lambda link: time.sleep(99))
    near, far = socket.socketpair()
    second = Meeting(1, NODES, {0: Link(near, "127.0.0.1")}, said.append)
    try:
        line = problem_of(lambda: second.gather("the facts", helper, 0.2))
    finally:
        helper.end()
        far.close()
        near.close()
    assert said[0] == "waiting for this node: the facts"
    assert line == "ERROR: node 1 (host1) is late with the facts - see its log"


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        (
            "data.train=/nowhere/train.jsonl",
            "data.train=/nowhere/train.jsonl: no such file or directory - ",
        ),
        ("model.path=/nowhere/model", "model.path=/nowhere/model: no such directory - "),
        ("run.dir=/dev/null/run", "run.dir=/dev/null/run: /dev/null cannot be written - "),
    ],
)
def test_a_path_that_is_refused(argument: str, words: str) -> None:
    found = settings.read_settings(LOOPBACK, [argument])
    (line,) = [f"ERROR: {problem}" for problem in found.problems if problem.startswith(words)]
    require_documented("preflight", line)


def test_a_child_that_ends_without_a_word() -> None:
    child = Child("node 0 (host0)", lambda link: os._exit(3))
    readable([child], 9)
    (problem,) = (child.result() or {})["problems"]
    child.end()
    assert problem == "node 0 (host0) ended without a word (exit code 3) - see above"
    require_documented("preflight", f"ERROR: {problem}")


def test_a_driver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_GPU_TIMEOUT_S", 0.2)
    monkeypatch.setattr(facts, "_report_gpus", lambda link: time.sleep(99))
    (problem,) = facts.facts_of_machine(readable_settings())["problems"]
    assert problem.startswith("the look at the GPUs took more than 0 s - ")
    require_documented("preflight", f"ERROR: {problem}")


def test_more_processes_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {"name": "H100", "free_bytes": 79 * 10**9, "total_bytes": 80 * 10**9}
    monkeypatch.setattr(facts, "_report_gpus", lambda link: link.send({"gpus": [gpu]}))
    (problem,) = facts.facts_of_machine(readable_settings())["problems"]
    assert "GPUS_PER_NODE is 2 and 1 GPUs are visible - " in problem
    require_documented("preflight", f"ERROR: {problem}")


def test_the_nccl_that_is_loaded_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the one that torch was built with."""

    class Library:
        def __init__(self, name: str, mode: int) -> None:
            assert (name, mode) == ("libnccl.so.2", os.RTLD_NOLOAD)

        def ncclGetVersion(self, number: Any) -> None:  # a name of NCCL's
            number._obj.value = 22805

    monkeypatch.setattr("ctypes.CDLL", Library)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 27, 3))
    monkeypatch.setattr(facts, "_gpus", lambda: {"gpus": []})
    assert facts.facts_of_machine(readable_settings())["libraries"] == {
        "CUDA": "13.0",
        "NCCL": "2.28.5",
    }


def readable_settings() -> settings.Settings:
    found = settings.read_settings(LOOPBACK, [])
    assert found.config is not None
    return found


def test_a_rank_that_does_not_finish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_ALL_TIMEOUT_S", 1.0)
    job: dict[str, Any] = {
        "logs": str(tmp_path),
        "node": 0,
        "name": NODES[0].name,
        "sizes": [1, 1],
        "device": "CPU",
    }
    (problem,) = ranks.measure(job | {"address": "127.0.0.1", "port": int(a_free_port())})[
        "problems"
    ]
    assert problem.startswith(
        "node 0 (host0), rank 0 did not finish within 1 s, it was in the rendezvous of the ranks"
    )
    require_documented("preflight", f"ERROR: {problem}")
