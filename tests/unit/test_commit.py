"""Commits: a checkpoint is made of all the files that were reported, or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.faults import DiskOs, Fault
from helpers.thread_ranks import save_steps

from shardtune.checkpoint import durable_fs
from shardtune.errors import RunFailed


@pytest.mark.parametrize("disks", [1, 2])
def test_a_file_that_lost_its_end_is_not_committed(
    disks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loses_a_byte(close: Callable[[int], None], handle: int) -> None:
        os.ftruncate(handle, os.fstat(handle).st_size - 1)
        close(handle)

    disk = DiskOs(Fault("close", "*/rank_00001.safetensors", loses_a_byte))
    monkeypatch.setattr(durable_fs, "os", disk)
    run_dirs = [tmp_path / f"disk{number}" for number in range(disks)]
    problem = r"checkpoint_0000001 was not saved: .* is not \d+ bytes, as rank 1 wrote it"
    with pytest.raises(RunFailed, match=problem):
        save_steps((1,), 2, run_dirs, keep=1)
    assert not list(tmp_path.glob("disk*/checkpoints/*"))
