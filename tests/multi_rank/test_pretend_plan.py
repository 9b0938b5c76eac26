"""The memory of a plan is what a pretended GPU allocates, at full size and without contents."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.commands import REPOSITORY
from helpers.pretended import needs_compiler
from pretend_gpu.hollow import hollow_peaks
from transformers import AutoConfig

from shardtune.config_io import load_config
from shardtune.planner.arithmetic.figures import Cause
from shardtune.planner.arithmetic.machine import Machine
from shardtune.planner.make_plan import make_plan
from shardtune.planner.plan import Plan
from shardtune.planner.run_plan import as_prediction
from shardtune.planner.simulation.extrapolate import Simulations, with_layers

CONFIGS = REPOSITORY / "tests/data/configs"
BASE = ["model.init=random", "model.compute_dtype=bfloat16", "train.gradient_accumulation_steps=2"]
FULL, OFFLOAD, SELECTIVE, NONE = (
    f"model.activation_checkpointing={mode}" for mode in ("full", "offload", "selective", "none")
)
HOST = "optimizer.offload=true"
# Weights are float32: a pretended GPU takes minutes for the many pieces of an update of others.
CASES = [
    ("llama-3-8b", 1, 40, [FULL, HOST]),
    ("llama-3-8b", 8, 80, [OFFLOAD, "train.micro_batch_size=8"]),
    ("llama-3-8b", 16, 80, [NONE]),
    ("llama-3-8b", 16, 80, ["parallel.replicate=2", FULL]),
    ("llama-3-8b", 8, 80, ["parallel.replicate=8", "lora.rank=16", FULL]),
    ("glm-4.5-air", 16, 141, [SELECTIVE]),
    ("llama-3.1-8b", 8, 80, [FULL, "parallel.context=8", "data.max_length=131072"]),
    ("llama-3.3-70b", 16, 141, [FULL, "parallel.tensor=8", "parallel.stages=2"]),
    ("llama-3-8b", 16, 80, [FULL, HOST, "parallel.replicate=2"]),
    ("llama-3-8b", 8, 80, [FULL, HOST, "parallel.stages=2"]),
]


@pytest.mark.full
@needs_compiler
@pytest.mark.parametrize(("name", "gpus", "gb", "assignments"), CASES)
def test_a_plan_is_within_two_percent_of_what_a_pretended_gpu_allocates(
    name, gpus, gb, assignments, tmp_path
):
    (tmp_path / "config.yaml").touch()
    given = [*BASE, "data.max_length=4096", *assignments]
    compare(tmp_path / "config.yaml", CONFIGS / name, gpus, gb, given)


@pytest.mark.full
@needs_compiler
@pytest.mark.parametrize(
    "assignments",
    [
        ["lora.rank=16", "train.micro_batch_size=4"],
        [f"model.{kind}_dtype=bfloat16" for kind in ("master", "reduce")]
        + ["optimizer.name=adamw8bit"],
    ],
)
def test_one_gpu_holds_its_weights_once(assignments, tmp_path):
    """With two layers, whose weights are most of what it holds."""
    model_config = AutoConfig.from_pretrained(CONFIGS / "llama-3-8b")
    with_layers(model_config, 2).save_pretrained(tmp_path)
    (tmp_path / "config.yaml").touch()
    given = [*BASE, "data.max_length=1024", FULL, *assignments]
    plan = compare(tmp_path / "config.yaml", tmp_path, 1, 80, given)
    for phase, peak in plan.peaks.items():
        assert peak.by_cause[Cause.GATHERED] < 0.02 * plan.states.parameters, phase


@pytest.mark.full
@needs_compiler
def test_the_plan_of_the_shipped_configuration_is_what_a_pretended_gpu_allocates(tmp_path):
    """With 6 layers of 46: the update of all of them takes minutes."""
    model_config = AutoConfig.from_pretrained(CONFIGS / "glm-4.5-air")
    with_layers(model_config, 6).save_pretrained(tmp_path)
    compare(REPOSITORY / "config.yaml", tmp_path, 16, 16, BASE)


@pytest.mark.full
@needs_compiler
@pytest.mark.parametrize(
    ("example", "name", "gpus"),
    [
        ("long-rows-glm-4.5-air-lora", "glm-4.5-air", 16),
        ("long-rows-qwen3-30b-a3b", "qwen3-30b-a3b-2507", 8),
    ],
)
def test_the_plan_of_a_recipe_for_long_rows_is_what_a_pretended_gpu_allocates(
    example, name, gpus, tmp_path
):
    """With three layers of each, in rows of 131,072 tokens."""
    with_layers(AutoConfig.from_pretrained(CONFIGS / name), 3).save_pretrained(tmp_path)
    given = ["model.init=random", "train.gradient_accumulation_steps=2"]
    compare(REPOSITORY / f"examples/{example}.yaml", tmp_path, gpus, 80, given)


def compare(config_file: Path, model: Path, gpus: int, gb: float, assignments: list[str]) -> Plan:
    """Hold the plan of GPUs, at most 8 a node, against two steps without contents; return it."""
    nodes, ranks = max(1, gpus // 8), min(gpus, 8)
    given = ["data.train=none", *assignments]
    config = load_config(config_file, [f"model.path={model}", *given], {})
    model_config = AutoConfig.from_pretrained(model)
    machine = Machine(nodes, ranks, gb * 1e9, 1, 1, 1)
    plan = make_plan(config, model_config, machine, Simulations(model_config, imbalance=1))
    stages = [
        hollow_peaks(
            *(config_file, model, nodes, ranks, *given),
            gb=gb,
            stage=stage,
            planned=policy,
            tiles=plan.tiles,
        )
        for stage, policy in enumerate(as_prediction(plan)["policies"])
    ]
    measured = max(stages, key=lambda stage: stage.peak_bytes)
    context = config.parallel.context
    assert (plan.tiles > 1) is (config.data.max_length // context == 65536)
    assert plan.parameters == sum(stage.parameters for stage in stages)
    for phase in ("forward", "backward"):
        allocated = measured.allocated[phase]
        assert plan.peaks[phase].n_bytes == pytest.approx(allocated, rel=0.02), phase
    assert plan.allocated_bytes == pytest.approx(measured.peak_bytes, rel=0.02)
    pools = plan.pools_bytes
    assert pools == pytest.approx(measured.reserved_bytes, rel=0.02)
    return plan
