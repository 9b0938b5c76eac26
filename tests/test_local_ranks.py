"""What torchrun knows of the ranks of its node, whose folder fills up or is removed while they run."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import a_free_port, needs_namespaces
from helpers.documented import require_documented
from helpers.launches import (
    ARGUMENTS,
    descendants,
    end,
    fill,
    small_disk,
    start,
    two_nodes,
    write_run,
)

from shardtune.cluster.local_ranks import LocalRanks
from shardtune.distributed import watchdog
from shardtune.errors import AGAIN

HOST = socket.gethostname()
TICKS = 6  # of a second, as torchrun's: one more than a rank that may be silent for 0 s has


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a launch whose script is this process."""
    monkeypatch.setenv("SHARDTUNE_LAUNCH_DIR", str(tmp_path))
    monkeypatch.setenv("SHARDTUNE_AGAIN", AGAIN)
    (tmp_path / "torchrun.pid").touch()
    return tmp_path


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen(["sleep", "99"])
    yield started
    started.kill()
    started.wait()


def write_place(folder: Path, pid: int) -> None:
    (folder / "rank_1").write_text(
        f"rank 1 on {HOST}, last seen in step 3 (data)\n{pid} 0\n", encoding="utf-8"
    )


def ticks(ranks: LocalRanks, count: int) -> None:
    for _ in range(count):
        ranks.look()
        ranks.end_the_silent(1.0)


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_rank_without_a_sign_of_life(
    is_stopped: bool, launch: Path, process: subprocess.Popen[bytes]
) -> None:
    """Stopped, though its folder is gone; or with a file that stands still where this process can touch its own."""
    write_place(launch, process.pid)
    ranks = LocalRanks(launch)
    ranks.look()
    if is_stopped:
        process.send_signal(signal.SIGSTOP)
        while "T" not in Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8").split()[2]:
            time.sleep(0.01)
        (launch / "torchrun.pid").unlink()
    ticks(ranks, TICKS - 1)
    assert process.poll() is None
    ticks(ranks, 2)
    assert process.wait(9) == -signal.SIGKILL
    code, line = (launch / "outcome").read_text(encoding="utf-8").splitlines()
    said = rf"rank 1 on {HOST}, last seen in step 3 \(data\): no sign of life for \d s, its process was stopped or .* - .*"
    assert code == "1" and re.fullmatch(said, line)
    require_documented("running", f"ERROR: {line}")


def test_a_file_that_nobody_could_touch(launch: Path, process: subprocess.Popen[bytes]) -> None:
    """Neither the rank nor this process: nothing follows from it."""
    write_place(launch, process.pid)
    (launch / "torchrun.pid").unlink()
    ticks(LocalRanks(launch), 3 * TICKS)
    assert process.poll() is None and not (launch / "outcome").exists()


@needs_namespaces
def test_a_rank_that_finds_no_room_for_its_place(
    tmp_path: Path, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lives, and is left alone."""
    write: Any = vars(watchdog)["_write_place"]
    me, progress = watchdog.Peer(1, 1, HOST, process.pid), SimpleNamespace(place="step 3 (data)")
    monkeypatch.setattr(watchdog, "_SILENT_S", 0)
    with small_disk(tmp_path / "disk") as disk:
        monkeypatch.setenv("SHARDTUNE_LAUNCH_DIR", str(disk))
        (disk / "torchrun.pid").touch()
        write(me, progress)
        fill(disk)
        ranks = LocalRanks(disk)
        progress.place = "step 4 (data)"
        for _ in range(2 * TICKS):
            write(me, progress)
            time.sleep(0.02)  # more than a tick of the clock of files
            ticks(ranks, 1)
        assert "step 3" in (disk / "rank_1").read_text(encoding="utf-8")
    assert process.poll() is None


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("sys.exit(75)", 75, None),
        ("sys.exit(2)", 2, None),
        ("sys.exit(1)", None, None),
        (
            "os.kill(os.getpid(), signal.SIGSEGV)",
            1,
            "ended by SIGSEGV, last seen in step 3 (data) - see what it said",
        ),
    ],
)
def test_how_a_rank_ended_whose_folder_is_gone(
    line: str, code: int | None, said: str | None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A rank prints its last word itself then; what was known of it before is kept."""
    program = f"""
import os, shutil, signal, subprocess, sys
from pathlib import Path
import distTest.local_ranks as local_ranks
local_ranks.speak_for = lambda ranks, line: (1, line)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
folder = Path({str(tmp_path / "launch")!r})
folder.mkdir()
child = subprocess.Popen([sys.executable, "-c", "import os, signal, sys; input(); {line}"], stdin=subprocess.PIPE)
(folder / "watched").touch()
(folder / "rank_1").write_text(f"rank 1 on host, last seen in step 3 (data)\\n{{child.pid}} 40\\n")
ranks = local_ranks.LocalRanks(folder)
ranks.look()
shutil.rmtree(folder)
child.stdin.write(b"\\n")
child.stdin.close()
os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
ranks.note_ends()
print(ranks.exit_code)
"""
    known = os.environ | {
        "SHARDTUNE_LAUNCH_DIR": str(tmp_path / "launch"),
        "SHARDTUNE_AGAIN": AGAIN,
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=known,
        timeout=60,
        check=True,
    )
    assert done.stdout == f"{32 + code if code else None}\n", done.stderr
    assert (f"ERROR: rank 1 on host: {said}" in done.stderr) if said else "ERROR" not in done.stderr


@pytest.fixture
def folder(tmp_path: Path, models: dict[str, Path]) -> Path:
    return write_run(tmp_path, models["llama"])


@needs_namespaces
def test_a_disk_that_is_full_when_a_launch_begins(folder: Path) -> None:
    with small_disk(folder / "disk") as disk:
        fill(disk)
        code, _, errors = end(
            start(
                "launch_node0.sh",
                *ARGUMENTS,
                "train.max_steps=1",
                cwd=folder,
                NNODES="1",
                TMPDIR=str(disk),
            )
        )
        assert [file.name for file in disk.iterdir()] == ["filler"]
    line = f"ERROR: no temporary folder can be made in {disk} - make room there, or set TMPDIR"
    assert code == 2 and errors.splitlines()[-1] == line
    require_documented("preflight", line)


@needs_namespaces
@pytest.mark.parametrize(
    ("how", "processes"),
    [
        ("full", "1"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (("gone", "2"), ("full", "2"), ("gone", "1"))
        ),
    ],
)
def test_a_signal_to_a_run_whose_folder_is(how: str, processes: str, folder: Path) -> None:
    with (
        small_disk(folder / "disk") as disk,
        two_nodes(folder, TMPDIR=str(disk), GPUS_PER_NODE=processes) as nodes,
    ):
        nodes.wait_for_step(3)
        time.sleep(2)  # torchrun looks every second
        for launched in disk.glob("shardtune.*"):
            if how == "gone":
                shutil.rmtree(launched)
        fill(disk)
        nodes.scripts[1].terminate()
        for code, last in nodes.end():
            said = rf"ERROR: stopped by SIGTERM on {HOST} after saving step \d+ - run the same command again to resume"
            assert code == 75 and re.fullmatch(said, last), nodes.texts()
        assert all(text.count("ERROR") == 1 for text in nodes.texts()), nodes.texts()


@needs_namespaces
@pytest.mark.full
def test_a_rank_that_is_killed_where_the_disk_is_full(folder: Path) -> None:
    """It is alone on its node; and what it did last is known from before."""
    with (
        small_disk(folder / "disk") as disk,
        two_nodes(folder, TMPDIR=str(disk), GPUS_PER_NODE="1") as nodes,
    ):
        nodes.wait_for_step(3)
        time.sleep(2)
        processes = [
            file.read_text(encoding="utf-8") for file in disk.glob("shardtune.*/processes")
        ]
        ranks = {int(pid) for text in processes for pid in text.split()}
        fill(disk)
        (rank,) = ranks & {*descendants(nodes.scripts[1].pid)}
        os.kill(rank, signal.SIGKILL)
        for code, last in nodes.end():
            assert code == 1 and re.fullmatch(
                rf"ERROR: rank 1 on {HOST}: ended without a word, last seen .*", last
            )


@needs_namespaces
@pytest.mark.full
def test_a_disk_that_is_full_for_a_while(folder: Path) -> None:
    """For longer than a rank may be silent; it is alone on its node."""
    with (
        small_disk(folder / "disk") as disk,
        two_nodes(folder, TMPDIR=str(disk), GPUS_PER_NODE="1") as nodes,
    ):
        nodes.wait_for_step(3)
        filler = fill(disk)
        time.sleep(55)
        filler.unlink()
        time.sleep(3)
        assert [script.poll() for script in nodes.scripts] == [None, None], nodes.texts()
        nodes.scripts[0].terminate()
        assert [code for code, _ in nodes.end()] == [75, 75], nodes.texts()


@needs_namespaces
@pytest.mark.full
def test_a_run_that_finishes_without_its_folder(folder: Path) -> None:
    one = {
        "NNODES": "1",
        "GPUS_PER_NODE": "2",
        "MASTER_PORT": a_free_port(),
        "TMPDIR": str(folder / "temporary"),
    }
    (folder / "temporary").mkdir()
    node = start("launch_node0.sh", *ARGUMENTS, "train.max_steps=400", cwd=folder, **one)
    assert node.stdout is not None
    for line in node.stdout:
        if line.startswith("Step 2/"):
            break
    for launched in (folder / "temporary").glob("shardtune.*"):
        shutil.rmtree(launched)
    code, _, errors = end(node)
    assert code == 0 and "Traceback" not in errors, errors
