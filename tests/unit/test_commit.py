"""Commits: a checkpoint is made of all the files that were reported, or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from helpers.faults import DiskOs, Fault
from helpers.thread_ranks import Run, save_steps

from shardtune.checkpoint import durable_fs, saver
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
