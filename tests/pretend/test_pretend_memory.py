"""What a rank of a model of full size takes, on a pretended GPU whose tensors have no contents."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.commands import REPOSITORY
from helpers.pretended import needs_compiler
from pretend_gpu.hollow import hollow_peaks

pytestmark = [needs_compiler, pytest.mark.full]

GLM_4_5_AIR = {
    "model_type": "glm4_moe",
    "architectures": ["Glm4MoeForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "attention_bias": True,
    "vocab_size": 151552,
    "max_position_embeddings": 131072,
    "n_group": 1,
    "topk_group": 1,
}
PARAMETERS = 106_852_245_504
ALL_FLOAT32 = (
    "model.master_dtype=float32",
    "model.reduce_dtype=float32",
    "model.activation_checkpointing=full",
    "optimizer.name=adamw",
    "parallel.replicate=1",
    "data.max_length=4096",
    "train.micro_batch_size=1",
    "train.gradient_accumulation_steps=2",
)


@pytest.mark.parametrize(
    ("expert", "allocated", "reserved"),
    [(1, 136.7e9, 142.3e9), (8, None, None)],
)
def test_a_rank_of_glm_takes_two_steps(
    expert: int, allocated: float | None, reserved: float | None, tmp_path: Path
) -> None:
    """Its states are exact; the peaks those of another measurement of the same step."""
    (tmp_path / "config.json").write_text(json.dumps(GLM_4_5_AIR), encoding="utf-8")
    config = REPOSITORY / "config.yaml"
    peaks = hollow_peaks(config, tmp_path, 2, 8, *ALL_FLOAT32, f"parallel.expert={expert}")
    assert peaks.parameters == PARAMETERS
    # Weights, gradients and two moments, in float32.
    for phase, tensors in (("load", 1), ("norm", 4), ("optimizer", 4)):
        assert peaks.allocated[phase] == pytest.approx(4 * tensors * PARAMETERS / 16, rel=0.002)
    assert peaks.peak_bytes <= peaks.reserved_bytes < 1.1 * peaks.peak_bytes
    if allocated:
        assert peaks.peak_bytes == pytest.approx(allocated, rel=0.02)
        assert peaks.reserved_bytes == pytest.approx(reserved, rel=0.02)
