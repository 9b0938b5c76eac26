"""What a resume restores besides weights and moments: each rank's random numbers."""

from __future__ import annotations

import random

import numpy as np
import torch
from helpers.thread_ranks import (
    Tiny,
    TinyConfig,
    on_threads,
    optimizer_of,
    save_steps,
    thread_worlds,
)

from shardtune.checkpoint import load, load_checkpoint
from shardtune.checkpoint.resume import agree_on_checkpoint
from shardtune.checkpoint.run_dir import RunDir
from shardtune.checkpoint.train_state import random_state, restore_random_state

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
