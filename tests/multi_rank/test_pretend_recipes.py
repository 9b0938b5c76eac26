"""The plans of recipes, and of one GPU, are what pretended GPUs allocate for a few layers."""

import pytest
from helpers.commands import REPOSITORY
from helpers.hollow_plans import BASE, CONFIGS, FULL, require_plan
from helpers.pretended import needs_compiler
from transformers import AutoConfig

from shardtune.planner.arithmetic.figures import Cause
from shardtune.planner.simulation.extrapolate import with_layers

pytestmark = [pytest.mark.full, needs_compiler]


def test_one_gpu_holds_its_weights_once(tmp_path):
    """With two layers, whose weights are most of what it holds."""
    model_config = AutoConfig.from_pretrained(CONFIGS / "llama-3-8b")
    with_layers(model_config, 2).save_pretrained(tmp_path)
    (tmp_path / "config.yaml").touch()
    given = [*BASE, "data.max_length=1024", FULL, "lora.rank=16", "train.micro_batch_size=4"]
    plan = require_plan(tmp_path / "config.yaml", tmp_path, 1, 80, given)
    for phase, peak in plan.peaks.items():
        assert peak.by_cause[Cause.GATHERED] < 0.02 * plan.states.parameters, phase


def test_the_plan_of_the_shipped_configuration_is_what_a_pretended_gpu_allocates(tmp_path):
    """With 2 layers of 46: the update of all of them takes minutes."""
    model_config = AutoConfig.from_pretrained(CONFIGS / "glm-4.5-air")
    with_layers(model_config, 2).save_pretrained(tmp_path)
    require_plan(REPOSITORY / "config.yaml", tmp_path, 16, 16, BASE)
