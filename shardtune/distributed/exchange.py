"""Rows of a tensor that the ranks of a group send to one another, for experts and heads alike.

Where ranks share rows (`parallel.context`; Ulysses, arXiv 2309.14509), each has a slice of a row's
tokens, and in attention a share of the heads for all of them. An all-to-all before attention brings
each rank the queries, keys and values of its heads, and one behind it the outputs of its tokens.
Nothing else in a layer looks at other tokens.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import gcd
from typing import Any, cast

import torch
import torch.distributed as dist

from shardtune.distributed.progress import Progress
from shardtune.distributed.world import World

_Map = Callable[[torch.Tensor], torch.Tensor]


class Exchange:
    """Sends the rows of a tensor to the ranks of a group, all at once."""

    def __init__(self, group: dist.ProcessGroup, progress: Progress) -> None:
        self.group, self._progress = group, progress

    def begin(
        self, sent: Sequence[int], received: Sequence[int], rows: torch.Tensor
    ) -> Callable[[], torch.Tensor]:
        """Send `sent[r]` rows to rank r of the group; return a function that waits for
        `received[r]`."""
        output = rows.new_empty(sum(received), rows.shape[-1])
        rows = rows.contiguous()
        work = dist.all_to_all_single(output, rows, received, sent, group=self.group, async_op=True)

        def arrive() -> torch.Tensor:
            with self._progress.waiting():
                work.wait()
            return output

        return arrive

    def there_and_back(self, sent: Sequence[int], received: Sequence[int]) -> tuple[_Map, _Map]:
        return partial(self._run, sent, received), partial(self._run, received, sent)

    def _run(
        self, sent: Sequence[int], received: Sequence[int], rows: torch.Tensor
    ) -> torch.Tensor:
        return self.begin(sent, received, rows)()


def linear_map(there: _Map, back: _Map, rows: torch.Tensor) -> torch.Tensor:
    """Apply a linear map; `back`, its transpose, is the backward, and needs no saved tensor."""
    return cast(torch.Tensor, _Linear.apply(rows, there, back))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, there: _Map, back: _Map) -> torch.Tensor:
        ctx.back = back
        return there(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor | None, ...]:
        return ctx.back(gradients[0]), None, None


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
