"""Whether a run's disks have room for what it writes: said before its weights are read."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from helpers.configs import configured
from helpers.ranks import world_of
from torch import distributed as dist

from shardtune.checkpoint import Disk, clear_leftovers, durable_fs, find_disks
from shardtune.checkpoint.commit import SaveAttempt
from shardtune.checkpoint.free_space import _disks_here
from shardtune.checkpoint.run_dir import RunDir, open_run_dir
from shardtune.errors import UserError
from shardtune.log import setup_logging
from shardtune.planner.arithmetic.disk_room import require_room, saves_left

GB = 10**9


@pytest.mark.parametrize(
    ("free", "cleared", "kept", "saves", "said"),
    [
        (9, 0, 0, 9, "free 1 GB, or name a run.dir on another disk; run.ignore_plan=true"),
        (7, 2, 0, 9, "9 GB are free (2 GB of it once unfinished saves are deleted) - free 1 GB"),
        (10, 0, 0, 9, "will add 36 GB"),  # three checkpoints, and the models
        (29, 0, 1, 9, ""),
        (25, 0, 1, 9, "Make room for 1 GB meanwhile, or lower checkpoint.keep"),
        (36, 0, 0, 9, ""),
        (16, 0, 0, 1, ""),  # one checkpoint alone
        (16, 0, 9, 9, ""),  # of more than are kept from now on, one is deleted for each save
    ],
)
def test_a_disk_without_room_is_refused_or_said(free, cleared, kept, saves, said, capsys):
    setup_logging(True, True)
    disk = Disk("runs/null", "node 0 (a)", 8, True, free * GB, cleared * GB, kept)
    given = disk, 10 * GB, 6 * GB, saves
    if free + cleared < 10:
        with pytest.raises(UserError) as refused:
            require_room(*given, configured(), None)
        assert said in str(refused.value)
        require_room(*given, configured("run.ignore_plan=true"), None)
        said = "the run starts all the same (run.ignore_plan=true)"
    else:
        require_room(*given, configured(), None)
    printed = capsys.readouterr().out
    assert (said in printed) if said else not printed


@pytest.mark.parametrize(
    ("settings", "checkpoint"),
    [
        ((), "runs/null/checkpoints/checkpoint_0000004"),
        (("run.resume=/saved/checkpoint_0000004",), "/saved/checkpoint_0000004"),
    ],
)
def test_a_resumed_run_without_room_is_told_how_it_keeps_its_checkpoint(settings, checkpoint):
    disk = Disk("runs/null", "node 0 (a)", 8, True, 9 * GB, 0, 1)
    with pytest.raises(UserError) as refused:
        require_room(disk, 10 * GB, 0, 1, configured(*settings), "checkpoint_0000004")
    way = f"or go on with run.resume={checkpoint} and a run.dir on another disk; run.ignore_plan"
    assert way in str(refused.value)


def test_saves_that_are_left_are_those_that_are_due():
    """Each that is due at a multiple, and the last step's."""
    for every in range(5):
        for total in range(1, 9):
            for first in range(total + 1):
                due = [
                    s == total or (every and s % every == 0) for s in range(first + 1, total + 1)
                ]
                assert saves_left(every, first, total) == sum(map(bool, due))


def test_what_a_start_deletes_counts_as_free_and_is_said(tmp_path, capsys):
    """Not what it moves aside."""
    directory = tmp_path / "checkpoints"
    for name, is_whole in {
        ".checkpoint_0000002.0123456789ab": False,
        ".checkpoint_0000001.deleting": False,
        ".checkpoint_0000003.0123456789ab": True,
        "checkpoint_0000001": True,
    }.items():
        (directory / name).mkdir(parents=True)
        (directory / name / "part").write_bytes(bytes(100_000))
        if is_whole:
            (directory / name / "COMPLETE").touch()
    world = world_of(0, 1, dist.HashStore())
    run_dir = RunDir(tmp_path, [0], None)
    (disk,) = find_disks(run_dir, None, world)
    assert 200_000 <= disk.cleared_bytes < 300_000
    assert disk.room == disk.free_bytes + disk.cleared_bytes and disk.checkpoints == 0
    setup_logging(True, True)
    clear_leftovers(run_dir, None, world)
    line = (
        r"Deleted, left by saves that did not finish: \.checkpoint_\S+, \.checkpoint_\S+ \(0.000.*"
    )
    assert re.match(line, capsys.readouterr().out)
    clear_leftovers(run_dir, None, world)
    assert "Deleted" not in capsys.readouterr().out


def test_checkpoints_that_are_a_link_to_another_disk_are_saved_there(tmp_path):
    """Only the models are held against run.dir's own disk."""
    elsewhere = Path(tempfile.mkdtemp(dir="/dev/shm"))
    assert Path("/dev/shm").stat().st_dev != tmp_path.stat().st_dev, "it needs a second disk"
    staging = elsewhere / ".checkpoint_0000002.0123456789ab"
    staging.mkdir()
    try:
        (staging / "part").write_bytes(bytes(100_000))
        (tmp_path / "checkpoints").symlink_to(elsewhere)
        world = world_of(0, 1, dist.HashStore())
        saved, run = find_disks(RunDir(tmp_path, [0], None), None, world)
        assert (saved.directory, saved.ranks, saved.has_models) == (f"{tmp_path}/checkpoints", 1, 0)
        assert (run.directory, run.ranks, run.has_models) == (f"{tmp_path}", 0, 1)
        for disk, path in ((saved, elsewhere), (run, tmp_path)):
            assert abs(disk.free_bytes - durable_fs.free_bytes(path)) < 0.1 * GB
        assert saved.cleared_bytes >= 100_000 > run.cleared_bytes == 0
    finally:
        shutil.rmtree(elsewhere)


def test_a_disk_of_checkpoints_that_is_not_mounted_is_no_new_run(tmp_path):
    world = world_of(0, 1, dist.HashStore())
    (tmp_path / "checkpoints").symlink_to("/absent/disk")
    with pytest.raises(UserError, match="is a link to /absent/disk, and that does not"):
        open_run_dir(tmp_path, world)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_node_0_alone_gets_the_models(tmp_path):
    for rank in (0, 1):
        world = world_of(rank, 2, dist.HashStore())
        (disk,) = _disks_here(RunDir(tmp_path, [0, 1], None), None, world)
        assert disk.has_models == (rank == 0)


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
