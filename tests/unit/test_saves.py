"""Saves: whose slices are whose, copies while training goes on, commits of all files or none."""

import errno
import logging
import os
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.faults import DiskOs, Fault, fails
from helpers.small_runs import checkpoint, names
from helpers.thread_ranks import (
    Run,
    Tiny,
    TinyConfig,
    on_threads,
    optimizer_of,
    save_steps,
    thread_worlds,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardtune.checkpoint import (
    agree_on_checkpoint,
    clear_leftovers,
    durable_fs,
    load,
    load_checkpoint,
    open_checkpoint,
    saver,
)
from shardtune.checkpoint.run_dir import RunDir
from shardtune.checkpoint.slices import slices_to_write
from shardtune.checkpoint.train_state import random_state, restore_random_state, training_state
from shardtune.distributed.world import World
from shardtune.errors import RunFailed


def test_ranks_that_hold_the_same_tensors_share_their_writing():
    model = Tiny(TinyConfig(), width=1000)
    tensors = training_state(model, optimizer_of(model))
    slices = on_threads(thread_worlds(3), lambda world: slices_to_write(tensors, world)[0])
    assert sorted(name for own in slices for name in own) == sorted(tensors)
    sizes = [sum(tensors[name].nbytes for name in own) for own in slices]
    assert max(sizes) - min(sizes) < 100, "one of the three large tensors each"


def test_of_a_weight_with_fewer_rows_than_ranks_each_row_is_written_by_the_rank_that_has_it():
    """The second rank's empty part begins at the row of the third rank."""
    whole = torch.arange(6.0).view(2, 3)

    def part(rank: int) -> DTensor:
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], _init_backend=False, _rank=rank)
        row, is_owner = divmod(rank, 2)[0], rank % 2 == 0
        local = whole[row : row + is_owner]
        given = {"shape": whole.shape, "stride": whole.stride(), "run_check": False}
        return DTensor.from_local(local, mesh, [Shard(0), Shard(0)], **given)

    written = on_threads(
        thread_worlds(4), lambda world: slices_to_write({"weight": part(world.rank)}, world)[0]
    )
    assert [list(own.get("weight", ())) for own in written] == [[0, 0], [], [1, 0], []]


def test_every_tensor_of_a_rank_file_is_aligned(tmp_path):
    """With a bias of three bfloat16, behind which no float32 could be mapped."""
    save_steps((1,), 1, [tmp_path], keep=1, model=Tiny(TinyConfig()).to(torch.bfloat16))
    saved = open_checkpoint(checkpoint(tmp_path, 1))
    assert {saved.dtype(name).itemsize for name in saved.chunks} == {1, 2, 4, 8}
    for name, chunks in saved.chunks.items():
        assert not any(chunk.begin % saved.dtype(name).itemsize for chunk in chunks), name


def test_a_save_writes_over_the_copy_only_after_the_save_before(tmp_path, monkeypatch):
    disk_answers, places = threading.Event(), []

    def write_slowly(path: Path, tensors: Mapping[str, torch.Tensor], *more: Any) -> Any:
        places.append({name: t.data_ptr() for name, t in tensors.items() if "random" not in name})
        assert disk_answers.wait(60)
        return write(path, tensors, *more)

    write = saver._write_rank_file
    monkeypatch.setattr(saver, "_write_rank_file", write_slowly)
    run = Run(tmp_path)
    run.save(1)
    run.weight.data.fill_(9)  # training goes on
    second = threading.Thread(target=run.save, args=(2,))
    second.start()
    second.join(0.5)
    assert second.is_alive()
    disk_answers.set()
    second.join(60)
    run.weight.data.fill_(9)
    run.finish()
    assert (run.saved(1) == 1).all()
    assert (run.saved(2) == 2).all()
    first, again = ({k: v for rank in places[i : i + 2] for k, v in rank.items()} for i in (0, 2))
    assert first == again
    assert len(first) == 8  # weight and bias with their states
    assert all(place % 64 == 0 for place in first.values())


def test_saves_are_synchronous_where_the_copy_does_not_fit(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(saver, "available_memory", lambda: 100)
    monkeypatch.setattr(saver.logger, "propagate", True)
    with caplog.at_level(logging.INFO):
        run = Run(tmp_path)
    assert caplog.messages[0].startswith("Checkpoint staging: checkpoint.mode=async needs 0.0 GB")
    run.save(1)
    assert (run.saved(1) == 1).all()  # before `finish`
    run.finish()


@pytest.mark.parametrize(("copies", "is_staged"), [(1.5, False), (2.5, True)])
def test_a_node_needs_memory_for_the_copies_of_all_its_ranks(copies, is_staged, monkeypatch):
    tensors = {"weight": torch.zeros(1000)}
    free = int(copies * saver.staged_bytes(tensors))
    monkeypatch.setattr(saver, "available_memory", lambda: free)
    worlds = [replace(world, node_rank=0) for world in thread_worlds(2)]
    made = on_threads(worlds, lambda world: saver.make_staging(tensors, world))
    assert [each is not None for each in made] == [is_staged] * 2


@pytest.mark.parametrize("content", [b"", b"short", b"longer than what stood here before"])
def test_a_file_has_its_new_content_alone_whatever_a_write_that_was_killed_left(content, tmp_path):
    file = tmp_path / "manifest.json"
    for left in (file, file.with_suffix(".tmp")):
        left.write_bytes(b"what stood here before")
    durable_fs.replace_file(file, content)
    assert file.read_bytes() == content
    assert [*tmp_path.iterdir()] == [file]


@pytest.mark.parametrize("has_earlier", [False, True])
def test_a_rename_whose_sync_fails_is_undone(has_earlier, tmp_path, monkeypatch):
    """Else a power cut may take the new name, of which others have read."""
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("old")
    if has_earlier:
        new.write_text("earlier")

    def fail(path: Path) -> None:
        if new.exists() and new.read_text() == "old":
            raise OSError("no sync")

    monkeypatch.setattr(durable_fs, "sync_directory", fail)
    with pytest.raises(OSError, match="no sync"):
        durable_fs.rename(old, new)
    assert old.read_text() == "old" and not os.path.lexists(new)


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


CPU = torch.device("cpu")


def test_a_restored_rank_draws_the_numbers_that_it_would_have_drawn():
    def draw() -> list[object]:
        return [torch.rand(3).tolist(), random.random(), np.random.rand(3).tolist()]

    draw()
    state = random_state(7, CPU)
    expected = draw()
    draw()
    restore_random_state(state, CPU)
    assert draw() == expected


def test_ranks_of_another_world_draw_numbers_of_their_own_at_each_step(tmp_path, monkeypatch):
    seeds: list[int] = []
    monkeypatch.setattr(load, "set_seed", seeds.append)
    save_steps((1, 2), 2, [tmp_path], keep=2)
    for name, ranks in (("checkpoint_0000001", 3), ("checkpoint_0000002", 1)):
        run_dir = RunDir(tmp_path, [0] * ranks, None)
        model, worlds = Tiny(TinyConfig()), thread_worlds(ranks)
        optimizer = optimizer_of(model)
        load.training_state(model, optimizer)  # creates Adam's state, once for all ranks

        def resume(world, name=name, run_dir=run_dir, model=model, optimizer=optimizer) -> None:
            checkpoint = agree_on_checkpoint(run_dir, str(run_dir.checkpoints / name), world)
            load_checkpoint(checkpoint, model, optimizer, 1234, run_dir, world)

        on_threads(worlds, resume)
    assert len(set(seeds)) == len(seeds) == 4
