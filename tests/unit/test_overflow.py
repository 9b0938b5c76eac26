"""Sequences that are longer than a row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtune.data.overflow import fit_to_length
from shardtune.data.records import RecordError

SEQUENCES = st.lists(st.booleans(), max_size=40).map(lambda flags: np.array([False, *flags]))


@given(SEQUENCES, st.integers(2, 12), st.sampled_from(["truncate", "split", "drop", "error"]))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_pieces_fit_and_hold_each_trained_token_at_most_once(
    trained: np.ndarray, max_length: int, overflow: str
) -> None:
    is_long = len(trained) > max_length
    if overflow == "error" and is_long:
        with pytest.raises(RecordError, match=f"has {len(trained)} tokens, more than"):
            fit_to_length(trained, max_length, overflow)
        return
    pieces = fit_to_length(trained, max_length, overflow)
    for piece, flags in pieces:
        assert 2 <= piece.stop - piece.start == len(flags) <= max_length
        assert flags.any() and not flags[0]
    positions = [piece.start + int(t) for piece, flags in pieces for t in np.flatnonzero(flags)]
    kept = len(trained)
    if is_long:
        kept = {"truncate": max_length, "split": len(trained), "drop": 0}[overflow]
    assert positions == np.flatnonzero(trained[:kept]).tolist()
    if overflow != "split" or not is_long:
        assert [piece for piece, _ in pieces] == [slice(0, kept)] * int(trained[:kept].any())
