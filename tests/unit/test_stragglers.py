"""The slowest rank and the phase to blame."""

from __future__ import annotations

import pytest

from shardtune.training.observers.stragglers import slowest


def test_the_slowest_rank_is_the_one_whose_phases_exceed_the_median():
    # The medians are 1.0 and 0.3, neither the least nor the most of the others.
    seconds = [[0.0, 0.1], [1.0, 0.9], [1.0, 0.2], [1.0, 0.3], [1.0, 0.4]]
    assert slowest(seconds, 5) == (1, pytest.approx(1.9 / 1.3), 1)
    assert slowest([[0.1, 1.0, 0.1], [1.1, 0.9, 0.1]], 2) == (1, pytest.approx(2.1 / 1.2), 0)
    # Not the longest phase, but the one that is longer than the others'.
    assert slowest([[3.0, 1.0, 0.1], [3.1, 2.0, 0.1], [3.0, 1.1, 0.1]], 3)[::2] == (1, 1)
    assert slowest([[1.0, 1.0, 1.0]], 1) == (0, 1.0, 0)


def test_a_rank_is_held_against_those_of_its_stage():
    """The second stage has more work, and the rank that is slow for its own is in it."""
    seconds = [[0.1, 1.0], [0.1, 1.1], [0.1, 3.0], [0.1, 6.1]]
    assert slowest(seconds, 2) == (3, pytest.approx(2.0), 1)
    assert slowest([*seconds[3:1:-1], *seconds[:2]], 2)[0] == 0
