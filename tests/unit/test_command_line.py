"""`shardtune COMMAND`: exit codes and last lines that every command shares."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import pytest
from helpers.commands import REPOSITORY, completed

from shardtune import __main__ as command_line
from shardtune.__main__ import run
from shardtune.errors import Aborted, RunFailed, UserError

WITH_CONFIG = ("train", "plan", "inspect-data")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["verify"], "the following arguments are required: CHECKPOINT_DIR - see shardtune verify"),
        (["verify", "a", "--fast"], "unrecognized arguments: --fast - see shardtune verify --help"),
        (["exprot", "a"], "argument COMMAND: invalid choice: 'exprot'"),
        (["export", "a", "b", "--dtype=int8"], "argument --dtype: invalid choice: 'int8'"),
        *(
            ([name, "--config", "a", "--config=b"], "--config is given more")
            for name in WITH_CONFIG
        ),
    ],
)
def test_a_wrong_command_line_is_refused(arguments, line, capsys):
    assert run(arguments) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"ERROR: {line}") and errors.count("\n") == 1


def test_garbage_is_collected_once_a_command_has_imported(tmp_path):
    assert run(["verify", str(tmp_path / "nothing")]) != 0
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("error", "code", "lines"),
    [
        (UserError("a - b", "c - d"), 2, ["ERROR: a - b", "ERROR: c - d"]),
        (RunFailed("a - b"), 1, ["ERROR: a - b"]),
        (Aborted("a - b", code=75), 75, ["ERROR: a - b"]),
        (ValueError("a\nb"), 1, ["ERROR: ValueError: a - see the lines above"]),
        (BrokenPipeError(), 0, []),
    ],
)
def test_an_error_has_its_exit_code(error, code, lines, capfd, monkeypatch):
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setitem(command_line.COMMANDS, "verify", (fail, ""))
    assert run(["verify", "x"]) == code
    errors = capfd.readouterr().err.splitlines()
    assert [line for line in errors if line.startswith("ERROR")] == lines
    assert errors[len(errors) - len(lines) :] == lines


def test_a_reader_may_close_the_pipe():
    command = [sys.executable, "-m", "shardtune", "config-schema"]
    started = subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert started.stdout and started.stderr
    started.stdout.close()
    assert (started.stderr.read(), started.wait()) == (b"", 0)


@pytest.mark.parametrize("module", ["shardtune", "shardtune.cluster", "distTest.preflight"])
def test_missing_packages_are_named(module, tmp_path):
    """An interpreter that finds no site-packages has none of the requirements."""
    done = completed(
        [sys.executable, "-S", "-m", module], cwd=tmp_path, env={"PYTHONPATH": str(REPOSITORY)}
    )
    assert done.returncode == 2
    packages = "torch, transformers, pyarrow, accelerate, psutil, pydantic, yaml"
    assert done.stderr.startswith(f"ERROR: {sys.executable} has no {packages} - activate ")
    assert done.stderr.count("\n") == 1
