"""Attention by tiles on a CPU equals plain attention, one document at a time, in float64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardtune.model import documents
from shardtune.model.documents import attention
from shardtune.model.documents.cpu_attention import _TILE, causal_documents

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
def test_tiled_attention_is_as_near_to_float64_as_the_fused_kernel(key_heads, value_width):
    given = projections(key_heads, value_width)
    exact = tuple(x.detach().double().requires_grad_() for x in given)
    gradient = torch.randn(1, sum(LENGTHS), 6, value_width).bfloat16()

    def output_and_gradients(output: Tensor, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        gradients = torch.autograd.grad(output, inputs, gradient.to(output.dtype))
        return [output, *gradients]

    expected = output_and_gradients(attend_to_each_document(*exact, 0.3), exact)
    fused = output_and_gradients(attend_to_each_document(*given, 0.3), given)
    tried = documents.Tried()
    with documents.of(documents.row_of(LENGTHS), tried=tried):
        row, weights = attention.document_attention(nn.Identity(), *given, None, scaling=0.3)
    assert tried.ways == {"tiles"}
    assert weights is None
    assert row.shape == gradient.shape
    for found, plain, exactly in zip(
        output_and_gradients(row, given), fused, expected, strict=True
    ):
        assert distance(found, exactly) < max(4e-3, distance(plain, exactly))


def test_a_document_sees_no_other():
    query, key, value = projections(2, 16)
    row = causal_documents(query[0], key[0], value[0], LENGTHS, 0.25)
    start = sum(LENGTHS[:4])
    alone = (x[0, :, start : start + LENGTHS[4]] for x in (query, key, value))
    expected = causal_documents(*alone, [LENGTHS[4]], 0.25)
    assert torch.equal(row[start : start + LENGTHS[4]], expected)


def attend_by_definition(query: Tensor, key: Tensor, value: Tensor, window: int, sink: Any) -> Any:
    """Return (tokens, heads, width): all scores of a document, and the sink beside them."""
    outputs = []
    for q, k, v in zip(*(x.split(LENGTHS, 1) for x in (query, key, value)), strict=True):
        k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        seen = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()
        seen = seen.triu(1 - window) if window else seen
        scores = (q @ k.mT * 0.3).masked_fill(~seen, -torch.inf)
        if sink is not None:
            scores = torch.cat([scores, sink.view(-1, 1, 1).expand_as(scores[..., :1])], -1)
        outputs.append((scores.softmax(-1)[..., : k.shape[1]] @ v).transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("way", ["tiles", "one call per document"])
@pytest.mark.parametrize("has_sink", [False, True])
@pytest.mark.parametrize("window", [0, 1, 7, _TILE, _TILE + 30, 5000])
def test_windows_and_sinks_are_exact(window, has_sink, way, monkeypatch):
    """Output and all gradients in float32 against the definition in float64."""
    given = [x.detach().float().requires_grad_() for x in projections(2, 12)]
    sink = torch.randn(6, requires_grad=True) if has_sink else None
    inputs = [*given, *([sink] if has_sink else [])]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    of_exact = exact[3] if has_sink else None
    expected = attend_by_definition(*(x[0] for x in exact[:3]), window, of_exact)
    tried = documents.Tried()
    # With dropout there are no tiles; of so little nothing is dropped.
    options = {"sliding_window": window or None, "s_aux": sink, "scaling": 0.3}
    options["dropout"] = 0.0 if way == "tiles" else 1e-30
    with documents.of(documents.row_of(LENGTHS), tried=tried):
        found, _ = attention.document_attention(nn.Identity(), *given, None, **options)
    has_tiles = way == "tiles" and (has_sink or 0 < window < max(LENGTHS))
    assert tried.ways == {"tiles" if has_tiles else "one call per document"}
    assert distance(found[0], expected) < 1e-6
    gradient = torch.randn_like(expected)
    of_found = torch.autograd.grad(found[0], inputs, gradient.float())
    for part, whole in zip(of_found, torch.autograd.grad(expected, exact, gradient), strict=True):
        assert (part - whole).norm() < 1e-6 * (1 + whole.norm())  # 0 where a query sees itself


@pytest.mark.parametrize("special", [(), (7,), (7, torch.linspace(-1, 1, 6))])
def test_the_operator_of_tiled_attention_passes_torchs_checks(special):
    """Fake outputs like the real ones, registered gradients, nothing changed in place."""
    query, key, value = (x[0].detach().requires_grad_() for x in projections(2, 12))
    torch.library.opcheck(causal_documents, (query, key, value, LENGTHS, 0.25, *special))


def test_fake_tensors_do_not_go_through_the_tiles():
    with FakeTensorMode() as mode:
        query, key, value = (mode.from_tensor(x[0].detach()) for x in projections(2, 12))
        output = causal_documents(query, key, value, LENGTHS, 0.25)
    assert output.shape == (sum(LENGTHS), 6, 12)
    assert output.dtype == torch.bfloat16
