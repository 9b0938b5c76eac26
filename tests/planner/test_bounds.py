"""Bounds of a plan by the shapes of parameters alone."""

import json
import math

import pytest
from helpers.planned import CONFIG, GLM, LLAMA, STEPS, TIED, configured
from transformers import Llama4TextConfig, LlamaConfig

from shardtune.__main__ import run
from shardtune.planner.arithmetic.machine import Machine
from shardtune.planner.arithmetic.shapes import rough_memory
from shardtune.planner.command.text import verdict
from shardtune.planner.make_plan import bound_plan, make_plan
from shardtune.planner.plan import Plan
from shardtune.planner.simulation.extrapolate import with_layers


def test_a_model_whose_step_cannot_be_simulated_is_bounded_by_its_shapes(tmp_path, capsys):
    # No forward of it runs: the default 8 key heads are more than its heads.
    sizes = {"vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 2}
    Llama4TextConfig(**sizes, num_attention_heads=4).save_pretrained(tmp_path)
    given = [f"model.path={tmp_path}", "data.packing=false", "data.max_length=256"]
    given.append("model.activation_checkpointing=none")
    assert run(["plan", "--config", str(CONFIG), *given]) == 0
    said = capsys.readouterr().out
    assert "A bound from shapes alone, since no step of llama4_text can be simulated" in said
    assert "The run fits" in said


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"model_type": "glm9"}, "does not know the architecture glm9"),
        # Its layers differ, so no count of its parameters by config.json would be right.
        (
            {"model_type": "nemotron-nas", "num_key_value_heads": None, "block_configs": [{}]},
            "does not know the architecture nemotron-nas",
        ),
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}, "is code of its own"),
    ],
)
def test_an_architecture_that_no_run_accepts_has_the_refusal_of_a_run(
    values, problem, tmp_path, capsys
):
    (tmp_path / "config.json").write_text(json.dumps(GLM.to_dict() | values))
    (run_config := tmp_path / "run.yaml").write_text("{data: {train: x}, parallel: {expert: 8}}")
    shipped = ["--config", str(run_config), f"model.path={tmp_path}"]
    for given in (shipped, [str(tmp_path)], [str(tmp_path), "--nodes", "1,2"]):
        assert run(["plan", *given]) == 2
        printed = capsys.readouterr()
        (refusal,) = (line for line in printed.err.splitlines() if line.startswith("ERROR: "))
        assert problem in refusal and " - name a model that transformers knows" in refusal
        assert printed.out == ""


def test_a_bound_says_only_what_it_shows():
    """Above it the run fits, and below the states it does not; between them nobody knows."""

    def planned(memory_bytes: float) -> Plan:
        machine = Machine(1, 2, memory_bytes, math.inf, math.inf, math.inf, is_gpu=False)
        return bound_plan(configured(), LLAMA, machine)

    most, least = planned(1e12).peak_bytes, planned(1e12).states.total
    for memory, fits, cannot_fit, words in (
        (most, True, False, "The run fits, "),
        (most - 1, False, False, "The run may not fit, "),
        (least, False, False, "The run may not fit, "),
        (least - 1, False, True, "The run does not fit, "),
    ):
        plan = planned(memory)
        assert (plan.fits, plan.cannot_fit) == (fits, cannot_fit), memory
        assert verdict(plan).startswith(words) and "peak of " in verdict(plan)
        assert "bound by" not in verdict(plan)  # no rate is known


@pytest.mark.full
@pytest.mark.parametrize(
    ("model_config", "assignments", "memory_bytes"),
    [
        # Gradients are reduced in each micro-batch, between replicas once a step.
        (GLM, ["parallel.expert=2", "parallel.replicate=2", STEPS[0]], 4.0265e9),
        (GLM, ["parallel.expert=2", "parallel.stages=4", *STEPS], 8e9),
        (
            GLM,
            ["parallel.context=2", "parallel.expert=4", "parallel.stages=2", *STEPS],
            8e9,
        ),
        (TIED, ["parallel.stages=2", *STEPS], 4.001e9),
    ],
)
def test_a_bound_has_the_traffic_of_a_simulated_step(model_config, assignments, memory_bytes):
    """What is gathered is freed with the smaller memory, and kept with the larger one."""
    config, cut = configured(*assignments), with_layers(model_config, 4)
    machine = Machine(2, 4, memory_bytes, 1, 1, 1)
    simulated, bound = (plan(config, cut, machine) for plan in (make_plan, bound_plan))
    assert bound.policies == simulated.policies
    for received, expected in zip(bound.traffic, simulated.traffic, strict=True):
        assert received.keys() == expected.keys()
        # A stage that is forwards ahead has its embedding from one forward to the next.
        assert received == pytest.approx(expected, rel=0.1 if len(bound.traffic) > 1 else 0.001)


def test_each_rank_that_shares_rows_gets_the_key_heads_that_it_needs():
    """Each of four ranks gets two of eight heads, and a copy of one of two key heads."""
    plan = bound_plan(configured("parallel.context=4"), LLAMA, Machine(1, 4, 8e9, 1, 1, 1))
    sent = {each.kind: size for each, size in plan.traffic[0].items()}
    # In bfloat16 queries, keys, values and outputs of 64 tokens, and their gradients.
    assert sent["all-to-all"] == 2 * 2 * 64 * LLAMA.num_hidden_layers * 32 * (8 + 4 + 4 + 8)


def test_a_bound_receives_once_what_is_kept():
    def received(memory_bytes: float) -> dict[str, int]:
        machine = Machine(1, 2, memory_bytes, 1, 1, 1)
        settings = configured("train.gradient_accumulation_steps=4")
        plan = bound_plan(settings, LLAMA, machine)
        return {collective.kind: size for collective, size in plan.traffic[0].items()}

    kept, freed = received(80e9), received(2.5e9)
    # Layers twice in each micro-batch; embedding and head are there from forward to backward.
    around = 2 * 2 * LLAMA.vocab_size * LLAMA.hidden_size
    assert freed["all-gather"] == pytest.approx(8 * kept["all-gather"] - 4 * around, rel=0.001)
    assert freed["reduce-scatter"] == 4 * kept["reduce-scatter"]


@pytest.mark.parametrize(
    ("model_config", "assignments"),
    [
        (LLAMA, ["train.micro_batch_size=4", "data.max_length=1024"]),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                (GLM, ["parallel.expert=4", "model.activation_checkpointing=none"]),
                (GLM, ["model.activation_checkpointing=full", "model.master_dtype=bfloat16"]),
                (LLAMA, ["model.activation_checkpointing=none", "lora.rank=8"]),
            )
        ),
    ],
)
def test_the_bound_from_shapes_alone_is_above_a_simulated_step(model_config, assignments):
    config = configured(*assignments)
    machine = Machine(1, 8, 8e9, 1, 1, 1, is_gpu=False)
    plan, bound = (planned(config, model_config, machine) for planned in (make_plan, bound_plan))
    assert plan.allocated_bytes < bound.allocated_bytes


@pytest.mark.parametrize(
    ("assignments", "most"),
    [
        (["lora.rank=8"], 1.2),
        pytest.param(
            [f"model.{kind}_dtype=bfloat16" for kind in ("master", "reduce")],
            1.0,
            marks=pytest.mark.full,
        ),
    ],
)
def test_an_estimate_copies_no_weights_that_a_simulated_step_does_not(assignments, most):
    """On one GPU, in short rows, so that weights are most of what it holds."""
    sizes = {"hidden_size": 2048, "head_dim": 256, "num_hidden_layers": 3}
    wide = LlamaConfig(**LLAMA.to_dict() | sizes)
    config = configured("data.max_length=64", *assignments)
    plan = make_plan(config, wide, Machine(1, 1, 8e9, 1, 1, 1))
    estimate, _ = rough_memory(plan.shapes, 0, plan.layout, free=4e9)
    assert 0.8 < estimate / plan.allocated_bytes < most
