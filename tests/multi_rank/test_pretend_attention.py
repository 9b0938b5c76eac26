"""Attention on a pretended GPU where there is no varlen attention for it: in float32."""

import pytest
import torch
import torch.nn.functional as F
from helpers.commands import finish
from helpers.pretended import needs_compiler, on_gpus
from torch import nn

from shardtune.model import documents
from shardtune.model.documents import attention


def attend_in_float32() -> None:
    """Grouped heads have no kernel but one that makes scores of tokens x tokens."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 12, 16) for heads in (4, 2, 2))
    fused, grouped = F.scaled_dot_product_attention, list[bool]()

    def watched(*given: torch.Tensor, **options: bool) -> torch.Tensor:
        grouped.append(options["enable_gqa"])
        return fused(*given, **options)

    F.scaled_dot_product_attention = watched
    outputs = []
    for device in ("cuda", "cpu"):
        tried = documents.Tried()
        inputs = (x.to(device) for x in (query, key, value))
        with documents.of(documents.row_of([5, 7], device), tried=tried):
            output, _ = attention.document_attention(nn.Identity(), *inputs, None)
        assert tried.ways == {"one call per document"}
        outputs.append(output.cpu())
    torch.testing.assert_close(*outputs)
    assert grouped == [False, False, True, True]


@needs_compiler
@pytest.mark.full
def test_float32_on_a_pretended_gpu_repeats_the_keys_of_grouped_heads(tmp_path):
    finish(on_gpus(1, attend_in_float32, cwd=tmp_path))
