"""Causal attention by tiles on a CPU, within each document of a flat row.

PyTorch's fused kernel for CPUs takes few queries of a short sequence at a time, and gains little
from bfloat16. It has neither windows nor sinks. Here a tile of queries of all heads attends to all
keys that it sees, in batched matrix products over the key heads. Scores and their softmax are
float32. The backward computes them again, so that nothing of tokens x tokens is kept.

A window is the number of keys that a query sees, itself included; 0 is all of its document. A sink
is one more score of each head, whose weight goes to no value.

A whole row is one operator: selective checkpointing keeps its output, and fake tensors do not go
through every tile.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_TILE = 64  # queries; their scores fit the cache


@torch.library.custom_op("shardtune::causal_documents", mutates_args=())
def causal_documents(
    query: Tensor,  # (heads, tokens, width)
    key: Tensor,  # (key heads, tokens, width)
    value: Tensor,  # (key heads, tokens, value width)
    lengths: list[int],  # tokens of each document
    scale: float,
    window: int = 0,
    sink: Tensor | None = None,  # (heads,)
) -> Tensor:
    """Attend causally within each document of a row: (tokens, heads, value width)."""
    output = _like_output(query, key, value, lengths, scale)
    rows = (_by_key_head(query, key), key, value, _by_key_head(output.transpose(0, 1), key))
    weights_of = _Weights(window, sink, len(key))
    for q, k, v, out in zip(*(row.split(lengths, -2) for row in rows), strict=True):
        scaled = k.float() * scale
        for tile, seen in _tiles(q.shape[2], window):
            weights = weights_of(q, scaled, tile, seen).to(v.dtype)[..., : seen.stop - seen.start]
            out[:, :, tile] = torch.bmm(weights, v[:, seen]).unflatten(1, (q.shape[1], -1))
    return output


@torch.library.custom_op("shardtune::causal_documents_backward", mutates_args=())
def _backward(
    gradient: Tensor,  # the output's gradient
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: list[int],
    scale: float,
    window: int,
    sink: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of `query`, `key`, `value` and `sink`; the last is empty without one."""
    # They have the memory layout of the projections, whose backward reads them.
    grad_query, grad_key, grad_value = (
        x.new_empty(x.transpose(0, 1).shape).transpose(0, 1) for x in (query, key, value)
    )
    rows = (_by_key_head(query, key), key, value, _by_key_head(gradient.transpose(0, 1), key))
    gradients = (_by_key_head(grad_query, key), grad_key, grad_value)
    weights_of = _Weights(window, sink, len(key))
    grad_sink = torch.zeros(0 if sink is None else len(query), dtype=torch.float32)
    for q, k, v, grad_out, grad_q, grad_k, grad_v in zip(
        *(row.split(lengths, -2) for row in (*rows, *gradients)), strict=True
    ):
        scaled = k.float() * scale
        k_sum, v_sum = torch.zeros_like(scaled), torch.zeros_like(v, dtype=torch.float32)
        for tile, seen in _tiles(q.shape[2], window):
            n_seen = seen.stop - seen.start
            weights = weights_of(q, scaled, tile, seen).to(v.dtype)
            grad_tile = grad_out[:, :, tile].flatten(1, 2)
            v_sum[:, seen] += torch.bmm(weights[..., :n_seen].mT, grad_tile)
            grad_weights = torch.bmm(grad_tile, v[:, seen].mT)
            if sink is not None:
                grad_weights = F.pad(grad_weights, (0, 1))
            grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, v.dtype)
            if sink is not None:
                grad_rows = grad_scores[..., n_seen].float().unflatten(1, (q.shape[1], -1))
                grad_sink += grad_rows.sum(-1).flatten()
                grad_scores = grad_scores[..., :n_seen]
            k_sum[:, seen] += torch.bmm(grad_scores.mT, q[:, :, tile].flatten(1, 2))
            grad_scaled = torch.bmm(grad_scores, k[:, seen]).unflatten(1, (q.shape[1], -1))
            torch.mul(grad_scaled, scale, out=grad_q[:, :, tile])
        torch.mul(k_sum, scale, out=grad_k)
        grad_v.copy_(v_sum)
    grad_sink = grad_sink.to(query.dtype if sink is None else sink.dtype)
    return grad_query, grad_key, grad_value, grad_sink


class _Weights:
    """Computes a tile's attention weights, (key heads, group x tile, seen), in float32.

    With sinks there is one more column, their weights.
    """

    def __init__(self, window: int, sink: Tensor | None, key_heads: int) -> None:
        self._window = window
        self._hidden = torch.full((_TILE, _TILE), -torch.inf)
        self._future = self._hidden.triu(1)
        self._sink = None if sink is None else sink.float().view(key_heads, -1)

    def __call__(self, query: Tensor, key: Tensor, tile: slice, seen: slice) -> Tensor:
        """Weigh the keys `seen` of a document, for the queries `tile`.

        `query` is (key heads, group, tokens, width); `key`, (key heads, tokens, width), is scaled
        and float32. The last key seen is the tile's last token.
        """
        n_queries = tile.stop - tile.start
        scores = torch.bmm(query[:, :, tile].float().flatten(1, 2), key[:, seen].mT)
        by_query = scores.unflatten(1, (-1, n_queries))
        by_query[..., -n_queries:] += self._future[:n_queries, :n_queries]
        if self._window:  # the window of a later query begins behind the first keys seen
            last_hidden = tile.start - self._window - seen.start
            by_query[..., :n_queries] += self._hidden[:n_queries, :n_queries].tril(last_hidden)
        if self._sink is not None:
            column = self._sink.repeat_interleave(n_queries, 1).unsqueeze(-1)
            scores = torch.cat([scores, column], -1)
        return torch.softmax(scores, -1, out=scores)


def _tiles(tokens: int, window: int) -> Iterator[tuple[slice, slice]]:
    """Yield each tile of a document's queries, and the keys that they see."""
    for start in range(0, tokens, _TILE):
        end = min(start + _TILE, tokens)
        yield slice(start, end), slice(max(0, start - window + 1) if window else 0, end)


def _by_key_head(row: Tensor, key: Tensor) -> Tensor:
    """View (heads, tokens, width) as (key heads, group, tokens, width)."""
    return row.unflatten(0, (len(key), -1))


@causal_documents.register_fake
def _like_output(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    return query.new_empty(query.shape[1], query.shape[0], value.shape[-1])


@_backward.register_fake
def _like_inputs(_: Tensor, query: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    key, value, sink = inputs[0], inputs[1], inputs[-1]
    grad_sink = query.new_empty(0) if sink is None else torch.empty_like(sink)
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), grad_sink


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, key, value, ctx.lengths, ctx.scale, ctx.window, sink = inputs
    ctx.save_for_backward(query, key, value, sink)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    *row, sink = ctx.saved_tensors
    *grad_row, grad_sink = _backward(gradient, *row, ctx.lengths, ctx.scale, ctx.window, sink)
    return *grad_row, None, None, None, None if sink is None else grad_sink


causal_documents.register_autograd(_differentiate, setup_context=_keep_inputs)

# Selective checkpointing names operators.
OPERATOR = torch.ops.shardtune.causal_documents.default
