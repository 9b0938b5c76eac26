"""Rows of a tensor that the ranks of a group send to one another, for experts and heads alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist

from shardtune.distributed.progress import Progress

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
