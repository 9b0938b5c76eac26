"""The order of data: a function of (seed, epoch, lengths) alone.

Every rank computes the same order and takes its part of each step (schedule.py), so the number of
ranks does not change what a step sees.
"""

from __future__ import annotations

import numpy as np

from shardtune.data.packing import Rows, best_fit

_GROUP_ROWS = 32
# Whole numbers: another machine's last bit must not move a row.
_LEVEL_EDGES = np.rint(8192 * (1.03 ** np.arange(200) - 1))


def plan_rows(lengths: np.ndarray, max_length: int, packing: bool, seed: int, epoch: int) -> Rows:
    """Put every sequence into one row of at most `max_length` tokens, the rows in random order.

    With packing (`best_fit`, sequences of equal length in random order) the number of rows is the
    same in every epoch, and rows of like cost stand together (`shuffle_groups`). Without packing
    they do not: a step of short records would weigh as much as one of long records.

    Args:
        lengths: int32 [sequences], tokens of each.
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
    row_of, n_rows = best_fit(lengths, max_length)
    row_of = shuffle_groups(np.asarray(lengths)[longest_first], row_of, n_rows, random)[row_of]
    starts = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=n_rows))])
    return Rows(longest_first[np.argsort(row_of, kind="stable")], starts)


def shuffle_groups(
    lengths: np.ndarray, row_of: np.ndarray, n_rows: int, random: np.random.Generator
) -> np.ndarray:
    """Return the position of each row in the epoch, int64 [rows]; `row_of` is per sequence.

    Ranks wait for the one whose row costs most, and a row that is one long document costs up to
    half as much again as one of short documents. So rows of like cost stand together in groups of
    32. Which of them do, the order in a group and the order of groups are random. The last rows of
    the epoch, fewer than 32, are of any cost.

    With c FLOPs for a token and a for a pair of tokens, a row of T tokens in documents of L costs
    c T + a sum(L^2) / 2, or per token c (1 + A / B) with A = sum(L^2) / T and B = 2 c / a, from
    7,000 (SmolLM2-135M) to 60,000 (Llama-3-8B). The order must not depend on the model: rows are
    alike if their costs differ by less than 3% at B = 8,192, and less at a larger B. The trained
    share of a row does not count here (it does when ranks get their rows): steps of rows alike in
    it would weigh their tokens differently.

    With one row a step for each rank of a SmolLM2-135M, log-normal lengths and 25 to 40% trained,
    by the formula of model/flops.py, ranks then work for 98% of the slowest one's time where their
    number divides 32, 95% at 24, 92% at 64 and 85% at 128, and 3% less where any share is trained.
    With several rows for each of 16 ranks it is 98.8% and more.
    """
    order = random.permutation(n_rows)
    n_grouped = n_rows - n_rows % _GROUP_ROWS
    attended = np.bincount(row_of, lengths.astype(np.float64) ** 2) / np.bincount(row_of, lengths)
    level = np.searchsorted(_LEVEL_EDGES, attended)[order[:n_grouped]]
    groups = order[:n_grouped][np.argsort(level, kind="stable")].reshape(-1, _GROUP_ROWS)
    shuffled = np.concatenate([random.permutation(groups).ravel(), order[n_grouped:]])
    positions = np.empty(n_rows, np.int64)
    positions[shuffled] = np.arange(n_rows)
    return positions
