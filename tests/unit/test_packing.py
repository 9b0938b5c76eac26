"""The rows that sequences share."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.data_run import log_normal_lengths, random_lengths
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtune.data.packing import best_fit

LENGTHS = st.integers(1, 300).flatmap(
    lambda longest: st.tuples(st.lists(st.integers(1, longest), min_size=1), st.just(longest))
)


def naive_best_fit(lengths: list[int], max_length: int) -> list[int]:
    """The tokens in each row, by trying every row for every sequence."""
    filled: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row, tokens in enumerate(filled) if tokens + length <= max_length]
        if fitting:
            filled[max(fitting, key=lambda row: filled[row])] += length
        else:
            filled.append(length)
    return filled


def check_rows(lengths: list[int], max_length: int) -> None:
    row_of, n_rows = best_fit(np.array(lengths, np.int32), max_length)
    filled = np.bincount(row_of, sorted(lengths, reverse=True)).astype(int).tolist()
    assert sorted(filled) == sorted(naive_best_fit(lengths, max_length))
    assert n_rows == len(filled)


@given(LENGTHS)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_rows_are_those_of_a_naive_best_fit(case):
    check_rows(*case)


@pytest.mark.parametrize(
    ("lengths", "max_length"),
    [
        (random_lengths(700, 30, 0), 256),
        (random_lengths(200, 4096, 0), 4096),
        (log_normal_lengths(2000, 50, 400, 0), 400),  # a row takes several of the same length
        (log_normal_lengths(1500, 300, 256, 0), 256),  # many fill a row
    ],
    ids=["short", "long", "equal", "full"],
)
def test_many_rows_are_those_of_a_naive_best_fit(lengths, max_length):
    check_rows(lengths.tolist(), max_length)
