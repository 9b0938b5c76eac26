"""The order of data: a function of (seed, epoch, weights, data) alone, equal on every rank."""

# `sequences_of_epoch` chooses which records an epoch uses, `lay_out_rows` which row each of them is
# in and in which order the rows come. schedule.py cuts that order into steps, each of the next
# rows, and gives every rank a part of a step: the number of ranks does not change what a step sees.
#
# A source is one endless sequence of its records: shuffle after shuffle, each with all of them.
# With the weight w and n records, epoch e (from 0) takes the positions floor(e w n) to
# floor((e + 1) w n). So uses of a record differ by at most one, however many epochs there are.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor

import numpy as np

_SHUFFLE = 1  # added to the seed of an epoch, so that its rows draw other random numbers
_GROUP_ROWS = 32
# Ends of the levels of cost, in tokens, 3% apart (`shuffle_groups`, B = 8,192). They are integers,
# since a last bit on another machine must not move a row.
_LEVEL_EDGES = np.rint(8192 * (1.03 ** np.arange(200) - 1))


@dataclass(frozen=True)
class Rows:
    """Rows of sequences: row i holds `members[starts[i]:starts[i + 1]]`, indices of the dataset."""

    members: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.members[self.starts[row] : self.starts[row + 1]]

    def part(self, begin: int, end: int) -> Rows:
        """Return the rows from `begin` up to `end`."""
        starts = self.starts[begin : end + 1]
        return Rows(self.members[starts[0] : starts[-1]], starts - starts[0])


def sequences_of_epoch(
    begins_record: np.ndarray,
    source_of: np.ndarray,
    weights: Sequence[Fraction],
    seed: int,
    epoch: int,
) -> np.ndarray:
    """Return the sequences in the order of the dataset, int64; one that is used twice, twice.

    `begins_record`, `source_of`: of each sequence, in the order of the dataset. `weights`: the
    passes per epoch of each source.
    """
    n_records = np.bincount(source_of[begins_record], minlength=len(weights))
    uses = [
        _uses(n, floor(epoch * weight * n), floor((epoch + 1) * weight * n), [seed, source])
        for source, (weight, n) in enumerate(zip(weights, n_records.tolist(), strict=True))
    ]
    of_record = np.concatenate(uses)
    return np.repeat(np.arange(len(source_of)), of_record[np.cumsum(begins_record) - 1])


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


def lay_out_rows(
    lengths: np.ndarray, max_length: int, packing: bool, seed: int, epoch: int
) -> Rows:
    """Put every sequence into one row of at most `max_length` tokens, the rows in random order.

    `lengths`: int32 [sequences], tokens of each.
    """
    # With packing (`best_fit`, sequences of equal length in random order) the number of rows is the
    # same in every epoch, and rows of like cost stand together (`shuffle_groups`). Without packing
    # they do not: a step of short records would weigh as much as one of long records.
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(lengths))
    if not packing:
        return Rows(order, np.arange(len(order) + 1))
    longest_first = order[np.argsort(-np.asarray(lengths)[order], kind="stable")]
    row_of, n_rows = best_fit(lengths, max_length)
    row_of = shuffle_groups(np.asarray(lengths)[longest_first], row_of, n_rows, random)[row_of]
    starts = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=n_rows))])
    return Rows(longest_first[np.argsort(row_of, kind="stable")], starts)


def shuffle_groups(
    lengths: np.ndarray, row_of: np.ndarray, n_rows: int, random: np.random.Generator
) -> np.ndarray:
    """Return the position of each row in the epoch, int64 [rows]; `row_of` is per sequence."""
    # Ranks wait for the one whose row costs most, and a row that is one long document costs up to
    # half as much again as one of short documents. So rows of like cost stand together in groups of
    # 32. Which of them do, the order in a group and the order of groups are random. The last rows
    # of the epoch, fewer than 32, are of any cost.
    #
    # A row of T tokens in documents of L tokens costs c T + a sum(L^2) / 2, with c FLOPs for a
    # token and a for a pair: per token c (1 + A / B), A = sum(L^2) / T, B = 2 c / a, from 7,000
    # (SmolLM2-135M) to 60,000 (Llama-3-8B). The order must not depend on the model, so B is 8,192
    # for every model. Costs that differ by less than 3% are alike. A row's share of trained tokens
    # does not count: if rows were grouped by it, steps would weigh tokens differently.
    order = random.permutation(n_rows)
    n_grouped = n_rows - n_rows % _GROUP_ROWS
    attended = np.bincount(row_of, lengths.astype(np.float64) ** 2) / np.bincount(row_of, lengths)
    level = np.searchsorted(_LEVEL_EDGES, attended)[order[:n_grouped]]
    groups = order[:n_grouped][np.argsort(level, kind="stable")].reshape(-1, _GROUP_ROWS)
    shuffled = np.concatenate([random.permutation(groups).ravel(), order[n_grouped:]])
    positions = np.empty(n_rows, np.int64)
    positions[shuffled] = np.arange(n_rows)
    return positions


def best_fit(lengths: np.ndarray, max_length: int) -> tuple[np.ndarray, int]:
    """Place sequences, longest first, each into the fullest row that has space for it.

    Returns the row of each sequence, int32 [sequences] in descending order of length, and the
    number of rows.
    """
    # (Best-fit decreasing.) The row that was just given a sequence is the fullest that can take
    # another of the same length. So each row takes as many of a length as it has space for before
    # the next row takes any, and all rows with the same space can be filled at once.
    counts = np.bincount(lengths, minlength=max_length + 1)
    row_of = np.empty(len(lengths), np.int32)
    rows_by_space: list[list[np.ndarray]] = [[] for _ in range(max_length + 1)]
    has_rows = 0  # bit s is set if a row has s tokens of space left
    begin = n_rows = 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        end = begin + int(counts[length])
        while begin < end:
            fitting = has_rows >> length
            if fitting:
                space = length + (fitting & -fitting).bit_length() - 1
                rows = rows_by_space[space].pop()
            else:
                space = max_length
                needed = -(-(end - begin) // (max_length // length))
                rows = np.arange(n_rows, n_rows + needed, dtype=np.int32)
                n_rows += needed
            each = space // length
            n_full, rest = divmod(min(end - begin, len(rows) * each), each)
            n_given = n_full + (rest > 0)
            taken = n_full * each + rest
            row_of[begin : begin + taken] = np.repeat(rows[:n_given], each)[:taken]
            begin += taken
            for left, changed in (
                (space, rows[n_given:]),
                (space - each * length, rows[:n_full]),
                (space - rest * length, rows[n_full:n_given]),
            ):
                if len(changed):
                    rows_by_space[left].append(changed)
                    has_rows |= 1 << left
            if not rows_by_space[space]:
                has_rows &= ~(1 << space)
    return row_of, n_rows
