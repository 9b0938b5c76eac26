"""What a rank of a model of full size takes, on a pretended GPU whose tensors have no contents."""

from __future__ import annotations

import pytest
from helpers.commands import REPOSITORY
from helpers.pretended import needs_compiler
from pretend_gpu.hollow import hollow_peaks

pytestmark = [needs_compiler, pytest.mark.full]

GLM_4_5_AIR = REPOSITORY / "tests/data/configs/glm-4.5-air"
PARAMETERS = 106_852_245_504
ALL_FLOAT32 = (
    "model.master_dtype=float32",
    "model.reduce_dtype=float32",
    "model.activation_checkpointing=full",
    "optimizer.name=adamw",
    "parallel.stages=1",
    "data.max_length=4096",
    "train.micro_batch_size=1",
    "train.gradient_accumulation_steps=2",
)


@pytest.mark.parametrize(
    ("expert", "allocated", "reserved"),
    [(1, 136.7e9, 142.3e9), (8, None, None)],
)
def test_a_rank_of_glm_takes_two_steps(expert, allocated, reserved):
    """Its states are exact; the peaks those of another measurement of the same step."""
    config = REPOSITORY / "config.yaml"
    peaks = hollow_peaks(config, GLM_4_5_AIR, 2, 8, *ALL_FLOAT32, f"parallel.expert={expert}")
    assert peaks.parameters == PARAMETERS
    # Weights, gradients and two moments, in float32.
    for phase, tensors in (("load", 1), ("norm", 4), ("optimizer", 4)):
        assert peaks.allocated[phase] == pytest.approx(4 * tensors * PARAMETERS / 16, rel=0.002)
    assert peaks.peak_bytes <= peaks.reserved_bytes < 1.1 * peaks.peak_bytes
    if allocated:
        assert peaks.peak_bytes == pytest.approx(allocated, rel=0.02)
        assert peaks.reserved_bytes == pytest.approx(reserved, rel=0.02)
