"""What ends a run that is under way: on every node all processes are gone within a minute, the last line says which
rank failed where and why, and the same commands resume. The launch scripts run as two nodes on this machine's loopback,
or as network namespaces where a cable is cut."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import REPOSITORY, a_free_port, chats, needs_namespaces, read_metrics, write_jsonl
from documented import require_documented
from test_launch import children, environment

from distTest import namespaces
from shardtune.errors import AGAIN

HOST = socket.gethostname()
GONE_WITHIN_S = 60
ARGUMENTS = (
    "--config",
    "config.yaml",
    "train.epochs=9999",
    "scheduler.name=constant",
    "checkpoint.every_steps=2",
    "export.final=false",
)
# In one rank it replaces the function of a module by one that fails in its nth call; it is imported at the start of
# every Python process whose PYTHONPATH names its folder.
FAULT = """
import os, signal, sys, time
if os.environ.get("RANK") == "{rank}":
    sys.path.insert(0, "{repository}")
    import {module}
    original, calls = {module}.{function}, 0
    def {function}(*arguments, **options):
        global calls
        calls += 1
        if calls == {nth}:
            {effect}
        return original(*arguments, **options)
    {module}.{function} = {function}
"""
Prefixes = tuple[list[str], list[str]]
DATA, FORWARD = ("shardtune.packing", "build_batch"), ("shardtune.loss", "summed_loss")


@pytest.fixture
def folder(tmp_path: Path, models: dict[str, Path]) -> Path:
    write_jsonl(tmp_path / "train.jsonl", chats(30))
    (tmp_path / "config.yaml").write_text(
        f"model: {{path: {models['llama']}, compute_dtype: float32}}\ndata: {{train: train.jsonl, max_length: 128}}\n"
        "run: {dir: run}\n",
        encoding="utf-8",
    )
    return tmp_path


class Nodes:
    """Two nodes with two ranks each. `logs` are what `tee` would have written."""

    def __init__(self, folder: Path, *arguments: str, prefixes: Prefixes = ([], []), **settings: str) -> None:
        self._folder, port = folder, a_free_port()
        self.logs = [folder / f"log{node}" for node in (0, 1)]
        self.scripts = []
        self._seen: set[int] = set()
        for node, (log, prefix) in enumerate(zip(self.logs, prefixes, strict=True)):
            with log.open("w") as file:
                self.scripts.append(
                    subprocess.Popen(
                        [*prefix, str(REPOSITORY / f"launch_node{node}.sh"), *ARGUMENTS, *arguments],
                        cwd=folder,
                        env=environment(MASTER_PORT=port, **{"GPUS_PER_NODE": "2"} | settings),
                        stdout=file,
                        stderr=file,
                    )
                )

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + 120
        while not (self._folder / "run/metrics.jsonl").is_file() or not any(
            entry["step"] >= step for entry in read_metrics(self._folder / "run", "step")
        ):
            assert time.monotonic() < deadline and all(script.poll() is None for script in self.scripts), self.texts()
            time.sleep(0.1)
        self.remember()

    def wait_for_words(self, words: str) -> None:
        """Until node 0 has said them."""
        deadline = time.monotonic() + 120
        while words not in self.texts()[0]:
            assert time.monotonic() < deadline and all(script.poll() is None for script in self.scripts), self.texts()
            time.sleep(0.1)
        self.remember()

    def remember(self) -> None:
        """Take note of every process there is."""
        for script in self.scripts:
            self._seen.update(descendants(script.pid))

    def torchrun(self, node: int) -> int:
        return next(pid for pid in descendants(self.scripts[node].pid) if "torchrun.py" in command(pid))

    def count_ranks(self) -> int:
        started = [command(pid) for script in self.scripts for pid in descendants(script.pid)]
        return sum("train_fsdp.py" in line and "torchrun.py" not in line and "bash" not in line for line in started)

    def end(self) -> list[tuple[int, str]]:
        """Exit code and last line of each node, when every process that was ever seen is gone."""
        turns = 0
        while left := [pid for pid in self._seen if is_alive(pid)]:
            turns += 1  # which stretch on a busy machine, as those of the watchdogs do
            assert turns * 0.2 < GONE_WITHIN_S, [command(pid) for pid in left] + self.texts()
            with contextlib.suppress(FileNotFoundError):
                self.remember()
            for script in self.scripts:
                script.poll()
            time.sleep(0.2)
        ended = [
            (script.wait(10), text.splitlines()[-1]) for script, text in zip(self.scripts, self.texts(), strict=True)
        ]
        for (code, last), text in zip(ended, self.texts(), strict=True):
            assert code < 0 or text.count(last) == 1, text  # a killed script leaves the last word to the ranks
        return ended

    def texts(self) -> list[str]:
        return [log.read_text(encoding="utf-8") for log in self.logs]


def command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8")
    return ""


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    return False


def descendants(pid: int) -> list[int]:
    found = [pid]
    with contextlib.suppress(OSError):
        for child in children(pid):
            found += descendants(child)
    return found


@contextlib.contextmanager
def two_nodes(folder: Path, *arguments: str, prefixes: Prefixes = ([], []), **settings: str) -> Iterator[Nodes]:
    nodes = Nodes(folder, *arguments, prefixes=prefixes, **settings)
    try:
        yield nodes
    finally:
        nodes.remember()
        for pid in nodes._seen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for script in nodes.scripts:
            script.wait()


def resumes(folder: Path) -> None:
    step = read_metrics(folder / "run", "step")[-1]["step"] + 3
    with two_nodes(folder, f"train.max_steps={step}") as nodes:
        nodes.remember()
        for script in nodes.scripts:
            assert script.wait(240) == 0, nodes.texts()
        assert "Resumed from checkpoint_" in nodes.texts()[0]
    steps = [entry["step"] for entry in read_metrics(folder / "run", "step")]
    assert steps == list(range(1, step + 1))


def break_rank(folder: Path, rank: int, where: tuple[str, str], effect: str, nth: int = 5) -> dict[str, str]:
    """The settings of a launch in which this rank fails in its nth step."""
    (folder / "fault").mkdir()
    if where == DATA:  # made two steps ahead: until the loop waits for it
        effect = f"time.sleep(3); {effect}"
    module, function = where
    text = FAULT.format(rank=rank, repository=REPOSITORY, module=module, function=function, nth=nth, effect=effect)
    (folder / "fault/sitecustomize.py").write_text(text, encoding="utf-8")
    return {"PYTHONPATH": str(folder / "fault")}


def while_it_imports(folder: Path, program: str, effect: str) -> dict[str, str]:
    """The settings of a launch in which processes of this name, or this rank, do that when they begin."""
    (folder / "fault").mkdir()
    (folder / "fault/sitecustomize.py").write_text(
        "import os, signal, socket, sys, threading, time\n"
        f"if os.environ.get('RANK') == {program!r} or sys.orig_argv[1].endswith({program!r}):\n"
        f"    {effect}\n",
        encoding="utf-8",
    )
    return {"PYTHONPATH": str(folder / "fault")}


@pytest.mark.parametrize(
    ("rank", "effect", "how"),
    [
        (3, "threading.Timer(1, os.kill, (os.getpid(), signal.SIGKILL)).start()", "by SIGKILL"),
        pytest.param(0, "os.kill(os.getpid(), signal.SIGKILL)", "by SIGKILL", marks=pytest.mark.full),
        pytest.param(2, "os._exit(7)", "with code 7", marks=pytest.mark.full),
    ],
)
def test_a_rank_that_ends_while_it_imports(rank: int, effect: str, how: str, folder: Path) -> None:
    """Nobody has met it yet: the nodes are still connected by their preflight."""
    with two_nodes(folder, **while_it_imports(folder, str(rank), effect)) as nodes:
        nodes.wait_for_words("nodes agree")
        for code, last in nodes.end():
            said = rf"rank {rank} on {HOST}: ended {how}, before it had met the others - .*"
            assert code == 1 and re.fullmatch(f"ERROR: {said}", last), nodes.texts()
            require_documented("running", last)
        assert "Training Configuration" not in nodes.texts()[0]


@pytest.mark.full
@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("what", ["torchrun", "launch script"])
def test_a_launch_that_is_killed_before_its_ranks_have_met(what: str, node: int, folder: Path) -> None:
    fault = while_it_imports(folder, "train_fsdp.py", "time.sleep(10)")
    (folder / "temporary").mkdir()
    with two_nodes(folder, TMPDIR=str(folder / "temporary"), **fault) as nodes:
        nodes.wait_for_words("nodes agree")
        while nodes.count_ranks() < 4:
            assert all(script.poll() is None for script in nodes.scripts), nodes.texts()
            time.sleep(0.1)
        nodes.remember()
        os.kill(nodes.torchrun(node) if what == "torchrun" else nodes.scripts[node].pid, signal.SIGKILL)
        ended = nodes.end()
    if what == "torchrun":
        said = rf"torchrun of node {node} on {HOST} was ended by SIGKILL - .*"
        assert re.fullmatch(f"ERROR: {said}", ended[node][1]) and ended[node][0] == 1, nodes.texts()
    else:
        said = rf"node {node} \({HOST}\): its launch script was killed before its ranks had met the others - .*"
    assert re.fullmatch(f"ERROR: {said}", ended[1 - node][1]) and ended[1 - node][0] == 1, nodes.texts()
    require_documented("running", ended[1 - node][1])
    assert not list((folder / "temporary").iterdir())


@pytest.mark.full
def test_a_port_that_is_taken_after_the_preflight(folder: Path) -> None:
    listen = "listener = socket.create_server(('', int(os.environ['MASTER_PORT'])))"
    fault = while_it_imports(folder, "torchrun.py", f"if os.environ['NODE_RANK'] == '0': {listen}")
    with two_nodes(folder, **fault) as nodes:
        nodes.wait_for_words("nodes agree")
        for code, last in nodes.end():
            said = rf"node 0 on {HOST} started no process: DistNetworkError: .*EADDRINUSE.* - see the logs of the .*"
            assert code == 1 and re.fullmatch(f"ERROR: {said}", last), nodes.texts()
            require_documented("running", last)


@pytest.mark.full
def test_a_rank_that_hangs_while_it_imports(folder: Path) -> None:
    """Slow or stuck, nobody can know before the time in which the nodes have to meet is over. It is alone on its node,
    whose torchrun sees nothing wrong."""
    fault = while_it_imports(folder, "1", "time.sleep(3600)")
    with two_nodes(folder, GPUS_PER_NODE="1", JOIN_TIMEOUT="25", **fault) as nodes:
        nodes.wait_for_words("nodes agree")
        time.sleep(25)
        for code, last in nodes.end():
            said = r"(node 0 \(.*\): )?rank 1 of 2 did not come within 25.0 s - start every node within that time, .*"
            assert code == 2 and re.fullmatch(f"ERROR: {said}", last), nodes.texts()
            require_documented("running", last)


KILLED = r"rank 3 on {host}: ended without a word, last seen in step \d \(.+\) - most often killed for memory, .*"
CRASHED = r"rank 3 on {host}: ended by SIGSEGV, last seen in step \d \(.+\) - see what it said above .*"
ENDED = r"rank 3 on {host}: ended with code 7, last seen in step \d \(.+\) - see what it said above .*"
STOPPED = r"rank 3 on {host}: no sign of life for \d+ s, last seen in step \d \(.+\) - its process is stopped or .*"


@pytest.mark.parametrize(
    ("where", "effect", "said"),
    [
        pytest.param(DATA, "os.kill(os.getpid(), signal.SIGKILL)", KILLED, marks=pytest.mark.full),
        pytest.param(
            FORWARD,
            "raise ValueError('no such token')",
            r"rank 3 on {host}: ValueError: no such token, in step 5 \(forward and backward\) - see the traceback .*",
            marks=pytest.mark.full,
        ),
        pytest.param(
            FORWARD,
            "sys.exit(0)",
            r"rank 3 on {host}: SystemExit: 0, in step 5 \(forward and backward\) - see the traceback .*",
            marks=pytest.mark.full,
        ),
        pytest.param(DATA, "os._exit(0)", KILLED, marks=pytest.mark.full),
        pytest.param(DATA, "os._exit(7)", ENDED, marks=pytest.mark.full),
        pytest.param(DATA, "os.kill(os.getpid(), signal.SIGSEGV)", CRASHED, marks=pytest.mark.full),
        pytest.param(DATA, "os.kill(os.getpid(), signal.SIGSTOP)", STOPPED, marks=pytest.mark.full),
    ],
)
def test_a_rank_that_ends_or_stops(where: tuple[str, str], effect: str, said: str, folder: Path) -> None:
    with two_nodes(folder, **break_rank(folder, 3, where, effect)) as nodes:
        nodes.wait_for_step(4)
        for code, last in nodes.end():
            assert code == 1 and re.fullmatch(f"ERROR: {said.format(host=HOST)}", last), nodes.texts()
            require_documented("running", last)
    resumes(folder)


@pytest.mark.full
@pytest.mark.parametrize(
    ("effect", "said"),
    [
        ("os._exit(0)", r"ended without a word: rank 1 on {host}, last seen in step \d+ .*"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", r"ended by SIGSEGV: rank 1 on {host}, last seen in step \d+ .*"),
        (
            "os.kill(os.getpid(), signal.SIGSTOP)",
            r"rank 1 on {host}, last seen in step \d+ .*: no sign of life for \d+ s, its process was stopped .*",
        ),
    ],
)
def test_a_rank_alone_on_its_node(effect: str, said: str, folder: Path) -> None:
    """torchrun sees nothing wrong in one that ends with 0."""
    with two_nodes(folder, GPUS_PER_NODE="1", **break_rank(folder, 1, DATA, effect)) as nodes:
        nodes.wait_for_step(4)
        (code0, last0), (code1, last1) = nodes.end()
    assert (code0, code1) == (1, 1), nodes.texts()
    assert re.fullmatch(rf"ERROR: rank 1 on {HOST}: no sign of life .*", last0), last0
    assert re.fullmatch(f"ERROR: {said.format(host=HOST)}", last1), last1
    require_documented("running", last1)


@pytest.mark.full
def test_a_rank_that_is_stopped_before_the_first_step(folder: Path) -> None:
    loading = ("shardtune.optim", "build_optimizer")
    fault = break_rank(folder, 3, loading, "time.sleep(3); os.kill(os.getpid(), signal.SIGSTOP)", nth=1)
    with two_nodes(folder, **fault) as nodes:
        nodes.wait_for_words("Trained tokens")
        for code, last in nodes.end():
            assert code == 1 and re.fullmatch(
                rf"ERROR: rank 3 on {HOST}: no sign of life .* loading the model .*", last
            )


@pytest.mark.parametrize(
    ("rank", "where", "phase", "at"),
    [
        (1, DATA, "data", "build_batch"),
        pytest.param(2, FORWARD, "forward and backward", "summed_loss", marks=pytest.mark.full),
    ],
)
def test_a_rank_that_does_not_arrive(rank: int, where: tuple[str, str], phase: str, at: str, folder: Path) -> None:
    fault = break_rank(folder, rank, where, "time.sleep(3600)")
    with two_nodes(folder, "distributed.step_timeout_s=12", **fault) as nodes:
        nodes.wait_for_step(4)
        for code, last in nodes.end():
            said = rf"rank {rank} on {HOST}: did not arrive within 12 s \(at {at}, sitecustomize.py:\d+\), in step 5"
            assert code == 1 and re.match(rf"ERROR: {said} \({phase}\) - see its traceback", last), nodes.texts()
            require_documented("running", last)
        its_own = nodes.texts()[rank // 2]
        assert f"rank {rank} on {HOST} is here:" in its_own and "time.sleep(3600)" in its_own.partition("is here:")[2]


@pytest.mark.parametrize("node", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_torchrun_that_is_killed(node: int, folder: Path) -> None:
    with two_nodes(folder) as nodes:
        nodes.wait_for_step(4)
        time.sleep(2)  # a rank leaves its place every second
        os.kill(nodes.torchrun(node), signal.SIGKILL)
        ended = nodes.end()
        code, last = ended[node]
        place = rf"rank {2 * node} on {HOST}, last seen in step \d+ \(.+\)"
        killed = rf"ERROR: torchrun of node {node} on {HOST} was ended by SIGKILL and its processes with it: {place} - "
        assert code == 1 and re.fullmatch(killed + AGAIN, last), nodes.texts()
        require_documented("running", last)
        code, last = ended[1 - node]
        if node == 0:
            said = rf"ERROR: rank [23] on {HOST}: node 0 \({HOST}\) is gone, its torchrun ended or .*, in step \d+ .*"
        else:
            said = rf"ERROR: rank 2 on {HOST} \(and rank 3 on {HOST}\): no sign of life .*, last seen in step \d+ .*"
        assert code == 1 and re.fullmatch(said, last), nodes.texts()
        require_documented("running", last)
    resumes(folder)


@pytest.mark.full
@pytest.mark.parametrize("node", [0, 1])
def test_a_launch_script_that_is_killed(node: int, folder: Path) -> None:
    """Its torchrun ends as by a signal, so the run is saved."""
    with two_nodes(folder) as nodes:
        nodes.wait_for_step(4)
        nodes.scripts[node].kill()
        ended = nodes.end()
        code, last = ended[1 - node]
        why = f"ERROR: stopped by the end of its launch script on {HOST} after saving step"
        assert code == 75 and why in last and why in nodes.texts()[node], nodes.texts()
    resumes(folder)


@pytest.mark.full
def test_a_launch_script_that_is_killed_while_it_waits(folder: Path) -> None:
    with two_nodes(folder) as nodes:
        nodes.scripts[1].kill()
        time.sleep(6)
        nodes.remember()
        nodes.scripts[0].kill()
        deadline = time.monotonic() + GONE_WITHIN_S
        while any(is_alive(pid) for pid in nodes._seen):
            assert time.monotonic() < deadline
            time.sleep(0.2)


@pytest.mark.full
@needs_namespaces
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("how", ["power", "cable"])
def test_a_node_that_is_lost(lost: int, how: str, folder: Path) -> None:
    """Nothing comes from it any more, not even the end of its connections."""
    with namespaces.joined_nodes(["10.11.7.50", "10.11.7.51"], "enp26s0np0") as places:
        prefixes = (places[0].prefix, places[1].prefix)
        place = {"MASTER_ADDR": "10.11.7.50", "NCCL_SOCKET_IFNAME": "enp26s0np0"}
        with two_nodes(folder, prefixes=prefixes, **place) as nodes:
            nodes.wait_for_step(4)
            places[lost].ip("link", "set", places[lost].interface, "down")
            if how == "power":
                places[lost].kill_all()
            ended = nodes.end()
        silent = r"rank 2 on node1 \(and rank 3 on node1\): no sign of life for \d+ s, last seen in step \d+ .*"
        no_store = (
            r"rank [23] on node1: node 0 \(node0\) is gone, .* 10.11.7.50:\d+ has not answered for 40 s, in step .*"
        )
        for node, said in enumerate((silent, no_store)):
            code, last = ended[node]
            if how == "cable" or node != lost:
                assert code == 1 and re.fullmatch(f"ERROR: {said}", last), nodes.texts()
                require_documented("running", last)
    resumes(folder)


def torchrun(*options: str, folder: Path, **settings: str) -> subprocess.Popen[str]:
    script = [str(REPOSITORY / "train_fsdp.py"), *ARGUMENTS, "train.max_steps=12"]
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options, *script],
        cwd=folder,
        env=os.environ | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.full
def test_torchrun_starts_the_ranks_again(folder: Path) -> None:
    fault = break_rank(folder, 1, DATA, "os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and os.kill(os.getpid(), 9)")
    run = torchrun("--standalone", "--nproc_per_node=2", "--max-restarts=1", folder=folder, **fault)
    said, _ = run.communicate(timeout=120)
    assert run.returncode == 0, said
    assert f"ERROR: rank 1 on {HOST}: ended without a word" in said and "Resumed from checkpoint_000000" in said
    assert [entry["step"] for entry in read_metrics(folder / "run", "step")] == list(range(1, 13))


@pytest.mark.full
def test_torchrun_goes_on_with_the_nodes_that_are_left(folder: Path) -> None:
    """The two ranks of node 1 die with their torchrun; node 0 starts again, without them."""
    port = a_free_port()
    options = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=7", "--nnodes=1:2"]
    options += ["--nproc_per_node=2", "--max-restarts=2"]
    fault = break_rank(folder, 3, DATA, "os.kill(os.getppid(), 9)")
    first = torchrun(*options, "--rdzv-conf=is_host=1", folder=folder)
    second = torchrun(*options, "--rdzv-conf=is_host=0", folder=folder, **fault)
    said, _ = first.communicate(timeout=200)
    second.communicate(timeout=10)
    assert first.returncode == 0, said
    assert "Resumed from checkpoint_000000" in said and "world size was 4, is 2" in said
    assert [entry["step"] for entry in read_metrics(folder / "run", "step")] == list(range(1, 13))
