"""Where varlen attention can serve."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardtune.model.attention import varlen_lacks


@pytest.mark.parametrize(
    ("asked", "lacking"),
    [
        (("cuda", torch.bfloat16, 128, 128, 0.0), ""),
        (("cuda", torch.float16, 192, 128, 0.0), ""),  # latent attention
        (("cuda", torch.bfloat16, 64, 128, 0.0), "is not for values wider than their keys"),
        (("cuda", torch.float32, 128, 128, 0.0), "is not for float32"),
        (("cuda", torch.bfloat16, 128, 128, 0.1), "has no dropout"),
        (("cpu", torch.bfloat16, 128, 128, 0.0), "needs a GPU"),
    ],
)
def test_varlen_attention_says_what_it_lacks(asked: tuple[Any, ...], lacking: str) -> None:
    assert varlen_lacks(*asked) == lacking
