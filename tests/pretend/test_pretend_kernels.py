"""The kernels of a step of small shapes, counted as those of real ones, do not grow."""

from __future__ import annotations

import re
import sys

import pytest
from helpers.commands import REPOSITORY, completed
from helpers.moe_families import FAMILIES, SMALL
from helpers.pretended import needs_compiler
from pretend_gpu.count import counted
from transformers import AutoConfig

from shardtune.planner.arithmetic.machine import Machine
from shardtune.planner.arithmetic.roofline import launched, moved_bytes
from shardtune.training.states.reshard import ReshardPolicy

pytestmark = needs_compiler

# Wide enough for tensors without contents, on which nothing is computed. Of the logits a GPU takes
# one chunk, where a CPU takes two.
WIDE = SMALL | {"hidden_size": 2048, "num_hidden_layers": 3, "num_attention_heads": 16}
WIDE |= {"head_dim": 128, "intermediate_size": 5632, "vocab_size": 40_000}
WIDE |= {"max_position_embeddings": 4096}
EXPERTS = {"n_routed_experts": 16, "moe_intermediate_size": 1408, "num_experts_per_tok": 4}
MODELS = {"llama": WIDE, "glm4_moe": WIDE | FAMILIES["glm4_moe"] | EXPERTS}
BASE = ["data.train=none", "model.compute_dtype=bfloat16", "data.max_length=4096"]
BASE += ["train.gradient_accumulation_steps=2", "model.activation_checkpointing=full"]
BIT_8 = ["model.master_dtype=bfloat16", "optimizer.name=adamw8bit"]
NOTHING_KEPT = ReshardPolicy(kept_groups=0, keep_gradients=False)
MACHINE = Machine(2, 8, 80e9, 1, 1, 1)
# Kernels, gigabytes and waits at most, by part of a step of two micro-batches. Where a change makes
# them fewer, these go down.
GLM = {
    "forward": (598, 18.08, 4),
    "head": (20, 6.96, 0),
    "backward": (1192, 43.56, 4),
    "norm and clip": (71, 0.13, 1),
    "update": (5, 0.91, 0),
}
GLM_COMPILED = GLM | {
    "forward": (386, 13.47, 4),
    "backward": (708, 28.75, 4),
    "update": (188, 0.6, 0),
}
LLAMA_COMPILED = {
    "forward": (144, 10.41, 0),
    "head": (20, 6.96, 0),
    "backward": (370, 21.85, 0),
    "norm and clip": (59, 0.07, 1),
    "update": (5, 0.52, 0),
}
CASES = [
    ("glm4_moe", ["parallel.expert=8", "model.compile=false"], GLM),
    ("glm4_moe", ["parallel.expert=8", *BIT_8], GLM_COMPILED),
    ("llama", [], LLAMA_COMPILED),
]


@pytest.mark.full
@pytest.mark.parametrize(("family", "assignments", "most"), CASES)
def test_small_shapes_launch_move_and_wait_no_more_than_recorded(
    family, assignments, most, tmp_path
):
    AutoConfig.for_model(family, **MODELS[family]).save_pretrained(tmp_path / family)
    (tmp_path / "config.yaml").touch()
    step = counted(
        tmp_path / "config.yaml",
        tmp_path / family,
        MACHINE,
        NOTHING_KEPT,
        range(MODELS[family]["num_hidden_layers"]),
        *BASE,
        *assignments,
    )
    numbers = {
        part: (launched(kernels), round(moved_bytes(kernels) / 1e9, 2), step.waits[part])
        for part, kernels in step.kernels.items()
    }
    assert numbers.keys() == most.keys()
    for part, limits in most.items():
        pairs = zip(numbers[part], limits, strict=True)
        assert all(n <= limit for n, limit in pairs), (part, numbers[part])


@pytest.mark.full
def test_the_command_prints_a_line_for_each_part(tmp_path):
    AutoConfig.for_model("llama", **MODELS["llama"] | {"num_hidden_layers": 7}).save_pretrained(
        tmp_path / "llama"
    )
    (tmp_path / "config.yaml").touch()
    command = ["-m", "benchmarks", "kernels", f"--config={tmp_path / 'config.yaml'}"]
    command += [f"model.path={tmp_path / 'llama'}", *BASE]
    done = completed([sys.executable, *command], cwd=REPOSITORY)
    assert done.returncode == 0, f"{done.stdout[-2000:]}{done.stderr[-3000:]}"
    line = r"^([a-z ]+): [\d,]+ kernels, [\d.]+ GB, [\d,]+ waits"
    assert re.findall(line, done.stdout, re.MULTILINE) == [
        "layer forward",
        "layer backward",
        "head",
        "update",
        "norm and clip",
        "step",
    ]
