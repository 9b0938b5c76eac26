"""Which sequences an epoch takes: a function of (seed, epoch, weights, data) alone.

A source is one endless sequence of its records: shuffle after shuffle, each with all of them. With
the weight w and n records, epoch e (from 0) takes the positions floor(e w n) to floor((e + 1) w n).
So uses of a record differ by at most one, however many epochs there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import floor

import numpy as np

from shardtune.data.dataset import TokenDataset

_SHUFFLE = 1  # keeps these random numbers apart from those of the rows of an epoch


def sequences_of_epoch(
    dataset: TokenDataset, weights: Sequence[Fraction], seed: int, epoch: int
) -> np.ndarray:
    """Return the sequences in the order of the dataset, int64; one that is used twice, twice.

    `weights`: of each source, its passes per epoch.
    """
    is_first = dataset.begins_record
    n_records = np.bincount(dataset.source[is_first], minlength=len(weights))
    uses = [
        _uses(n, floor(epoch * weight * n), floor((epoch + 1) * weight * n), [seed, source])
        for source, (weight, n) in enumerate(zip(weights, n_records.tolist(), strict=True))
    ]
    return np.repeat(np.arange(len(dataset)), np.concatenate(uses)[np.cumsum(is_first) - 1])


def _uses(n: int, begin: int, end: int, seeds: list[int]) -> np.ndarray:
    """Count, int64 [n], the uses of each record at the positions from `begin` up to `end`."""
    uses = np.zeros(n, np.int64)
    for shuffle in range(begin // n, -(-end // n)):
        first, last = max(begin - shuffle * n, 0), min(end - shuffle * n, n)
        if last - first == n:
            uses += 1
        else:
            random = np.random.default_rng([*seeds, shuffle, _SHUFFLE])
            uses[random.permutation(n)[first:last]] += 1
    return uses
