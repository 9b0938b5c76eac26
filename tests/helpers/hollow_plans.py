"""Plans held against what pretended GPUs allocate in steps without contents."""

from pathlib import Path

import pytest
from pretend_gpu.hollow import hollow_peaks
from transformers import AutoConfig

from helpers.commands import REPOSITORY
from shardtune.config_io import load_config
from shardtune.planner.arithmetic.machine import Machine
from shardtune.planner.make_plan import make_plan
from shardtune.planner.plan import Plan
from shardtune.planner.run_plan import as_prediction
from shardtune.planner.simulation.extrapolate import Simulations

CONFIGS = REPOSITORY / "tests/data/configs"
BASE = ["model.init=random", "model.compute_dtype=bfloat16", "train.gradient_accumulation_steps=2"]
FULL, OFFLOAD, SELECTIVE, NONE = (
    f"model.activation_checkpointing={mode}" for mode in ("full", "offload", "selective", "none")
)


def require_plan(
    config_file: Path, model: Path, gpus: int, gb: float, assignments: list[str]
) -> Plan:
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
