"""The memory of a plan is what a pretended GPU allocates, without contents."""

import pytest
from helpers.hollow_plans import BASE, CONFIGS, FULL, OFFLOAD, SELECTIVE, require_plan
from helpers.pretended import needs_compiler
from transformers import AutoConfig

from shardtune.planner.simulation.extrapolate import with_layers

HOST = "optimizer.offload=true"
# Weights are float32: a pretended GPU takes minutes for the many pieces of an update of others.
CASES = [  # at full size, or with the first layers alone
    ("llama-3-8b", None, 1, 40, [FULL, HOST]),
    ("llama-3-8b", 10, 8, 80, [OFFLOAD, "train.micro_batch_size=8"]),
    ("glm-4.5-air", 10, 16, 141, [SELECTIVE]),
    ("llama-3.1-8b", 10, 8, 80, [FULL, "parallel.context=8", "data.max_length=131072"]),
    ("llama-3.3-70b", 10, 16, 141, [FULL, "parallel.tensor=8", "parallel.stages=2"]),
    ("llama-3-8b", 10, 16, 80, [FULL, HOST, "parallel.replicate=2"]),
]


@pytest.mark.full
@needs_compiler
@pytest.mark.parametrize(("name", "layers", "gpus", "gb", "assignments"), CASES)
def test_a_plan_is_within_two_percent_of_what_a_pretended_gpu_allocates(
    name, layers, gpus, gb, assignments, tmp_path
):
    (tmp_path / "config.yaml").touch()
    given = [*BASE, "data.max_length=4096", *assignments]
    model = CONFIGS / name
    if layers:
        with_layers(AutoConfig.from_pretrained(model), layers).save_pretrained(tmp_path / "model")
        model = tmp_path / "model"
    require_plan(tmp_path / "config.yaml", model, gpus, gb, given)
