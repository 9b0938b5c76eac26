"""Rows that several ranks share (`parallel.context`; Ulysses, arXiv 2309.14509).

Each rank has a slice of a row's tokens, and in attention a share of the heads for all of them. An
all-to-all before attention brings each rank the queries, keys and values of its heads, and one
behind it the outputs of its tokens. Nothing else in a layer looks at other tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd

import torch
from transformers import PreTrainedModel

from shardtune.distributed.exchange import Exchange, linear_map
from shardtune.distributed.layout import Layout
from shardtune.distributed.world import World
from shardtune.model.traits import numbers_of_heads


class HeadExchange:
    """Computes attention for rows of which each rank of a group has a slice."""

    def __init__(self, world: World) -> None:
        assert world.meshes.rows
        self.share = world.share  # the number of this rank, and the number of ranks
        self._number, self.ranks = world.share
        self._exchange = Exchange(world.meshes.rows, world.progress)

    def attend(
        self,
        attend: Callable[..., torch.Tensor],  # takes query, key, value and sink of whole rows
        query: torch.Tensor,  # (1, heads, tokens of the slice, width)
        key: torch.Tensor,  # (1, key heads, tokens of the slice, width)
        value: torch.Tensor,  # (1, key heads, tokens of the slice, value width)
        sink: torch.Tensor | None,  # (heads,)
        slices: list[int],
    ) -> torch.Tensor:
        """Return the output for the slice's tokens, (1, tokens, heads, value width)."""
        # Each rank gets all tokens of this slice, and sends this rank all tokens of its own.
        sent = [slices[self._number]] * self.ranks
        there, back = self._exchange.there_and_back(sent, slices)
        # Several ranks may need the same key head. Autograd sums the gradients of the copies.
        copies = self.ranks // gcd(self.ranks, key.shape[1])
        if copies > 1:
            key, value = (x.repeat_interleave(copies, 1) for x in (key, value))
        parts = [self._by_rank(x) for x in (query, key, value)]
        widths = [part.shape[-1] for part in parts]
        # One message has queries, keys and values: a message costs its latency in every layer.
        whole = linear_map(there, back, torch.cat(parts, 2).flatten(0, 1))
        heads = [
            part.unflatten(1, (-1, x.shape[-1])).transpose(0, 1).unsqueeze(0)
            for part, x in zip(whole.split(widths, 1), (query, key, value), strict=True)
        ]
        if sink is not None:
            sink = sink.unflatten(0, (self.ranks, -1))[self._number]
        output = attend(*heads, sink)  # (1, tokens of the row, heads of this rank, value width)
        returned = linear_map(back, there, output.squeeze(0).flatten(1))
        by_rank = returned.view(self.ranks, sent[0], *output.shape[2:])
        return by_rank.transpose(0, 1).flatten(1, 2).unsqueeze(0)

    def _by_rank(self, heads: torch.Tensor) -> torch.Tensor:
        """Return heads (1, heads, tokens, width) as (ranks, tokens, heads of a rank x width)."""
        return heads.squeeze(0).unflatten(0, (self.ranks, -1)).transpose(1, 2).flatten(2)


def heads_between(world: World) -> HeadExchange | None:
    """Return the exchange of heads between the ranks that share rows with this one, if any do."""
    return HeadExchange(world) if world.layout.context > 1 else None


def describe_rows(model: PreTrainedModel, layout: Layout) -> str:
    """Return the log's line on rows that ranks share."""
    line = f"Rows: each shared by {layout.row_ranks} ranks"
    if layout.tensor > 1:
        return f"{line}, which cut the matrices of each layer in {layout.tensor}"
    numbers = numbers_of_heads(model)
    shares = " or ".join(f"{heads // layout.context} of {heads}" for heads in numbers)
    return f"{line}, {shares} heads each"
