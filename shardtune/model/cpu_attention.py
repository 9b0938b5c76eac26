"""Causal attention in bfloat16 on a CPU, within each document of a flat row.

PyTorch's fused kernel for CPUs takes few queries of a short sequence at a time, and gains little
from bfloat16. Here a tile of queries of all heads attends to all keys up to its own last token, in
batched matrix products over the key heads. Scores and their softmax are float32. The backward
computes them again, so that nothing of tokens x tokens is kept.

A whole row is one operator: selective checkpointing keeps its output, and fake tensors do not go
through every tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_TILE = 64  # queries; their scores fit the cache


@torch.library.custom_op("shardtune::causal_documents", mutates_args=())
def causal_documents(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float
) -> Tensor:
    """Attend causally within each document of a row; `lengths` are their tokens.

    `query` is (heads, tokens, width), `key` (key heads, tokens, width) and `value` (key heads,
    tokens, value width). Returns (tokens, heads, value width).
    """
    output = _like_output(query, key, value, lengths, scale)
    rows = (_by_key_head(query, key), key, value, _by_key_head(output.transpose(0, 1), key))
    future = torch.full((_TILE, _TILE), -torch.inf).triu_(1)
    for q, k, v, out in zip(*(row.split(lengths, -2) for row in rows), strict=True):
        scaled = k.float() * scale
        for tile, seen in _tiles(q.shape[2]):
            weights = _weights(q[:, :, tile], scaled[:, :seen], future).to(v.dtype)
            out[:, :, tile] = torch.bmm(weights, v[:, :seen]).unflatten(1, (q.shape[1], -1))
    return output


@torch.library.custom_op("shardtune::causal_documents_backward", mutates_args=())
def _backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `query`, `key` and `value`; `gradient` is that of the output."""
    # In the memory layout of the projections, whose backward reads them.
    of_query, of_key, of_value = (
        x.new_empty(x.transpose(0, 1).shape).transpose(0, 1) for x in (query, key, value)
    )
    rows = (_by_key_head(query, key), key, value, _by_key_head(gradient.transpose(0, 1), key))
    gradients = (_by_key_head(of_query, key), of_key, of_value)
    future = torch.full((_TILE, _TILE), -torch.inf).triu_(1)
    for q, k, v, of_out, of_q, of_k, of_v in zip(
        *(row.split(lengths, -2) for row in (*rows, *gradients)), strict=True
    ):
        scaled = k.float() * scale
        k_sum, v_sum = torch.zeros_like(scaled), torch.zeros_like(v, dtype=torch.float32)
        for tile, seen in _tiles(q.shape[2]):
            weights = _weights(q[:, :, tile], scaled[:, :seen], future).to(v.dtype)
            of_tile = of_out[:, :, tile].flatten(1, 2)
            v_sum[:, :seen] += torch.bmm(weights.mT, of_tile)
            of_weights = torch.bmm(of_tile, v[:, :seen].mT)
            of_scores = torch._softmax_backward_data(of_weights, weights, -1, v.dtype)
            k_sum[:, :seen] += torch.bmm(of_scores.mT, q[:, :, tile].flatten(1, 2))
            of_scaled = torch.bmm(of_scores, k[:, :seen]).unflatten(1, (q.shape[1], -1))
            torch.mul(of_scaled, scale, out=of_q[:, :, tile])
        torch.mul(k_sum, scale, out=of_k)
        of_v.copy_(v_sum)
    return of_query, of_key, of_value


def _weights(query: Tensor, key: Tensor, future: Tensor) -> Tensor:
    """Return a tile's attention weights, (key heads, group x tile, seen), in float32.

    `query` is (key heads, group, tile, width); `key`, (key heads, seen, width), is scaled, float32,
    and ends with the tile's last token.
    """
    tile = query.shape[2]
    scores = torch.bmm(query.float().flatten(1, 2), key.mT)
    scores.unflatten(1, (-1, tile))[..., -tile:] += future[:tile, :tile]
    return torch.softmax(scores, -1, out=scores)


def _tiles(tokens: int) -> Iterator[tuple[slice, int]]:
    """Yield each tile of a document's queries, and the number of keys up to its last one."""
    for start in range(0, tokens, _TILE):
        end = min(start + _TILE, tokens)
        yield slice(start, end), end


def _by_key_head(row: Tensor, key: Tensor) -> Tensor:
    """View (heads, tokens, width) as (key heads, group, tokens, width)."""
    return row.unflatten(0, (len(key), -1))


@causal_documents.register_fake
def _like_output(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float
) -> Tensor:
    return query.new_empty(query.shape[1], query.shape[0], value.shape[-1])


@_backward.register_fake
def _like_inputs(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, key, value, ctx.lengths, ctx.scale = inputs
    ctx.save_for_backward(query, key, value)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    return *_backward(gradient, *ctx.saved_tensors, ctx.lengths, ctx.scale), None, None


causal_documents.register_autograd(_differentiate, setup_context=_keep_inputs)

# For those that name operators, such as selective checkpointing.
OPERATOR = torch.ops.shardtune.causal_documents.default
