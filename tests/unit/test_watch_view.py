"""`shardtune watch`: what it shows of a run, while it loads, goes on and resumes."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers.ranks import world_of
from rich.console import Console
from test_report import write_run
from torch import distributed as dist

from shardtune.__main__ import run
from shardtune.checkpoint.run_dir import open_run_dir
from shardtune.errors import UserError
from shardtune.report.charts import make_charts
from shardtune.report.read_run import read_run
from shardtune.report.summary import figures
from shardtune.report.watch import Follower, sparkline, view


def test_the_view_shows_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["watch", str(write_run(tmp_path / "run"))]) == 0
    said = capsys.readouterr().out
    for part in (
        "model a/model, all weights",
        "60 of 120 (50%), 2 s each, 2 min left, its last step ended ",
        "9.0000 before training, 8.0000 at step 60",
        "501 tokens/s, MFU 30.0%, waiting for data 0.5%",
        "61.2 GB of a rank at most",
        "rank 3 on node0, 1.10 x the median, in data",
        "checkpoint_0000060, in 9 s, of the last step",
    ):
        assert part in " ".join(said.split()), said


def test_a_save_that_failed_is_shown_beside_the_last_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run", steps=3)
    failed = {"kind": "save", "step": 2, "seconds": 3.0, "stall_seconds": 0.5, "problem": "it is"}
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(failed) + "\n")
    assert run(["watch", str(folder)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "not saved checkpoint_0000002: it is" in said
    assert "checkpoint checkpoint_0000000, in 9 s, 3 steps ago" in said
    assert figures(read_run(folder))["steps"].endswith("; checkpoint_0000002 was not saved: it is")
    (chart,) = [each for each in make_charts([read_run(folder)]) if each.name == "saves"]
    assert chart.note == "How long each save took. 1 failed, the last one: it is."
    curves = {curve.label: curve.y[np.isfinite(curve.y)].tolist() for curve in chart.curves}
    assert curves["until it failed"] == [3.0] and curves["until it was committed"] == [9.0]


@pytest.mark.parametrize("command", ["watch", "report"])
def test_a_run_that_begins_behind_a_step_says_which_are_missing(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run", steps=3)
    file = folder / "metrics.jsonl"
    assert run([command, str(folder)]) == 0
    assert "missing" not in capsys.readouterr().out
    resumed = [{"kind": "start", "step": 4, "total_steps": 9}, {"kind": "step", "step": 5}]
    file.write_text("".join(json.dumps(entry) + "\n" for entry in resumed), encoding="utf-8")
    assert run([command, str(folder)]) == 0
    assert "steps before 5 are missing: " in " ".join(capsys.readouterr().out.split())


def test_a_run_that_still_loads_is_watched_until_its_first_step_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    with pytest.raises(UserError, match="no run"):
        Follower(folder)
    with loading(folder):
        assert run(["watch", str(folder)]) == 0
        said = capsys.readouterr().out
        assert "(the run still loads)" in said and "version" not in said and "missing" not in said
        assert run(["report", str(folder)]) == 2
        assert "the run still loads - wait for its first step" in capsys.readouterr().err
        follower = Follower(folder)
        follower.read()
    follower.read()
    assert figures(follower.run)["steps"] == "(the run ended before its first step)"
    for command in ("watch", "report"):
        assert run([command, str(folder)]) == 2
        assert "the run ended before its first step - the ERROR: line" in capsys.readouterr().err
    (folder / "metrics.jsonl").write_text('{"kind": "step", "step": 1}\n', "utf-8")
    follower.read()
    assert follower.run.last_step == 1


@contextlib.contextmanager
def loading(folder: Path) -> Iterator[None]:
    """Have another process open a run's directory, until it is killed."""
    context = multiprocessing.get_context("fork")
    ready = context.Event()

    def load() -> None:
        directory = open_run_dir(folder, world_of(0, 1, dist.HashStore()))
        ready.set()
        time.sleep(60)
        del directory

    process = context.Process(target=load)
    process.start()
    try:
        assert ready.wait(30)
        yield
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize(
    ("lines", "has_ended", "expected"),
    [
        (
            ['{"kind": "step", "step": 3}'],
            True,
            "3 of 9 (33%), stopped: no process of the run is left",
        ),
        (['{"kind": "step", "step": 3, "seconds": 2}'], False, "3 of 9 (33%), 2 s each, 12 s left"),
        (['{"kind": "step", "step": 3}'], False, "3 of 9 (33%)"),
        (
            ['{"kind": "step", "step": 1}', "{"],
            False,
            "left out 1 line of metrics.jsonl that cannot",
        ),
        (['{"kind": "step", "step": 1}', "{", "["], False, "left out 2 lines of"),
        (
            ['{"kind": "step", "step": 2}', '{"kind": "save", "step": 1, "seconds": 3}'],
            False,
            "in 3 s, 1 step ago",
        ),
    ],
)
def test_the_view_says_what_there_is(
    lines: list[str], has_ended: bool, expected: str, tmp_path: Path
) -> None:
    start = '{"kind": "start", "step": 0, "total_steps": 9}'
    (tmp_path / "metrics.jsonl").write_text("\n".join([start, *lines, ""]), encoding="utf-8")
    if has_ended:
        (tmp_path / ".lock").touch()
    follower = Follower(tmp_path)
    follower.read()
    said = io.StringIO()
    Console(width=200, file=said).print(view(follower.run, []))
    (steps,) = [line for line in said.getvalue().splitlines() if line.startswith("steps ")]
    assert expected in said.getvalue()
    assert ("each" in steps, " s left" in steps) == ("each" in expected,) * 2


@pytest.mark.parametrize("name", ["", "multinode_training.log"])
def test_watch_refuses_what_is_no_run(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "multinode_training.log").write_text("Saved checkpoint_0000010\n", "utf-8")
    assert run(["watch", str(tmp_path / name)]) == 2
    assert "no run (neither metrics.jsonl nor .lock is there)" in capsys.readouterr().err


def test_the_view_follows_lines_in_pieces_and_a_file_written_anew(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=3)
    follower = Follower(folder)
    follower.read()
    assert follower.run.last_step == 3
    line = json.dumps({"kind": "step", "step": 4, "loss": 1.0}).encode()
    with (folder / "metrics.jsonl").open("ab", buffering=0) as file:
        file.write(line[:9])
        follower.read()
        assert follower.run.last_step == 3
        file.write(line[9:] + b"\n")
    follower.read()
    assert follower.run.last_step == 4
    (folder / "metrics.tmp").write_bytes(b'{"kind": "step", "step": 2}\n')
    (folder / "metrics.tmp").replace(folder / "metrics.jsonl")  # as a resume does
    follower.read()
    assert follower.run.last_step == 2


def test_a_terminal_shows_new_steps_until_ctrl_c(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=3)
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "shardtune", "watch", str(folder)]
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    os.set_blocking(master, False)
    said, deadline, is_written = "", time.monotonic() + 60, False
    while "4 of 6" not in said and time.monotonic() < deadline:
        try:
            said += os.read(master, 1 << 16).decode()
        except BlockingIOError:
            time.sleep(0.05)
        if "3 of 6" in said and not is_written:
            is_written = True
            with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write('{"kind": "step", "step": 4, "loss": 1.0, "seconds": 1.0}\n')
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
    os.close(master)
    assert "4 of 6" in said and "Traceback" not in said, said


def test_a_sparkline_has_the_shape_of_its_values() -> None:
    assert sparkline(np.array([1.0, 2.0, 3.0, np.nan, 8.0])) == "▁▂▃█"
    assert sparkline(np.arange(1000.0)) == "".join(sorted(sparkline(np.arange(1000.0))))
    assert len(sparkline(np.arange(1000.0))) <= 48 and sparkline(np.array([])) == ""
