"""`shardtune COMMAND`: exit codes, lines, signals and garbage of every command."""

import gc
import signal
import subprocess
import sys
import weakref
from itertools import count
from typing import Any

import pytest
from helpers.commands import REPOSITORY, completed

from shardtune import __main__ as command_line
from shardtune import garbage_collection
from shardtune.__main__ import run
from shardtune.errors import Aborted, RunFailed, UserError
from shardtune.garbage_collection import imports_without_gc
from shardtune.log import logger, node_logger, setup_logging

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


PROGRAM = """
import os, signal, sys, time, weakref
from shardtune.__main__ import code_of
from shardtune.distributed.signals import end_on_signal

class Signals:
    def __del__(self):
        os.kill(os.getpid(), {number})

def work():
    owner = Signals()
    weakref.finalize(owner, os.kill, os.getpid(), {number})
    del owner
    time.sleep(60)

end_on_signal("before it was done - run it again", code=7)
sys.exit(code_of(work))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_lands_in_a_finalizer_ends_the_process(number):
    """Python drops what a finalizer raises."""
    program = PROGRAM.format(number=int(number))
    done = completed([sys.executable, "-c", program], timeout_s=10)
    line = f"ERROR: ended by {number.name} before it was done - run it again\n"
    assert (done.returncode, done.stderr) == (7, line)


def test_garbage_is_collected_at_every_fiftieth_micro_batch_alone(monkeypatch):
    class Cycle:
        def __init__(self) -> None:
            self.me = self

    monkeypatch.setattr(garbage_collection, "_micro_batches", count(1))
    with garbage_collection.collected_by_micro_batch():
        assert not gc.isenabled() and gc.get_freeze_count() > 0
        lost = weakref.ref(Cycle())
        for _ in range(49):
            garbage_collection.collect_if_due()
            assert lost() is not None
        garbage_collection.collect_if_due()
        assert lost() is None
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_nothing_is_collected_during_imports_and_later_collections_leave_them_out():
    gc.unfreeze()
    with imports_without_gc():
        assert not gc.isenabled()
    assert gc.isenabled() and gc.get_freeze_count() > 0
    gc.unfreeze()


@pytest.mark.parametrize(
    ("is_main", "is_node_main", "shown"),
    [(True, True, "run\nWARNING: hot\nnode\n"), (False, True, "node\n"), (False, False, "")],
)
def test_lines_appear_once_a_run_or_once_a_node(is_main, is_node_main, shown, capsys):
    setup_logging(is_main, is_node_main)
    logger.info("run")
    logger.warning("hot")
    node_logger.info("node")
    assert capsys.readouterr() == (shown, "")


def test_no_library_shows_progress_in_a_log():
    """datasets is imported later, where it is needed."""
    program = """
from shardtune.hub import datasets_library
from shardtune.log import quiet_libraries
quiet_libraries(is_main=True)
print(datasets_library().are_progress_bars_disabled())
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
