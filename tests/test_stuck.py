"""What the watchdog says of ranks that are stuck, and of how they ended, without a launch."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from multiprocessing import Pipe, Process
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import chats, write_jsonl
from helpers.documented import require_documented
from helpers.ranks import on_ranks, run_script

from shardtune.cluster.children import die_with_parent
from shardtune.cluster.local_ranks import LocalRanks
from shardtune.distributed import watchdog, world
from shardtune.distributed.progress import Progress
from shardtune.model import build as model
from shardtune.model import loss

HOST = socket.gethostname()
BEHIND = r"rank 1 on {host}: did not arrive within 4 s \(at hang, .+\), in step 1 \(forward and backward\) - "


@pytest.fixture
def folder(tmp_path: Path, models: dict[str, Path]) -> Path:
    write_jsonl(tmp_path / "train.jsonl", chats(30))
    (tmp_path / "config.yaml").write_text(
        f"model: {{path: {models['llama']}, compute_dtype: float32}}\ndata: {{train: train.jsonl, max_length: 128}}\n",
        encoding="utf-8",
    )
    return tmp_path


def dawdle(wait: Callable[[], object], arguments: list[str]) -> None:
    """A run whose rank 1 does this before it loads the model."""
    vars(watchdog)["_LOOK_AT_ALL_EVERY"] = 1
    if os.environ["RANK"] == "1":
        build = model.build_model
        vars(model)["build_model"] = lambda *asked: (wait(), build(*asked))[1]
    run_script(arguments)


def hang_in_the_first_step(rank: str, arguments: list[str]) -> None:
    vars(watchdog)["FIRST_STEP_TIMEOUT_S"] = 4
    if rank in ("all", os.environ["RANK"]):
        vars(loss)["summed_loss"] = lambda *_: hang()
    run_script(arguments)


@pytest.mark.parametrize(
    ("rank", "replicas", "said"),
    [
        ("1", 1, BEHIND),
        ("1", 2, BEHIND),
        pytest.param(
            "all",
            1,
            r"rank \d on {host}: nothing moved for 4 s, with no rank behind the others, ",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_rank_that_is_stuck_in_the_first_step(
    rank: str, replicas: int, said: str, folder: Path
) -> None:
    arguments = ["--config", "config.yaml", "distributed.step_timeout_s=1", "eval.baseline=false"]
    arguments.append(f"parallel.replicate={replicas}")
    done = on_ranks(2, hang_in_the_first_step, rank, arguments, cwd=folder, grace_s=10)
    (line,) = re.findall("^ERROR: .*", done.stderr, re.MULTILINE)
    assert done.returncode == 1 and re.match(f"ERROR: {said.format(host=HOST)}", line), done.stderr
    require_documented("running", line)


def hang() -> None:
    time.sleep(3600)


def work() -> None:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        sum(range(10_000))


@pytest.mark.parametrize(
    ("wait", "code"), [(hang, 1), pytest.param(work, 0, marks=pytest.mark.full)]
)
def test_a_rank_that_takes_long_outside_of_steps(
    wait: Callable[[], object], code: int, folder: Path
) -> None:
    """It may, as long as it does something."""
    arguments = [
        "--config",
        "config.yaml",
        "distributed.step_timeout_s=3",
        "train.max_steps=1",
        "export.final=false",
    ]
    done = on_ranks(2, dawdle, wait, arguments, cwd=folder, grace_s=10)
    assert done.returncode == code, done.stderr
    if code:
        said = rf"rank 1 on {HOST}: did not arrive within 3 s \(at hang, test_stuck.py:\d+\), in loading the model"
        assert done.stderr.count("ERROR: ") == 1, done.stderr
        (line,) = re.findall("^ERROR: (.*)", done.stderr, re.MULTILINE)
        assert re.match(
            rf"{said} - see its traceback there, or raise distributed.step_timeout_s if ", line
        ), line
        require_documented("running", f"ERROR: {line}")


def serve(port: Connection) -> None:
    die_with_parent(os.getppid())
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.send(store.port)
    time.sleep(3600)


def fail_without_a_store(error: Exception) -> None:
    """A rank beside one of another node, whose store falls silent, as behind a cut cable, before it fails with this."""
    vars(watchdog)["_SILENT_S"] = 3
    own, other = Pipe()
    server = Process(target=serve, args=(other,))
    server.start()
    store = dist.TCPStore("127.0.0.1", own.recv(), is_master=False)
    store.set("watchdog/beat/1", json.dumps(watchdog.Beat(0, 0, "step 1 (data)", "", 0.0)))
    peers = [watchdog.Peer(0, 0, HOST, os.getpid()), watchdog.Peer(1, 1, "another", 1)]
    mine = watchdog.Watchdog(0, peers, store, Progress(torch.device("cpu")), 600, 3600)
    mine.start()
    vars(world)["_watchdogs"].append(mine)

    def fail() -> None:
        assert server.pid
        os.kill(server.pid, signal.SIGSTOP)
        raise error

    world.run(fail)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(116, "Stale file handle"), r"OSError: \[Errno 116\] Stale file handle, in "),
        (
            dist.DistError("it is gone"),
            r"node 0 \({host}\) is out of reach, .* has not answered for 3 s, in ",
        ),
    ],
)
def test_a_rank_that_fails_while_node_0_is_silent(
    error: Exception, said: str, tmp_path: Path
) -> None:
    """What it asks of the store is never answered, and it ends all the same, with a word."""
    done = on_ranks(1, fail_without_a_store, error, cwd=tmp_path, timeout_s=30)
    line = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and re.match(
        rf"ERROR: rank 0 on {HOST}: {said.format(host=HOST)}", line
    ), done.stderr
    require_documented("running", line)


def test_how_a_process_ended_is_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end is seen before torchrun, which hears of several at once, has noted how."""
    monkeypatch.setenv("SHARDTUNE_LAUNCH_DIR", str(tmp_path))
    ended = [subprocess.Popen(["sh", "-c", f"exit {code}"]) for code in (3, 4)]
    handles = [os.pidfd_open(process.pid) for process in ended]
    for handle in handles:
        select.select([handle], [], [])
        os.close(handle)
    noting = threading.Timer(0.1, LocalRanks(tmp_path).note_ends)
    noting.start()
    hows = [watchdog.end_of(process.pid)[0] for process in ended]
    noting.join()
    for process in ended:
        process.wait()
    assert hows == ["ended with code 3", "ended with code 4"]
