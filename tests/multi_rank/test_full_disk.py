"""A disk that is full: said at the start, and with each step that is not saved."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.commands import REPOSITORY, completed, needs_namespaces
from helpers.saving_runs import command, saving_inputs

# Run a command with a disk of so many kB in run/, and list then what it has left there.
ON_A_SMALL_DISK = """
mount -t tmpfs -o size=$0k tmpfs run || exit 99
"$@"; code=$?
find run/checkpoints -mindepth 1 -maxdepth 1 2>/dev/null
exit $code
"""
IN_A_NAMESPACE = ["unshare", "--map-root-user", "--mount", "sh", "-c"]


def run_on(kilobytes: int, folder: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    script = [sys.executable, str(REPOSITORY / "train_fsdp.py"), *command(*settings)]
    (folder / "run").mkdir(exist_ok=True)
    done = completed([*IN_A_NAMESPACE, ON_A_SMALL_DISK, f"{kilobytes}", *script], cwd=folder)
    assert done.returncode != 99, f"a process must be able to mount a disk: {done.stderr}"
    return done


@pytest.mark.full
@needs_namespaces
def test_a_save_that_finds_the_disk_full_is_said_with_each_step_and_leaves_nothing(
    models, tmp_path
):
    saving_inputs(tmp_path, models["llama"])
    settings = ["train.max_steps=2", "checkpoint.mode=sync"]
    done = run_on(200, tmp_path, *settings)
    assert done.returncode == 1, done.stderr
    assert re.search(r"^WARNING: The disk of run/checkpoints has 0\.0", done.stdout, re.M)
    missing = r"No space left on device; a checkpoint takes 0\.0\d+ GB of the disk of "
    missing += r"run/checkpoints, 0\.0\d+ GB more than it has free"
    assert re.search(rf"^Not saved: checkpoint_0000001: rank 0 on .*{missing}$", done.stdout, re.M)
    first, second = re.findall(r"^Step .*", done.stdout, re.M)
    assert "saved" not in first
    assert re.search(rf" \| checkpoint_0000001 was not saved: .*{missing}$", second)
    assert re.match(rf"ERROR: checkpoint_0000002 was not .*{missing}", done.stderr.splitlines()[-1])
    assert ".checkpoint" not in done.stdout
