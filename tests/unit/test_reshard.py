"""What stays unsharded between micro-batches is decided once for all ranks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from helpers.thread_ranks import on_threads, thread_worlds
from torch import nn

from shardtune.distributed.layout import Layout
from shardtune.distributed.meshes import Meshes
from shardtune.model import fsdp_groups
from shardtune.training.states.reshard import (
    KeptBytes,
    ReshardPolicy,
    choose_reshard_policy,
    decide,
)
from shardtune.training.states.state_bytes import StateBytes


class Sharded(nn.Linear):
    """Parameters of 4 MB, and the method that FSDP2 adds."""

    def set_reshard_after_forward(self, reshards: bool, recurse: bool) -> None:
        self.reshards = reshards


@pytest.mark.parametrize("fullest", [0, 1])
def test_the_rank_with_the_least_memory_decides_for_all(fullest, monkeypatch, caplog):
    """A rank that gathers what the others keep would wait for them forever."""
    monkeypatch.setattr(fsdp_groups, "DTensor", nn.Parameter)  # as if FSDP2 had sharded them
    mesh = {"shard": SimpleNamespace(size=lambda: 2)}
    layout = Layout(2, micro_batches=2)

    most = ReshardPolicy(1, True)

    def decided(shares: list[int], planned: ReshardPolicy = most) -> list[ReshardPolicy]:
        """Decide on ranks that have such a share of the host's memory."""
        worlds = [
            replace(world, layout=layout, meshes=Meshes(cast(Any, mesh)), local_size=share)
            for world, share in zip(thread_worlds(2), shares, strict=True)
        ]
        state = StateBytes(0, 0, 0)
        return on_threads(
            worlds,
            lambda world: choose_reshard_policy(Sharded(1024, 1024), state, None, world, planned),
        )

    assert decided([1, 1]) == [ReshardPolicy(1, True)] * 2
    for planned in (ReshardPolicy(0, True), ReshardPolicy(1, False), ReshardPolicy(1, True, False)):
        with caplog.at_level("INFO"):
            assert decided([1, 1], planned) == [planned] * 2  # although all have room
        assert ("as planned" in caplog.text) is not planned.keep_gradients
        caplog.clear()
    shares = [1, 1]
    shares[fullest] = 1 << 20
    assert decided(shares) == [ReshardPolicy(0, False)] * 2


@pytest.mark.parametrize(
    ("free", "planned", "groups"),
    [
        (100, 4, 4),  # half of it is room for all
        (100, 2, 2),
        (100, None, 4),  # before a plan, all or none
        (98, None, 0),
        (98, 0, 0),
        (98, 2, 2),
        (98, 4, 3),
        (58, 4, 2),
        (38, 4, 1),
        (18, 4, 0),
    ],
)
def test_as_many_groups_stay_gathered_as_have_room_and_the_plan_allows(free, planned, groups):
    kept = KeptBytes(parameters=[10, 10, 10, 20], gradients=1000, sums=0)
    most = None if planned is None else ReshardPolicy(planned, keep_gradients=True)
    policy, *_ = decide(kept, free, micro_batches=2, planned=most)
    assert policy == ReshardPolicy(groups, keep_gradients=False, keep_sums=True)
