"""The benchmarks' gate: no figure for a side that did not do the reference's work."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import REPOSITORY

sys.path.insert(0, str(Path(REPOSITORY, "benchmarks")))

from measure import Side, Unequal, gated, require_equal_work

PEER = Side(
    losses=[3.0, 2.5],
    seconds=[1.0],
    memory_bytes=10**9,
    tokens=100,
    trained_tokens=30,
    computed_tokens=130,
    head_rows=130,
)
ROUNDED = replace(PEER, losses=[3.0002, 2.5], computed_tokens=100, head_rows=30)


def test_equal_work_passes_however_it_was_batched() -> None:
    require_equal_work(ROUNDED, PEER, 1e-4)


@pytest.mark.parametrize(
    ("side", "said"),
    [
        (replace(PEER, losses=[3.0, 2.501]), "the loss of step 2 is 2.501000 and 2.500000"),
        (replace(PEER, losses=[3.0, float("nan")]), "the loss of step 2 is nan"),
        (replace(PEER, losses=[3.0]), "1 and 2 steps have a loss"),
        (replace(PEER, trained_tokens=31), "trained_tokens of a step are 31 and 30"),
        (replace(PEER, tokens=99), "tokens of a step are 99 and 100"),
    ],
)
def test_unequal_work_is_refused(side: Side, said: str) -> None:
    with pytest.raises(Unequal, match=said):
        require_equal_work(side, PEER, 1e-4)
    equal, refused = gated({"peer": [PEER], "ours": [ROUNDED, side]}, "peer", 1e-4)
    assert list(equal) == ["peer"], "one run that differs takes the figures of all"
    assert said.split(" and ")[0] in refused["ours"]


def test_without_a_reference_nothing_counts() -> None:
    equal, refused = gated({"peer": [], "ours": [ROUNDED]}, "peer", 1e-4)
    assert not equal
    assert refused == dict.fromkeys(("peer", "ours"), "peer did not run to its end")
