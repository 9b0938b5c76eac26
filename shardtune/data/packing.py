"""Which sequences share a row: best-fit decreasing, which depends on their lengths alone."""

from __future__ import annotations

import numpy as np


def best_fit(lengths: np.ndarray, max_length: int) -> tuple[np.ndarray, int]:
    """Place sequences, longest first, each into the fullest row that has space for it.

    (Best-fit decreasing.) The row that was just given a sequence is the fullest that can take
    another of the same length. So each row takes as many of a length as it has space for before
    the next row takes any, and all rows with the same space can be filled at once.

    Returns:
        The row of each sequence, int32 [sequences] in descending order of length, and the number
        of rows.
    """
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
