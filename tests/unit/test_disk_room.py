"""Whether a run's disks have room for what it writes, and what a start deletes there."""

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.ranks import world_of
from helpers.thread_ranks import save_steps
from torch import distributed as dist

from shardtune.checkpoint import clear_leftovers, durable_fs
from shardtune.checkpoint.commit import SaveAttempt
from shardtune.checkpoint.run_dir import RunDir, open_run_dir
from shardtune.errors import UserError
from shardtune.log import setup_logging

GB = 10**9


def test_a_disk_without_room_for_one_checkpoint_is_said_at_the_start(tmp_path, monkeypatch, capsys):
    run_dirs = [tmp_path / "disk0", tmp_path / "disk1"]
    setup_logging(True, True)
    monkeypatch.setattr(durable_fs, "free_bytes", lambda path: GB if "disk1" in str(path) else 0)
    save_steps((1,), 2, run_dirs, keep=1)
    (warned,) = [line for line in capsys.readouterr().out.splitlines() if "WARNING" in line]
    assert "disk0/checkpoints" in warned


def test_what_a_start_deletes_is_said(tmp_path, capsys):
    """A whole checkpoint is moved aside."""
    directory = tmp_path / "checkpoints"
    for name, is_whole in {
        ".checkpoint_0000002.0123456789ab": False,
        ".checkpoint_0000001.deleting": False,
        ".checkpoint_0000003.0123456789ab": True,
    }.items():
        (directory / name).mkdir(parents=True)
        (directory / name / "part").write_bytes(bytes(100_000))
        if is_whole:
            (directory / name / "COMPLETE").touch()
    (tmp_path / ".adapter.writing").mkdir()
    world = world_of(0, 1, dist.HashStore())
    run_dir = RunDir(tmp_path, [0], None)
    setup_logging(True, True)
    clear_leftovers(run_dir, None, world)
    said = capsys.readouterr().out
    assert re.match(r"Deleted, .*: \.checkpoint_\S+, \.checkpoint_\S+, \.adapter\S+ \(0.000", said)
    assert not (tmp_path / ".adapter.writing").exists()
    assert [path.name for path in directory.iterdir()] == ["checkpoint_0000003.aside1"]
    clear_leftovers(run_dir, None, world)
    assert "Deleted" not in capsys.readouterr().out


def test_a_disk_of_checkpoints_that_is_not_mounted_is_no_new_run(tmp_path):
    world = world_of(0, 1, dist.HashStore())
    (tmp_path / "checkpoints").symlink_to("/absent/disk")
    with pytest.raises(UserError, match="is a link to /absent/disk, and that does not"):
        open_run_dir(tmp_path, world)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (errno.ENOSPC, "40 GB of the disk of run/checkpoints, 27 GB more than it has free"),
        (errno.EDQUOT, "40 GB of the disk of run/checkpoints, 27 GB more than it has free"),
        (errno.EIO, "'file'"),
    ],
)
def test_a_full_disk_says_what_is_missing(error, said, monkeypatch):
    """What the attempt itself has written will go, and counts as free."""
    monkeypatch.setattr(durable_fs, "free_bytes", lambda _: 3 * GB)
    monkeypatch.setattr(durable_fs, "size", lambda _: 10 * GB)
    paths = {name: Path("run/checkpoints") / name for name in ("staging", "final")}
    fields: Any = {**paths, "rank": 0, "leader_of": [0]}
    fields |= {"keep": 1, "assets": {}, "store": dist.HashStore(), "timeout_s": 1}
    attempt = SaveAttempt(**fields, disk_bytes=40 * GB)
    line = attempt.describe(OSError(error, os.strerror(error), "file"))
    assert os.strerror(error) in line and line.endswith(said)
