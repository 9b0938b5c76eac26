"""Who is let in at the master port: real launches and meetings on loopback, and strangers."""

import asyncio
import json
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import a_free_port
from helpers.documented import require_error_line
from helpers.launches import descendants, end, start_preflight, write_run

from shardtune.cluster.control import LONGEST_BYTES, Control, NodeHello, Peer
from shardtune.cluster.environment import Environment, read_environment
from shardtune.cluster.node_info import agents_digest
from shardtune.cluster.rendezvous import meet, say_hello
from shardtune.errors import UserError

TEXT = "PWNED"
HELLO = {"node": 1, "nodes": 2, "host": "stranger", "address": "?", "problems": []}
HELLO |= {"token": "", "code": agents_digest()}
LIVES = {"alive": True}
SECRET, OTHER = "the secret of these nodes", "the secret of some other ones"


@pytest.fixture
def folder(tmp_path: Path, models: dict[str, Path]) -> Path:
    return write_run(tmp_path, models["llama"])


class CheckedNode:
    """The checks alone, as a node of this machine. `lines` are those of both streams so far."""

    def __init__(self, node: int, folder: Path, port: str, **settings: str) -> None:
        both = subprocess.STDOUT
        self.process = start_preflight(node, port, cwd=folder, errors=both, **settings)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))

    def wait_for(self, words: str, number: int = 1) -> None:
        deadline = time.monotonic() + 240
        while sum(words in line for line in self.lines[:]) < number:
            assert time.monotonic() < deadline and self.process.poll() is None, self.lines
            time.sleep(0.02)

    def end(self) -> tuple[int, str]:
        """Return its exit code and its last line."""
        code = self.process.wait(240)
        self._reader.join()
        assert not any(TEXT in line or "Traceback" in line for line in self.lines), self.lines
        return code, self.lines[-1].rstrip()

    def stop(self) -> None:
        """End it while it waits or measures."""
        self.process.terminate()
        assert "went away" in self.end()[1] or "ended by SIGTERM" in self.lines[-1]


Start = Callable[..., CheckedNode]


@pytest.fixture
def start() -> Iterator[Start]:
    nodes: list[CheckedNode] = []

    def start_one(*arguments: Any, **settings: str) -> CheckedNode:
        nodes.append(CheckedNode(*arguments, **settings))
        return nodes[-1]

    yield start_one
    for node in nodes:
        node.process.kill()


def say(port: str, *messages: Any, is_end: bool = True) -> bytes:
    """Send this as a stranger, and return what the port answers until it closes."""
    with socket.create_connection(("127.0.0.1", int(port)), 30) as connection:
        connection.sendall(
            b"".join(
                each if isinstance(each, bytes) else json.dumps(each).encode() + b"\n"
                for each in messages
            )
        )
        if is_end:
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        while received := connection.recv(65536):
            answer += received
        return answer


def test_strangers_are_dropped_and_the_launch_goes_on(folder, start):
    """Each cause is said once, without their text. A node of another launch says why it ends."""
    port = a_free_port()
    # Node 2 never comes: a stranger that says hello as node 1 must not complete the meeting.
    master = start(0, folder, port, NNODES="3")
    master.wait_for("waiting for node 1, 2 of 3")
    real = start(7, folder, port, NNODES="8")
    hello = HELLO | {"nodes": 3}
    silent = socket.create_connection(("127.0.0.1", int(port)))
    for noise in (
        f"GET /{TEXT} HTTP/1.1\r\n\r\n".encode(),
        b"\x16\x03\x01\x00\xff\x00",
        [TEXT],
        {"kind": TEXT},
        {"problems": [TEXT], "code": 2},
        hello | {"host": TEXT * 99},
        hello | {"code": TEXT},
        hello | {"host": f"{TEXT} - {TEXT}"},
        hello | {"nodes": -5},
        hello | {"node": TEXT},
    ):
        assert say(port, noise) == b""
    with pytest.raises(OSError):  # too long
        say(port, *[TEXT.encode() * (LONGEST_BYTES // 10)] * 4)
    for bad in (
        {"lost": TEXT, "name": TEXT},
        {"round": 1, "value": {"problems": TEXT}},
        {"values": []},
        [TEXT],
    ):
        say(port, hello, LIVES, bad, is_end=False)
    for node in (7, 3, None):
        say(port, hello | {"node": node}, LIVES, is_end=False)
    assert b"NODE_RANK is 9 and NNODES 3 on node 0" in say(port, hello | {"node": 9}, LIVES)
    say(port, hello | {"node": 3, "problems": [TEXT]}, LIVES, is_end=False)
    code, last = real.end()
    require_error_line(last)
    assert code == 2 and last.startswith("ERROR: NODE_RANK is 7 and NNODES 3 on node 0 (")
    worker = start(1, folder, port, NNODES="3")
    worker.wait_for("has found node 0")
    for node in (worker, master):
        node.stop()
    silent.close()
    warnings = [line for line in master.lines if "dropped" in line and "no message" not in line]
    dropped = r"WARNING: the connection with 127.0.0.1(, as node \w+,)? is dropped: it "
    assert all(re.match(dropped, line) for line in warnings)
    assert len(warnings) == 2, master.lines


def test_a_stranger_with_other_code_puts_no_words_into_the_last_line(folder, start):
    port = a_free_port()
    master = start(0, folder, port)
    master.wait_for("waiting for node 1 of 2")
    say(port, HELLO | {"code": "0", "host": TEXT, "problems": [TEXT]}, LIVES, is_end=False)
    code, last = master.end()
    assert code == 2 and last.startswith("ERROR: the code differs: ")
    assert " and 0 on node 1 (127.0.0.1) - " in last


def test_node_0_ends_with_the_wrong_secret_that_it_saw(folder, start):
    port = a_free_port()
    master = start(0, folder, port, JOIN_SECRET=SECRET, JOIN_TIMEOUT="5")
    master.wait_for("waiting for node 1 of 2")
    say(port, HELLO | {"problems": [TEXT]}, LIVES)
    code, last = master.end()
    require_error_line(last)
    assert code == 2 and "127.0.0.1 came, and it has no JOIN_SECRET" in last


def test_only_nodes_with_the_secret_are_let_in(folder, start):
    """Any other is named on both sides. The secret is in no log, and no process inherits it."""
    port = a_free_port()
    master = start(0, folder, port, JOIN_SECRET=SECRET)
    master.wait_for("waiting for node 1 of 2")
    say(port, HELLO | {"problems": [TEXT]}, LIVES)
    others = [start(1, folder, port, JOIN_SECRET=OTHER), start(1, folder, port)]
    for other, which in zip(
        others, ("another JOIN_SECRET than", "a JOIN_SECRET, unlike"), strict=True
    ):
        code, last = other.end()
        require_error_line(last)
        words = f"{which} this node, node 1 ("
        assert code == 2 and last.startswith(f"ERROR: node 0 answers at 127.0.0.1:{port}: it has ")
        assert words in last, last
    right = start(1, folder, port, JOIN_SECRET=f"{SECRET}\n")
    right.wait_for("has found node 0")
    for which in ("another", "no"):
        master.wait_for(f"127.0.0.1, as node 1, is dropped: it has {which} JOIN_SECRET")
    for node in (master, right):
        _, *forks = descendants(node.process.pid)
        assert forks
        for pid in (node.process.pid, *forks):
            assert SECRET.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
    for node in (master, right):
        node.stop()
    for node in (master, right, *others):
        assert not any(SECRET in line or OTHER in line for line in node.lines)


def a_node(number: int, port: str, secret: str = SECRET) -> Environment:
    known = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NCCL_SOCKET_IFNAME": "lo"}
    known |= {"NODE_RANK": str(number), "JOIN_SECRET": secret}
    return replace(read_environment(known, []), problems=(), join_timeout_s=80.0)


class Recorder:
    """A way between node 1 and node 0 that keeps what node 1 says, and may change it."""

    def __init__(self, port: str, change: Callable[[bytes], bytes] = bytes) -> None:
        self._port, self._change, self.said = int(port), change, b""

    async def pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, to = await asyncio.open_connection("127.0.0.1", self._port)

        async def back() -> None:
            while received := await there.read(65536):
                writer.write(received)
            writer.close()

        returning = asyncio.create_task(back())
        while line := await reader.readline():
            self.said += line
            to.write(self._change(line))
        to.close()
        await returning


async def met(*environments: Environment) -> list[Control]:
    meeting = asyncio.gather(*(meet(each, "c0de") for each in environments))
    return list(await asyncio.wait_for(meeting, 36))


def test_what_a_node_said_is_not_believed_a_second_time():
    async def check() -> None:
        port, way = a_free_port(), a_free_port()
        recorder = Recorder(port)
        server = await asyncio.start_server(recorder.pass_on, "127.0.0.1", int(way))
        first, second = await met(a_node(0, port), a_node(1, way))
        values = [{"text": "right"}, {"text": "too"}]
        gathering = (each.gather("a text", values[each.node], 9) for each in (first, second))
        assert await asyncio.gather(*gathering) == [values, values]
        assert recorder.said.count(b"\t") == recorder.said.count(b"\n") > 2
        server.close()
        again = asyncio.create_task(meet(a_node(0, port), "c0de"))
        await asyncio.sleep(0.1)
        for said in (recorder.said.splitlines(keepends=True)[0], recorder.said):
            _, writer = await asyncio.open_connection("127.0.0.1", int(port))
            writer.write(said)
        await asyncio.sleep(0.3)
        assert not again.done()
        await met(a_node(1, port))
        assert [node.node for node in (await again).nodes] == [0, 1]

    asyncio.run(check())


@pytest.mark.parametrize(
    "change",
    [
        lambda line: line.replace(b"right", b"wrong"),
        lambda line: line * (1 + (b"right" in line)),
    ],
    ids=["another text", "said twice"],
)
def test_a_message_that_was_changed_on_the_way_ends_the_launch(change):
    async def check() -> None:
        port, way = a_free_port(), a_free_port()
        recorder = Recorder(port, change)
        server = await asyncio.start_server(recorder.pass_on, "127.0.0.1", int(way))
        first, second = await met(a_node(0, port), a_node(1, way))
        second.report({"round": 1, "value": {"text": "right"}})
        with pytest.raises(UserError, match=r"went away \(it has another JOIN_SECRET"):
            for _ in range(2):
                await first.gather("a text", {"text": "right"}, 9)
        server.close()

    asyncio.run(check())


@pytest.mark.parametrize(
    "bad",
    [
        {"round": 1, "value": TEXT},
        {"round": 1, "values": [{}]},
        {"attempt": 0, "status": [{"rank": 0, "host": "h", "phase": TEXT}], "finished": False},
        {"attempt": 0, "failure": {"code": 1}},
        {"lost": TEXT, "name": TEXT},
        {"end": None},
    ],
)
def test_a_node_that_sends_another_shape_is_lost_to_the_launch(bad):
    async def check() -> None:
        port = a_free_port()
        waiting = asyncio.create_task(meet(a_node(0, port, " no"), "c0de"))
        await asyncio.sleep(0.1)
        control = Control(NodeHello(**HELLO | {"code": "c0de"}), secret=b"no")
        await say_hello(control, "127.0.0.1", int(port))
        first = await waiting
        peer: Peer = control.peers[0]
        peer.send(bad)
        with pytest.raises(UserError) as ended:
            await asyncio.wait_for(first.gather("a look at run.dir", {}, 9), 9)
        (line,) = ended.value.problems
        require_error_line(f"ERROR: {line}")
        assert "went away (it sends something else than messages, " in line and TEXT not in line

    asyncio.run(check())


def test_whoever_comes_after_all_have_met_is_no_node():
    """It connected before them, and says its hello behind them."""

    async def check() -> None:
        port = a_free_port()
        waiting = asyncio.create_task(meet(a_node(0, port), "c0de"))
        await asyncio.sleep(0.1)
        reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
        await asyncio.sleep(0.1)
        (second,) = await met(a_node(1, port))
        late = Peer(reader, writer, SECRET.encode())
        late.send(vars(second.me))
        assert await reader.readline()
        late.send(LIVES)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        assert len((await waiting).peers) == 1

    asyncio.run(check())


def test_an_empty_secret_is_refused(folder):
    code, _, errors = end(start_preflight(0, "29600", cwd=folder, NNODES="1", JOIN_SECRET=" "))
    require_error_line(errors.strip())
    assert code == 2 and "JOIN_SECRET is empty - " in errors
