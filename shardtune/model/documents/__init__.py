"""The documents of the row that is computed: a context around each forward and each backward.

Attention looks the documents up here, since models do not hand unknown arguments down to it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from shardtune.data.batch import Batch
from shardtune.distributed.exchange import HeadExchange


class Tried:
    """Records how a model attended in a trial, and what its layers asked for."""

    def __init__(self, longest: int = 0) -> None:
        self.longest = longest  # tokens of the longest document of all data
        self.ways = set[str]()  # how layers attended
        # Requests that `document_attention` cannot meet; None: it raises instead.
        self.objections: list[str] | None = None
        # The masks that the model made, with the window of each; None where it makes none.
        self.masks: list[tuple[torch.Tensor, int]] | None = None

    def narrower(self, window: int | None) -> int:
        """Return the window if it is narrower than the longest document of the data, else 0."""
        return window if window and window < self.longest else 0


class Documents(NamedTuple):
    """The documents of a row."""

    lengths: list[int]  # in tokens
    boundaries: torch.Tensor  # int32 [documents + 1]: where each document begins, and the end
    slices: list[int] | None = None  # where ranks share the row, the tokens of each
    heads: HeadExchange | None = None  # between these ranks
    tried: Tried | None = None  # in a trial of the model

    def numbers(self) -> torch.Tensor:
        """Return the number of each token's document, int32 [tokens]."""
        lengths = self.boundaries.diff()
        numbers = torch.arange(len(lengths), dtype=torch.int32, device=lengths.device)
        return numbers.repeat_interleave(lengths, output_size=sum(self.lengths))


_entered: list[Documents] = []


@contextmanager
def of(
    row: Batch | Documents, heads: HeadExchange | None = None, tried: Tried | None = None
) -> Iterator[None]:
    """Let attention know the documents of a row."""
    # A backward computes parts of its forward again, after forwards of other micro-batches, and on
    # threads of autograd's own. So the context belongs to the process, not to a thread, and is
    # entered once more around the backward. It is a stack: modules may take one document at a time.
    _entered.append(Documents(row.lengths, row.boundaries, row.slices, heads, tried))
    try:
        yield
    finally:
        _entered.pop()


def current() -> Documents:
    return _entered[-1]


def row_of(
    lengths: list[int], device: torch.device | str = "cpu", slices: list[int] | None = None
) -> Documents:
    """Return the documents of a row, by their lengths in tokens."""
    boundaries = torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)
    return Documents(lengths, boundaries, slices)
