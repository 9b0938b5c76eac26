"""The launch scripts as tests start them, on loopback or in network namespaces, and faults in their
processes."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from helpers.chats import chats, write_jsonl
from helpers.commands import REPOSITORY, a_free_port, piped, read_metrics
from helpers.documented import require_error_line
from helpers.pinned import on_path

GONE_WITHIN_S = 60
ARGUMENTS = (
    "--config",
    "config.yaml",
    "train.epochs=9999",
    "scheduler.name=constant",
    "checkpoint.every_steps=2",
    "export.final=false",
)
Prefixes = tuple[list[str], list[str]]
HOST = socket.gethostname()
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
RANK = r"rank {rank} on {host}: "
STEP = r"last seen in step \d+ \(.+\)"
KILLED = RANK + rf"ended by SIGKILL, {STEP} - most often killed for memory, .*"
DATA, FORWARD = ("shardtune.data.batch", "build_batch"), ("shardtune.model.loss", "summed_loss")
# Python imports it at the start of every process whose PYTHONPATH names its folder. In one rank it
# replaces the function of a module by one that fails in its nth call.
FAULT = """
import os, signal, sys, time
if os.environ.get("RANK") == "{rank}":
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


def write_run(folder: Path, model: Path) -> Path:
    """The data and the configuration of a run in this folder; the folder."""
    write_jsonl(folder / "train.jsonl", chats(30))
    (folder / "config.yaml").write_text(
        f"model: {{path: {model}, compute_dtype: float32}}\ndata: {{train: train.jsonl, "
        "max_length: 128}\nrun: {dir: run}\n",
        encoding="utf-8",
    )
    return folder


def environment(**settings: str) -> dict[str, str]:
    """This one's and this Python; everything goes to and from 127.0.0.1."""
    loopback = {"MASTER_ADDR": "127.0.0.1", "NCCL_SOCKET_IFNAME": "lo", "GPUS_PER_NODE": "1"}
    return os.environ | {"VIRTUAL_ENV": sys.prefix} | loopback | settings


def start(script: Path | str, *arguments: str, cwd: Path, **settings: str) -> subprocess.Popen[str]:
    return piped([str(REPOSITORY / script), *arguments], cwd, environment(**settings))


def start_preflight(
    node: int, port: str, *arguments: str, cwd: Path, errors: int = subprocess.PIPE, **settings: str
) -> subprocess.Popen[str]:
    """The checks alone, as a node of this machine."""
    command = [sys.executable, "-m", "distTest.preflight", "--config=config.yaml", *arguments]
    own = {"NODE_RANK": f"{node}", "MASTER_PORT": port} | on_path(REPOSITORY) | settings
    return piped(command, cwd, environment(**own), stderr=errors)


def end(node: subprocess.Popen[str]) -> tuple[int, str, str]:
    output, errors = node.communicate(timeout=500)
    return node.returncode, output, errors


def one_node(folder: Path, *arguments: str, **settings: str) -> tuple[int, str, str]:
    """Run the launch script of one node, with two ranks, to its end."""
    alone = {"NNODES": "1", "GPUS_PER_NODE": "2"} | settings
    return end(start("launch_node0.sh", *ARGUMENTS, *arguments, cwd=folder, **alone))


class Nodes:
    """Two nodes, with two ranks each if nothing else is set. `logs` are what `tee` would have
    written."""

    def __init__(
        self, folder: Path, *arguments: str, prefixes: Prefixes = ([], []), **settings: str
    ) -> None:
        self._folder, port = folder, a_free_port()
        self.logs = [folder / f"log{node}" for node in (0, 1)]
        self.scripts = []
        self._seen: set[int] = set()
        for node, (log, prefix) in enumerate(zip(self.logs, prefixes, strict=True)):
            script = str(REPOSITORY / f"launch_node{node}.sh")
            with log.open("w") as file:
                process = subprocess.Popen(
                    [*prefix, script, *ARGUMENTS, *arguments],
                    cwd=folder,
                    env=environment(MASTER_PORT=port, **{"GPUS_PER_NODE": "2"} | settings),
                    stdout=file,
                    stderr=file,
                )
            self.scripts.append(process)

    def wait_for_step(self, step: int) -> None:
        metrics = self._folder / "run/metrics.jsonl"
        self._wait(
            lambda: (
                metrics.is_file()
                and any(entry["step"] >= step for entry in read_metrics(metrics.parent, "step"))
            )
        )

    def wait_for_words(self, words: str) -> None:
        """Until node 0 has said them."""
        self._wait(lambda: words in self.texts()[0])

    def _wait(self, is_time: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 480
        while not is_time():
            assert time.monotonic() < deadline, self.texts()
            assert all(script.poll() is None for script in self.scripts), self.texts()
            time.sleep(0.1)
        self.remember()

    def remember(self) -> None:
        """Take note of every process there is."""
        for script in self.scripts:
            self._seen.update(descendants(script.pid))

    def ranks(self, node: int) -> list[int]:
        """The process ids of a node's ranks."""
        pids = descendants(self.scripts[node].pid)
        return [pid for pid in pids if "train_fsdp.py" in command(pid)]

    def processes_with(self, text: str) -> list[str]:
        """The commands of those that have this text in their environment or in an argument."""
        found = []
        for pid in [pid for pid in self._seen if is_running(pid)]:
            with contextlib.suppress(OSError):
                environ = Path(f"/proc/{pid}/environ").read_text(encoding="utf-8")
                found += [command(pid)] if text in environ + command(pid) else []
        return found

    def end(self) -> list[tuple[int, str]]:
        """Exit code and last line of each node, when every process that was ever seen is gone."""
        turns = 0
        while left := [pid for pid in self._seen if is_running(pid)]:
            turns += 1  # turns stretch on a busy machine, as the agents' do
            assert turns * 0.2 < GONE_WITHIN_S, [command(pid) for pid in left] + self.texts()
            self.remember()
            for script in self.scripts:
                script.poll()
            time.sleep(0.2)
        ended = [
            (script.wait(40), text.splitlines()[-1])
            for script, text in zip(self.scripts, self.texts(), strict=True)
        ]
        for (code, last), text in zip(ended, self.texts(), strict=True):
            assert code < 0 or text.count(last) == 1, text  # a killed agent says nothing
        return ended

    def require_end(self, code: int, *patterns: str) -> None:
        """Both nodes end with this code and a last line of its form: one for both, or one each."""
        for node, (actual, last) in enumerate(self.end()):
            pattern = f"ERROR: {patterns[node % len(patterns)]}"
            assert actual == code and re.fullmatch(pattern, last), self.texts()
            require_error_line(last)

    def texts(self) -> list[str]:
        return [log.read_text(encoding="utf-8") for log in self.logs]


@contextlib.contextmanager
def two_nodes(
    folder: Path, *arguments: str, prefixes: Prefixes = ([], []), **settings: str
) -> Iterator[Nodes]:
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


def resumes(folder: Path, **settings: str) -> None:
    step = read_metrics(folder / "run", "step")[-1]["step"] + 3
    with two_nodes(folder, f"train.max_steps={step}", **settings) as nodes:
        nodes.remember()
        for script in nodes.scripts:
            assert script.wait(500) == 0, nodes.texts()
        assert "Resumed from checkpoint_" in nodes.texts()[0]
    steps = [entry["step"] for entry in read_metrics(folder / "run", "step")]
    assert steps == list(range(1, step + 1))


def break_rank(
    folder: Path, rank: int, where: tuple[str, str], effect: str, nth: int = 5
) -> dict[str, str]:
    """The settings of a launch in which this rank fails in its nth step."""
    (folder / "fault").mkdir()
    if where == DATA:  # made two steps ahead: until the loop waits for it
        effect = f"time.sleep(3); {effect}"
    module, function = where
    text = FAULT.format(rank=rank, module=module, function=function, nth=nth, effect=effect)
    (folder / "fault/sitecustomize.py").write_text(text, encoding="utf-8")
    return on_path(folder / "fault")


def while_it_imports(folder: Path, program: str, effect: str) -> dict[str, str]:
    """The settings of a launch in which processes of this name, or this rank, do that when they
    begin."""
    (folder / "fault").mkdir()
    (folder / "fault/sitecustomize.py").write_text(
        "import os, signal, socket, sys, threading, time\nif os.environ.get('RANK') == "
        f"{program!r} or any(a.endswith({program!r}) for a in sys.orig_argv[1:4]):\n    {effect}\n",
        encoding="utf-8",
    )
    return on_path(folder / "fault")


def command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8")
    return ""


def descendants(pid: int) -> list[int]:
    """A process, and all that it has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [pid, *(each.pid for each in psutil.Process(pid).children(recursive=True))]
    return [pid]


def is_running(pid: int) -> bool:
    """Whether a process has not ended; a zombie has."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False
