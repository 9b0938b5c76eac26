"""The order of data, a function of seed, epoch and lengths, and the rows that sequences share."""

import tracemalloc

import numpy as np
import pytest
from helpers.data_run import log_normal_lengths, random_lengths
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtune.data.order import best_fit, lay_out_rows


@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=200),
    st.booleans(),
    st.integers(0, 2**63 - 1),
    st.integers(0, 9),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_every_sequence_is_in_one_row_that_fits(drawn, packing, seed, epoch):
    lengths = np.array(drawn, np.int32)
    rows = lay_out_rows(lengths, 100, packing, seed, epoch)
    members = [rows[row].tolist() for row in range(len(rows))]
    assert sorted(sequence for row in members for sequence in row) == list(range(len(lengths)))
    assert all(row and lengths[row].sum() <= 100 for row in members)
    assert packing or len(rows) == len(lengths)


@pytest.mark.parametrize("packing", [True, False])
def test_rows_are_a_function_of_seed_and_epoch(packing):
    lengths = random_lengths(300, 90, 3)

    def planned(seed: int, epoch: int) -> list[list[int]]:
        rows = lay_out_rows(lengths, 100, packing, seed, epoch)
        return [rows[row].tolist() for row in range(len(rows))]

    first = planned(1, 0)
    assert planned(1, 0) == first
    others = [planned(seed, epoch) for seed, epoch in ((1, 1), (2, 0), (2, 1), (0, 1))]
    assert all(other != first and sorted(map(sorted, other)) != first for other in others)
    assert len({str(other) for other in others}) == len(others)
    assert {len(other) for other in others} == {len(first)}
    # Neither the longest sequences nor the first records come first.
    for property_of in (lambda row: lengths[row].max(), lambda row: row[0]):
        values = [property_of(row) for row in first]
        assert abs(np.corrcoef(range(len(first)), values)[0, 1]) < 0.3


def test_rows_that_stand_together_are_random_among_those_of_like_cost():
    """No group has the same rows in two epochs, and expensive rows are anywhere in an epoch."""
    lengths = log_normal_lengths(16_000, 500, 4096, 0)
    groups = []
    for epoch in range(2):
        rows = lay_out_rows(lengths, 4096, True, 1, epoch)
        starts = range(0, len(rows), 32)
        groups.append({frozenset(rows.part(i, i + 32).members.tolist()) for i in starts})
        longest = np.maximum.reduceat(lengths[rows.members], rows.starts[:-1])
        assert abs(np.corrcoef(np.arange(len(rows)), longest)[0, 1]) < 0.3
    assert not groups[0] & groups[1]


def test_a_plan_holds_no_python_object_per_record(tmp_path):
    lengths = log_normal_lengths(200_000, 500, 4096, 0)
    (tmp_path / "lengths").write_bytes(lengths.tobytes())
    mapped = np.memmap(tmp_path / "lengths", np.int32, mode="r")
    tracemalloc.start()
    rows = lay_out_rows(mapped, 4096, True, 1, 0)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 48 * len(lengths)
    in_memory = lay_out_rows(lengths, 4096, True, 1, 0)
    assert (rows.members == in_memory.members).all() and (rows.starts == in_memory.starts).all()


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
