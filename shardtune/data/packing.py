"""Which sequences share a row, and which rows a step, a rank and a micro-batch sees.

All of it is a function of (seed, epoch, lengths): every rank computes the same plan and picks its part, so that the
global batch of a step does not depend on how many ranks share it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_GROUP_ROWS = 32
# Whole numbers: another machine's last bit must not send a row to another place.
_LEVEL_EDGES = np.rint(8192 * (1.03 ** np.arange(200) - 1))


@dataclass(frozen=True)
class Rows:
    """`len(rows)` rows; row i holds the sequences `members[starts[i]:starts[i + 1]]` (indices into the dataset)."""

    members: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.members[self.starts[row] : self.starts[row + 1]]

    def part(self, begin: int, end: int) -> Rows:
        """The rows from `begin` up to `end`."""
        starts = self.starts[begin : end + 1]
        return Rows(self.members[starts[0] : starts[-1]], starts - starts[0])


def plan_rows(lengths: np.ndarray, max_length: int, packing: bool, seed: int, epoch: int) -> Rows:
    """Every sequence in exactly one row of at most `max_length` tokens, rows in random order.

    With packing, sequences are placed longest first, each into the fullest row that still takes it (best-fit
    decreasing; equal lengths in random order), which makes the number of rows the same in every epoch. Rows whose
    attention costs alike then stand together, see `shuffle_groups`. Without packing they do not: a step of short records would
    weigh as much as one of long ones.
    """
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(lengths))
    if not packing:
        return Rows(order, np.arange(len(order) + 1))
    shorter_by = max_length - np.asarray(lengths)[order]
    if max_length < 1 << 16:
        shorter_by = shorter_by.astype(np.uint16)  # sorted by radix, in a fifth of the time
    longest_first = order[np.argsort(shorter_by, kind="stable")]
    del order, shorter_by
    row_of, n_rows = _best_fit(lengths, max_length)
    row_of = shuffle_groups(np.asarray(lengths)[longest_first], row_of, n_rows, random)[row_of]
    starts = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=n_rows))])
    return Rows(longest_first[np.argsort(row_of, kind="stable")], starts)


def shuffle_groups(
    lengths: np.ndarray, row_of: np.ndarray, n_rows: int, random: np.random.Generator
) -> np.ndarray:
    """The place in the epoch of each row; `row_of` is that of each sequence.

    Ranks wait for the one whose row costs most, and a row that is one long document costs up to half as much again as
    one of short ones. So rows that cost alike stand together in groups of 32; which of them do so, the order in a group
    and that of the groups are random. The last rows of the epoch, fewer than 32, are any.

    With c FLOPs for a token and a for a pair of tokens, the cost of a row of T tokens in documents of L is
    c T + a sum(L^2) / 2, and per token c (1 + A / B) with A = sum(L^2) / T and B = 2 c / a, from 7,000 (SmolLM2-135M)
    to 60,000 (Llama-3-8B). The order of data must not depend on the model: alike is what differs by less than 3% at
    B = 8,192, and at a larger B by less than that. How much of a row is trained counts when rows are dealt, and not
    here: steps of rows that are alike in that would weigh their tokens differently.

    What remains, with one row a step for each rank of a SmolLM2-135M, log-normal lengths and 25 to 40% trained, by the
    formula of `flops.py`: ranks work for 98% of the slowest one's time where their number divides 32, 95% at 24, 92% at
    64 and 85% at 128, and 3% less where any share is trained. With several rows for each of 16 it is 98.8% and more.
    """
    order = random.permutation(n_rows)
    n_grouped = n_rows - n_rows % _GROUP_ROWS
    attended = np.bincount(row_of, lengths.astype(np.float64) ** 2) / np.bincount(row_of, lengths)
    level = np.searchsorted(_LEVEL_EDGES, attended)[order[:n_grouped]]
    groups = order[:n_grouped][np.argsort(level, kind="stable")].reshape(-1, _GROUP_ROWS)
    places = np.empty(n_rows, np.int64)
    places[np.concatenate([random.permutation(groups).ravel(), order[n_grouped:]])] = np.arange(
        n_rows
    )
    return places


def count_rows(lengths: np.ndarray, max_length: int, packing: bool) -> int:
    """How many rows `plan_rows` makes, in any epoch and with any seed."""
    return _best_fit(lengths, max_length)[1] if packing else len(lengths)


def _best_fit(lengths: np.ndarray, max_length: int) -> tuple[np.ndarray, int]:
    """The row of each sequence, these in descending order of their lengths, and the number of rows.

    The row that was just given a sequence is the fullest of those that can take another one of its length. So each
    row takes as many of a length as it has space for, before the next row takes any, and all rows with the same space
    can be filled at once.
    """
    counts = np.bincount(lengths, minlength=max_length + 1)
    row_of = np.empty(len(lengths), np.int32)
    open_rows: list[list[np.ndarray]] = [
        [] for _ in range(max_length + 1)
    ]  # row numbers by the space left in them
    has_rows = 0  # bit s: some row has s tokens of space left
    begin = n_rows = 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        end = begin + int(counts[length])
        while begin < end:
            fitting = has_rows >> length
            if fitting:
                space = length + (fitting & -fitting).bit_length() - 1
                rows = open_rows[space].pop()
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
                    open_rows[left].append(changed)
                    has_rows |= 1 << left
            if not open_rows[space]:
                has_rows &= ~(1 << space)
    return row_of, n_rows
