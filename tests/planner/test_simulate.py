"""A simulated step: what tiles leave as it is."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from helpers.planned import GLM, MACHINE, configured
from transformers import Olmo2Config

from shardtune.planner.extrapolate import Simulations, with_layers
from shardtune.planner.plan import make_plan
from shardtune.planner.simulate import fake_world, simulate
from shardtune.training.reshard import ReshardPolicy

POLICY = ReshardPolicy(0, False)
OLMO = Olmo2Config(
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=4096,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=16384,
)
LONG_ROWS = ["data.max_length=16384", "model.activation_checkpointing=full", "parallel.expert=4"]


@pytest.fixture(scope="module")
def experts() -> Any:
    """A dense layer and one of experts, and positions for long rows."""
    config = copy.deepcopy(GLM)
    config.max_position_embeddings = 16384
    return with_layers(config, 2)


@pytest.mark.parametrize("has_experts", [True, False])
def test_tiles_leave_the_memory_beside_what_they_cut_as_it_is(
    experts: Any, has_experts: bool
) -> None:
    """So that one step shows what no number of them can make smaller.

    What follows an MLP of OLMo 2, a norm, lets its forward run again to its end.
    """
    config = configured(*LONG_ROWS, f"parallel.expert={4 if has_experts else 1}")
    model_config, given = experts if has_experts else OLMO, {"is_gpu": True, "evaluates": False}
    with fake_world(1, 4, config) as world:
        plain, tiled = (
            simulate(config, model_config, POLICY, world, tiles=tiles, **given) for tiles in (1, 4)
        )
    assert plain.beside_tiles().peaks == tiled.beside_tiles().peaks
    assert plain.beside_tiles().pools == tiled.beside_tiles().pools
    highest = [max(peak.n_bytes for peak in each.peaks.values()) for each in (plain, tiled)]
    assert highest[1] < highest[0]


def test_tiles_are_tried_where_the_memory_beside_them_fits(experts: Any) -> None:
    config, simulations = configured(*LONG_ROWS), Simulations(experts)
    plan = make_plan(config, experts, MACHINE, simulations)
    assert plan.tiles == 1 and plan.fits
    assert plan.beside_tiles_bytes < plan.needed_bytes

    def tiles_in(n_bytes: int) -> int:
        return make_plan(config, experts, replace(MACHINE, memory_bytes=n_bytes), simulations).tiles

    assert tiles_in(plan.beside_tiles_bytes - 1) == 1
    assert len(simulations._measured) == 1
    assert tiles_in(plan.beside_tiles_bytes) == 2
