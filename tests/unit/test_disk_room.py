"""Whether a run's disks have room for what it writes, and what a start deletes there."""

from __future__ import annotations

import errno
import os
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from helpers.ranks import world_of
from helpers.thread_ranks import save_steps
from torch import distributed as dist

from shardtune.checkpoint import Saver, clear_leftovers, durable_fs
from shardtune.checkpoint.commit import SaveAttempt
from shardtune.checkpoint.export.live import StepModels
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


@pytest.mark.parametrize(
    ("free", "is_linked", "is_written"), [(16, False, True), (15, False, False), (15, True, True)]
)
def test_a_model_of_a_step_leaves_room_for_the_next_checkpoint(
    free, is_linked, is_written, tmp_path, monkeypatch
):
    """Where both are on one disk."""
    written: list[Path] = []

    def write(out: Path, *_: Any) -> str:
        written.append(out)
        return ""

    if is_linked:
        (tmp_path / "checkpoints").symlink_to("/dev/shm")
        assert Path("/dev/shm").stat().st_dev != tmp_path.stat().st_dev, "it needs a second disk"
    monkeypatch.setattr(durable_fs, "free_bytes", lambda _: free * GB)
    live: Any = SimpleNamespace(n_bytes=6 * GB, write=write)
    world = world_of(0, 1, dist.HashStore())
    models = StepModels(RunDir(tmp_path, [0], None), live, lambda: 10 * GB, 1, world)
    assert bool(models.write(1)) == bool(written) == is_written


def test_room_is_kept_for_the_rest_of_a_save_and_the_next_one(tmp_path, monkeypatch):
    attempts = [SimpleNamespace(staging=tmp_path)]
    ended = threading.Event()
    saver = SimpleNamespace(disk_bytes=GB, _thread=None, _attempts=attempts)
    monkeypatch.setattr(durable_fs, "size", lambda _: GB // 4)
    assert Saver.to_be_saved(cast(Saver, saver)) == GB
    saver._thread = threading.Thread(target=ended.wait)
    saver._thread.start()
    assert Saver.to_be_saved(cast(Saver, saver)) == 7 * GB // 4
    ended.set()


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
