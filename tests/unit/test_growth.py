"""The table in docs/planner.md of what grows with the nodes of a run."""

from __future__ import annotations

import pytest

from benchmarks.growth import NODES, PAGE, TABLE, count
from shardtune.cluster.stuck import RankStatus, stuck_ranks
from shardtune.config import DistributedConfig


@pytest.fixture(scope="module")
def columns() -> list[dict[str, str]]:
    return [count(nodes) for nodes in NODES[:2]]


def test_the_table_has_the_counts_of_the_functions_of_a_run(columns):
    table = TABLE.search(PAGE.read_text(encoding="utf-8"))
    assert table
    rows = [[cell.strip() for cell in line.split("|")] for line in table[2].splitlines()]
    for place, column in enumerate(columns, start=2):
        assert {cells[1]: cells[place] for cells in rows} == column


def test_two_rows_grow_faster_than_the_nodes(columns):
    fewer, more = ({k: float(v.replace(",", "")) for k, v in each.items()} for each in columns)
    # Others may grow as the nodes beside node 0 do, from 1 to 15.
    faster = {what for what in fewer if more[what] > 15 * fewer[what]}
    assert faster == {"preflight: MB of these", "preflight: paths tried"}


def test_ranks_are_not_compared_with_one_another(monkeypatch):
    """512 of them would be compared a hundred thousand times a second."""

    def equal(self: RankStatus, other: object) -> bool:
        raise AssertionError("compared")

    monkeypatch.setattr(RankStatus, "__eq__", equal)
    assert stuck_ranks([RankStatus(rank, "host") for rank in range(4)], DistributedConfig()) is None
