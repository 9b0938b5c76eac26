"""Held-out prompts that the model answers at each evaluation (`eval.samples`)."""

from collections.abc import Iterable, Sequence
from itertools import chain, islice, zip_longest
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardtune.data.dataset import TokenDataset


class Prompt(NamedTuple):
    """The token ids before a sequence's first trained token, and those that are trained there."""

    tokens: list[int]
    reference: list[int]


def choose_prompts(sets: Iterable[TokenDataset], count: int) -> list[Prompt]:
    """Return the prompts of the first records, one of each set in turn."""
    in_turn = chain.from_iterable(zip_longest(*map(_prompts, sets)))
    return list(islice(filter(None, in_turn), count))


def _prompts(dataset: TokenDataset) -> Iterable[Prompt]:
    for number in np.flatnonzero(dataset.begins_record):
        tokens, trained = dataset[int(number)]
        begin = int((trained > 0).argmax())
        end = begin + int((np.append(trained[begin:], 0) > 0).argmin())
        if begin < 2:  # a text has no prompt: the model continues its first half
            begin = len(tokens) // 2
        if trained.any() and 0 < begin < end:
            yield Prompt(tokens[:begin].tolist(), tokens[begin:end].tolist())


class UnfinishedTexts:
    """Texts as a data set whose sequences predict the next token of each.

    Behind a text stands its number, as the target of the prediction: causal attention does not look
    at it.
    """

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self._texts = texts
        self.lengths = np.array([len(text) + 1 for text in texts], np.int32)

    def __getitem__(self, i: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return token ids int64 [length] and trained flags bool [length]."""
        tokens = np.array([*self._texts[i], i], np.int64)
        return tokens, np.arange(len(tokens)) == len(tokens) - 1


def in_rows(
    texts: Sequence[Sequence[int]], numbers: Sequence[int], most_tokens: int, is_flat: bool
) -> list[list[int]]:
    """Return the numbers of texts that one forward takes together, each with its next token."""
    rows: list[list[int]] = []
    room = 0
    for number in numbers:
        needed = len(texts[number]) + 1
        if needed > room:
            rows.append([])
            room = most_tokens if is_flat else needed
        rows[-1].append(number)
        room -= needed
    return rows
