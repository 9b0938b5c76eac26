"""A simulated step: where it runs in tiles, and what need not be tried again."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from helpers.built import build_on_meta
from helpers.planned import GLM, LLAMA, MACHINE, STEPS, configured
from torch.distributed.tensor import DTensor
from transformers import Olmo2Config

from shardtune.distributed.layout import Layout
from shardtune.model.build import read_facts
from shardtune.planner.make_plan import make_plan
from shardtune.planner.plan import Plan
from shardtune.planner.simulation import extrapolate
from shardtune.planner.simulation.extrapolate import Simulations, with_layers
from shardtune.planner.simulation.simulate import Measured, Step, fake_world, simulate
from shardtune.training.states.reshard import ReshardPolicy, kept_bytes

POLICY = ReshardPolicy(0, False)
SHALLOW = with_layers(LLAMA, 2)
OLMO = Olmo2Config(
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=4096,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=16384,
)
BFLOAT16 = ["model.master_dtype=bfloat16", "model.reduce_dtype=bfloat16"]
LONG_ROWS = ["data.max_length=16384", "model.activation_checkpointing=full", "parallel.expert=4"]


@pytest.fixture(scope="module")
def experts() -> Any:
    """A dense layer and one of experts, and positions for long rows."""
    config = copy.deepcopy(GLM)
    config.max_position_embeddings = 16384
    return with_layers(config, 2)


@pytest.mark.parametrize(
    ("ranks", "assignments", "left_alone"),
    [
        (1, ["lora.rank=4"], "frozen"),
        (2, ["lora.rank=4", "parallel.replicate=2"], "frozen"),
        (2, ["lora.rank=4"], "none"),
        (1, ["model.compute_dtype=float32"], "all"),
        (1, BFLOAT16, "all"),
        (2, [*BFLOAT16, "parallel.stages=2", STEPS[0]], "all"),
        (2, [*BFLOAT16, "parallel.replicate=2"], "none"),
        (1, ["model.master_dtype=bfloat16"], "none"),  # whose gradients are summed in float32
        (1, ["optimizer.offload=true", "model.reduce_dtype=bfloat16"], "none"),
        (1, [], "none"),
    ],
)
def test_weights_that_a_rank_computes_with_as_they_are_stored_are_not_fsdps(
    ranks, assignments, left_alone
):
    config = configured(*assignments)
    with fake_world(Layout.of(config, ranks), ranks) as world:
        model = build_on_meta(config, SHALLOW, world)
        kept = kept_bytes(model, world.layout)
    sharded = [p for p in model.parameters() if isinstance(p.data, DTensor)]
    expected = {
        "frozen": [p for p in model.parameters() if p.requires_grad],
        "none": list(model.parameters()),
        "all": [],
    }[left_alone]
    assert list(map(id, sharded)) == list(map(id, expected))
    assert sum(kept.parameters) == 2 * sum(p.numel() for p in sharded)


@pytest.mark.full
@pytest.mark.parametrize("has_experts", [True, False])
def test_tiles_are_tried_where_a_step_does_not_fit_without(experts, has_experts):
    config = configured(*LONG_ROWS, f"parallel.expert={4 if has_experts else 1}")
    model_config = experts if has_experts else OLMO
    simulations = Simulations(model_config)

    def planned(memory_bytes: float) -> Plan:
        machine = replace(MACHINE, memory_bytes=memory_bytes)
        return make_plan(config, model_config, machine, simulations)

    plan, neither = planned(8e9), planned(MACHINE.allowance_bytes(MACHINE.layout(config)))
    tiled = planned(neither.needed_bytes - 1)  # where no group stays gathered either
    assert (plan.tiles, tiled.tiles, neither.tiles) == (1, 2, 1)
    assert plan.fits and tiled.fits and not neither.fits


def test_a_row_of_a_table_measures_what_a_plan_does(monkeypatch):
    """A row simulates both shallow models in one process, and a plan in two."""

    def in_order(works: list[Callable[[], Measured]]) -> list[Measured]:
        return [work() for work in works]

    deep, config = with_layers(LLAMA, 16), configured("parallel.stages=2", "parallel.tensor=2")
    measured = []
    with fake_world(Layout.of(config, 8), 8, stage=1) as world:
        step, facts = Step(config, POLICY, world), read_facts(config, deep, world.layout)
        for way in (extrapolate.at_once, in_order):
            monkeypatch.setattr(extrapolate, "at_once", way)
            measured.append(Simulations(deep).measure(step, facts))
        whole = simulate(replace(step, layers=range(8, 16)), deep, facts)
    assert measured[0] == measured[1] and measured[0].traffic == whole.traffic
