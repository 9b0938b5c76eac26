"""Attention in bfloat16 on a CPU equals plain attention, one document at a time, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardtune.model import attention
from shardtune.model.cpu_attention import _TILE, causal_documents

# One token, a tile and those beside it, and several tiles.
LENGTHS = [1, _TILE - 1, _TILE, _TILE + 1, 3 * _TILE + 5, 7]


def projections(key_heads: int, value_width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value, (1, heads, tokens, width), laid out as a model's projections."""
    torch.manual_seed(0)
    shapes = ((6, 16), (key_heads, 16), (key_heads, value_width))
    rows = [torch.randn(1, sum(LENGTHS), heads, width).bfloat16() for heads, width in shapes]
    query, key, value = (row.transpose(1, 2).requires_grad_() for row in rows)
    return query, key, value


def attend_to_each_document(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    documents = zip(*(x.split(LENGTHS, 2) for x in (query, key, value)), strict=True)
    options = {"is_causal": True, "scale": scale, "enable_gqa": True}
    outputs = [F.scaled_dot_product_attention(*qkv, **options) for qkv in documents]
    return torch.cat(outputs, 2).transpose(1, 2)


def distance(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize(("key_heads", "value_width"), [(6, 16), (2, 16), (1, 16), (2, 12)])
def test_tiled_attention_is_as_near_to_float64_as_the_fused_kernel(
    key_heads: int, value_width: int
) -> None:
    given = projections(key_heads, value_width)
    exact = tuple(x.detach().double().requires_grad_() for x in given)
    gradient = torch.randn(1, sum(LENGTHS), 6, value_width).bfloat16()

    def output_and_gradients(output: Tensor, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        gradients = torch.autograd.grad(output, inputs, gradient.to(output.dtype))
        return [output, *gradients]

    expected = output_and_gradients(attend_to_each_document(*exact, 0.3), exact)
    fused = output_and_gradients(attend_to_each_document(*given, 0.3), given)
    attention.documents.set(LENGTHS, torch.tensor([0, *LENGTHS]).cumsum(0, dtype=torch.int32))
    row, weights = attention.document_attention(nn.Identity(), *given, None, scaling=0.3)
    assert attention.documents.way == "tiles in bfloat16"
    assert weights is None
    assert row.shape == gradient.shape
    for found, plain, exactly in zip(
        output_and_gradients(row, given), fused, expected, strict=True
    ):
        assert distance(found, exactly) < max(4e-3, distance(plain, exactly))


def test_a_document_sees_no_other() -> None:
    query, key, value = projections(2, 16)
    row = causal_documents(query[0], key[0], value[0], LENGTHS, 0.25)
    start = sum(LENGTHS[:4])
    alone = (x[0, :, start : start + LENGTHS[4]] for x in (query, key, value))
    expected = causal_documents(*alone, [LENGTHS[4]], 0.25)
    assert torch.equal(row[start : start + LENGTHS[4]], expected)


def test_the_operator_of_tiled_attention_passes_torchs_checks() -> None:
    """Fake outputs like the real ones, registered gradients, nothing changed in place."""
    query, key, value = (x[0].detach().requires_grad_() for x in projections(2, 12))
    torch.library.opcheck(causal_documents, (query, key, value, LENGTHS, 0.25))


def test_fake_tensors_do_not_go_through_the_tiles() -> None:
    with FakeTensorMode() as mode:
        query, key, value = (mode.from_tensor(x[0].detach()) for x in projections(2, 12))
        output = causal_documents(query, key, value, LENGTHS, 0.25)
    assert output.shape == (sum(LENGTHS), 6, 12)
    assert output.dtype == torch.bfloat16
