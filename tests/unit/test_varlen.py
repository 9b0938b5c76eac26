"""Where varlen attention serves, and that it is given what it needs."""

from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardtune.model import documents
from shardtune.model.documents import attention


def plain_varlen(
    q: Any, k: Any, v: Any, starts: Any, *_: Any, scale: Any, window_size: Any, **__: Any
) -> Any:
    """As `varlen_attn`, which needs a GPU and one width for all."""
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    left, right = window_size
    assert right == 0
    documents = []
    for a, b in pairwise(starts.tolist()):
        mask = torch.ones(b - a, b - a, dtype=torch.bool).tril()
        mask = mask if left < 0 else mask.triu(-left)
        options = {"attn_mask": mask, "scale": scale, "enable_gqa": True}
        documents.append(F.scaled_dot_product_attention(*(x[:, a:b] for x in (q, k, v)), **options))
    return torch.cat(documents, 1).transpose(0, 1)


@pytest.mark.parametrize(
    ("value_width", "dropout", "window", "way"),
    [
        (16, 0.0, None, "varlen attention"),
        (12, 0.0, None, "varlen attention"),  # latent attention
        (16, 0.0, 3, "varlen attention"),
        (16, 0.0, 7, "varlen attention"),  # as wide as the longest document
        (24, 0.0, None, "one call per document"),
        (16, 0.1, None, "one call per document"),
    ],
)
def test_varlen_attention_serves_without_dropout_and_wider_values(
    value_width, dropout, window, way, monkeypatch
):
    torch.manual_seed(0)
    query, key = torch.randn(1, 4, 12, 16), torch.randn(1, 2, 12, 16)
    value = torch.randn(1, 2, 12, value_width)

    def attend(dropout: float) -> tuple[torch.Tensor, set[str]]:
        given = (nn.Identity(), query, key, value, None)
        options, tried = {"scaling": 0.2, "sliding_window": window}, documents.Tried()
        with documents.of(documents.row_of([5, 7]), tried=tried):
            output, _ = attention.document_attention(*given, dropout=dropout, **options)
        return output, tried.ways

    expected, ways = attend(0.0)
    assert "varlen attention" not in ways, "there is a kernel for CPUs"
    monkeypatch.setattr(attention, "_varlen_runs", lambda *_: True)
    monkeypatch.setattr(attention, "varlen_attn", plain_varlen)
    found, ways = attend(dropout)
    assert ways == {way}
    assert found.shape == (1, 12, 4, value_width)
    assert dropout or torch.allclose(found, expected, atol=1e-6)


class WatchedBackward(torch.autograd.Function):
    """As the query, with a backward that notes the flag which flash attention's reads."""

    flags: ClassVar[list[bool]] = []

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor) -> torch.Tensor:
        return query * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        WatchedBackward.flags.append(torch.are_deterministic_algorithms_enabled())
        return gradient * 2


def test_the_backward_of_varlen_attention_alone_is_deterministic(monkeypatch):
    """Twice over one graph, with watched operators before and behind it."""
    monkeypatch.setattr(attention, "varlen_attn", lambda q, *_, **__: WatchedBackward.apply(q))
    WatchedBackward.flags.clear()
    x = torch.ones(3, 1, 8, requires_grad=True)
    boundaries = torch.tensor([0, 3], dtype=torch.int32)
    middle = attention._varlen(WatchedBackward.apply(x), x, x, boundaries, 3, None)
    loss = WatchedBackward.apply(middle).sum()
    for _ in range(2):
        loss.backward(retain_graph=True)
    assert WatchedBackward.flags == [False, True, False] * 2
    assert not torch.are_deterministic_algorithms_enabled()
    with torch.no_grad():
        attention._varlen(x, x, x, boundaries, 3, None)
