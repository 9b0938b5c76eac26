"""Runs that save at every step, and are disturbed: their command, and what is left of them."""

import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from helpers.faults import Fault, run_with
from helpers.ranks import on_ranks
from helpers.small_runs import SETTINGS, steps_of, write_inputs
from shardtune.checkpoint import open_checkpoint
from shardtune.checkpoint.manifest import find_checkpoints, step_of
from shardtune.checkpoint.verify import check_files

Completed = subprocess.CompletedProcess[str]
ENDLESS = ("scheduler.name=constant", "scheduler.warmup_ratio=0", "train.epochs=1000")
COMMAND = [
    "--config",
    "config.yaml",
    *SETTINGS,
    *ENDLESS,
    "checkpoint.every_steps=1",
    "export.final=false",
]


def saving_inputs(folder: Path, model: Path) -> Path:
    """Data, and a model with dropout: a random state that is not put back changes every loss."""
    return write_inputs(folder, model, dropout=0.2, records=30)


def command(*settings: str) -> list[str]:
    """COMMAND with these added, or in their place."""
    given = {setting.partition("=")[0] for setting in settings}
    return [*(setting for setting in COMMAND if setting.partition("=")[0] not in given), *settings]


def run(
    folder: Path,
    *settings: str,
    faults: Sequence[Fault] = (),
    ranks: int = 2,
    work: Callable[..., Any] = run_with,
    **how: Any,
) -> Completed:
    return on_ranks(ranks, work, list(faults), command(*settings), cwd=folder, **how)


class Undisturbed:
    """The first steps of a run that never saves before its end; a longer one is made when asked."""

    def __init__(self, inputs: Path, folders: pytest.TempPathFactory) -> None:
        self._inputs, self._folders = inputs, folders
        self._seen: list[Any] = []

    def __call__(self, count: int) -> list[Any]:
        if count > len(self._seen):
            here = self._folders.mktemp("undisturbed") / "here"
            shutil.copytree(self._inputs, here)
            steps = f"train.max_steps={max(count, 40)}"
            done = run(here, steps, "checkpoint.every_steps=0")
            assert done.returncode == 0, done.stderr
            self._seen = steps_of(here / "run")
        return self._seen[:count]


def checkpoints(folder: Path) -> list[int]:
    """The steps of all that is listed, oldest first; each must be whole."""
    found = find_checkpoints(folder / "run/checkpoints")
    for path in found:
        checkpoint = open_checkpoint(path)
        assert not [
            problem
            for problem in check_files(checkpoint, list(checkpoint.files), 1).values()
            if problem
        ]
    return sorted(map(step_of, found))


def hidden(folder: Path) -> list[str]:
    return [path.name for path in (folder / "run/checkpoints").glob(".*")]


def said(done: Completed, what: str) -> list[int]:
    """The steps of the checkpoints in the log lines that begin so."""
    return [
        int(step) for step in re.findall(rf"^{what}:? checkpoint_(\d+)", done.stdout, re.MULTILINE)
    ]
