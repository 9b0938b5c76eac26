"""The table of architectures in docs/models.csv says what the code does."""

import csv
import json
import math
import os
import sys

import pytest
from helpers.commands import REPOSITORY, completed, finish

from benchmarks.models import COLUMNS, DISTANCES, MESHES, TABLE, Row, architectures, relative

# One of each kind of layer, of rows and of experts, in groups that take as long; the others are
# tried by hand, as docs/models.md says.
SINKS = ["gpt_oss"]
GROUPS = [
    [
        "deepseek_v4",  # keys that are not tokens
        "llama4_text",  # a mask in chunks, and layers that hand on more than hidden states
    ],
    ["mamba2"],  # no attention
]
with TABLE.open(encoding="utf-8", newline="") as opened:
    FOUND: dict[str, Row] = {row["model type"]: row for row in csv.DictReader(opened)}
TRIED = {kind: row for kind, row in FOUND.items() if row["one rank"]}
RUNS = ("one rank", "two ranks", *MESHES)
WITH_STATE = {"linear_attention", "hybrid", "hybrid_sliding", "conv"}  # kinds of layers
EXACT = 1e-6  # the largest distance of a loss or a norm that is rounding alone


def test_the_table_has_a_row_of_each_architecture():
    assert list(FOUND) == architectures()
    assert all(tuple(row) == COLUMNS for row in FOUND.values())


def test_most_rows_are_flat_and_all_are_exact():
    flat = [kind for kind, row in TRIED.items() if row["rows"] == "flat"]
    assert len(flat) >= 0.75 * len(TRIED)
    assert not any(row["rows"] == "fails" for row in FOUND.values())
    for row in TRIED.values():
        require_exact(row)


# A command of its own: what it forks must not have what other tests have left.
_ROWS = """
import json, sys
from benchmarks.models import row_of
print(json.dumps([row_of(kind) for kind in sys.argv[1:]]))
"""


@pytest.mark.parametrize(
    "kinds",
    [SINKS, *(pytest.param(group, marks=pytest.mark.full, id=group[0]) for group in GROUPS)],
)
def test_a_row_is_what_the_code_does(kinds):
    command = [sys.executable, "-c", _ROWS, *kinds]
    done = completed(command, REPOSITORY, os.environ | {"OMP_NUM_THREADS": "1"}, timeout_s=590)
    for row in json.loads(finish(done).splitlines()[-1]):
        assert _words(row) == _words(FOUND[row["model type"]])
        require_exact(row)


def test_a_distance_that_is_no_number_is_not_small():
    assert math.isnan(relative([1.0, math.nan], [1.0, 1.0]))
    assert relative([1.0, 1.0], [1.0, 2.0]) == 0.5


def require_exact(row: Row) -> None:
    """Losses, and norms and weights but for what the loop in float32 is from one in float64."""
    kind, rounding = row["model type"], 4 * float(row["rounding"] or 0.0)
    keeps_state = not WITH_STATE.isdisjoint(row["layers"].split(", "))
    exact_norm = 10 * EXACT if keeps_state else EXACT
    assert float(row["losses"]) <= EXACT, kind
    for run in RUNS:
        if row.get(run, "") not in ("", "no"):
            assert float(row[run]) <= max(exact_norm, rounding), f"{kind}, {run}"
    assert float(row["weights"]) <= max(10 * EXACT, rounding), kind


def _words(row: Row) -> Row:
    """Return a row without numbers, which differ from CPU to CPU, and names of folders."""
    cells = {name: row.get(name, "") for name in COLUMNS}
    cells |= {name: "a number" for name in DISTANCES if cells[name] not in ("", "no")}
    return {
        name: " ".join(w for w in cell.split() if "%" not in w and "/" not in w)
        for name, cell in cells.items()
    }
