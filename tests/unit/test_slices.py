"""Slices: every rank writes its share of a save, and a rank's file any reader can map."""

from __future__ import annotations

import torch
from helpers.small_runs import checkpoint
from helpers.thread_ranks import (
    Tiny,
    TinyConfig,
    on_threads,
    optimizer_of,
    save_steps,
    thread_worlds,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardtune.checkpoint import open_checkpoint
from shardtune.checkpoint.slices import slices_to_write
from shardtune.checkpoint.train_state import training_state


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
