"""`shardtune watch`: what it shows of a run, while it loads, goes on and resumes."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.data_run import write
from test_report import write_run

from shardtune.__main__ import run
from shardtune.report.read_run import read_run
from shardtune.report.summary import figures


def append(folder: Path, entry: dict[str, Any]) -> None:
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def test_the_view_shows_a_run(tmp_path, capsys):
    assert run(["watch", str(write_run(tmp_path / "run"))]) == 0
    said = capsys.readouterr().out
    for part in ("60 of 120, ", "8.5000 at step 60", "MFU 30.0%", "rank 3 ", "checkpoint_0000060"):
        assert part in " ".join(said.split()), said


def test_a_save_that_failed_is_shown_beside_the_last_checkpoint(tmp_path, capsys):
    folder = write_run(tmp_path / "run", steps=3)
    append(folder, {"kind": "save", "step": 2, "seconds": 3.0, "problem": "it is"})
    assert run(["watch", str(folder)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "checkpoint checkpoint_0000000" in said
    assert "; checkpoint_0000002 was not saved: it is" in said
    assert figures(read_run(folder))["steps"].endswith("; checkpoint_0000002 was not saved: it is")


@pytest.mark.parametrize("command", ["watch", "report"])
def test_a_run_that_begins_behind_a_step_says_which_are_missing(command, tmp_path, capsys):
    folder = write_run(tmp_path / "run", steps=3)
    assert run([command, str(folder)]) == 0
    assert "missing" not in capsys.readouterr().out
    resumed = [{"kind": "start", "step": 4, "total_steps": 9}, {"kind": "step", "step": 5}]
    write(folder / "metrics.jsonl", resumed)
    assert run([command, str(folder)]) == 0
    assert "steps before 5 are missing: " in " ".join(capsys.readouterr().out.split())


def test_a_terminal_waits_for_a_run_and_shows_new_steps_until_ctrl_c(tmp_path):
    folder = tmp_path / "run"
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
        if "Waiting for a run there." in said and not folder.exists():
            write_run(folder, steps=3)
        if "3 of 6" in said and not is_written:
            is_written = True
            append(folder, {"kind": "step", "step": 4, "loss": 1.0, "seconds": 1.0})
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
    os.close(master)
    assert "4 of 6" in said and "Traceback" not in said, said
