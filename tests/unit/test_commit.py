"""Commits: a checkpoint is made of all the files that were reported, or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from helpers.faults import DiskOs, Fault, fails
from helpers.small_runs import names
from helpers.thread_ranks import Run, on_threads, save_steps, thread_worlds

from shardtune.checkpoint import agree_on_checkpoint, clear_leftovers, durable_fs, saver
from shardtune.checkpoint.run_dir import RunDir
from shardtune.checkpoint.slices import slices_to_write
from shardtune.distributed.world import World
from shardtune.errors import RunFailed


@pytest.mark.parametrize("disks", [1, 2])
def test_a_file_that_lost_its_end_is_not_committed(disks, tmp_path, monkeypatch):
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


def test_a_save_that_lacks_a_part_of_a_tensor_is_not_committed(tmp_path, monkeypatch):
    def forgetful(tensors: Mapping[str, torch.Tensor], world: World) -> Any:
        own, kinds = slices_to_write(tensors, world)
        return {name: own[name] for name in own if name != "model.linear.weight"}, kinds

    monkeypatch.setattr(saver, "slices_to_write", forgetful)
    run = Run(tmp_path)
    with pytest.raises(RunFailed, match=r"0 elements of model.linear.weight \[3, 4\] were written"):
        run.save(1)
        run.finish()
    assert not list(tmp_path.glob("checkpoints/*"))


def test_saves_leave_no_messages_in_the_store(tmp_path):
    run = Run(tmp_path)
    store, counts = run.worlds[0].store, []
    for step in (1, 2, 3):
        run.save(step)
        run.finish()
        counts.append(store.num_keys())
    assert counts[1] == counts[2], "only the last one's are kept"


@pytest.mark.parametrize("is_prepared", [True, False])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_start_commits_on_a_disk_that_failed_or_goes_on_from_before(
    failing, is_prepared, tmp_path, monkeypatch
):
    run_dirs = [tmp_path / f"disk{number}" for number in range(2)]
    unnamed = Fault("rename", f"*/disk{failing}/*/.checkpoint_0000002.*", fails(errno.EIO))
    monkeypatch.setattr(durable_fs, "os", DiskOs(unnamed))
    with pytest.raises(RunFailed):
        save_steps((1, 2), 2, run_dirs, keep=1)
    if not is_prepared:
        next(run_dirs[failing].glob("*/.checkpoint_0000002.*/COMPLETE")).unlink()

    def start(world: World) -> Any:
        run_dir = RunDir(run_dirs[world.rank], [0, 1], None)
        checkpoint = agree_on_checkpoint(run_dir, "auto", world)
        clear_leftovers(run_dir, checkpoint, world)
        return checkpoint and checkpoint.step

    assert on_threads(thread_worlds(2), start) == [2 if is_prepared else 1] * 2
    for number, run_dir in enumerate(run_dirs):
        of_2 = [] if number == failing else ["checkpoint_0000002.aside1"]
        of_2 = ["checkpoint_0000002"] if is_prepared else of_2
        assert names(run_dir / "checkpoints") == ["checkpoint_0000001", *of_2]
