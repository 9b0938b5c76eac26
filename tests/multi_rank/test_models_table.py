"""The table of architectures in docs/models.csv says what the code does."""

from __future__ import annotations

import csv
import json
import math
import os
import sys

import pytest
from conftest import REPOSITORY
from helpers.commands import completed, finish

from benchmarks.models import (
    COLUMNS,
    MESHES,
    TABLE,
    Row,
    architectures,
    checked,
    in_own_process,
    relative,
)

# Experts with a state, sinks, keys that are not tokens, logits that are changed in place, layers
# that hand on more than hidden states, and positions that a class hands down without naming them.
QUICK = ["qwen3_5_moe", "gpt_oss", "deepseek_v4", "chameleon", "falcon_h1"]
QUICK += ["moss_transcribe_diarize"]
# One of each kind of layer, of rows and of experts; the others are tried by hand, as docs/models.md
# says.
FAMILIES = [
    *QUICK,
    *("deepseek_v32", "gemma2", "gemma3n_text", "gemma4", "glm4_moe", "glm5_next", "hy_v4"),
    *("jamba", "kimi_linear", "lfm2_moe", "llama", "llama4_text", "longcat_flash", "mamba2"),
    *("minimax", "nemotron_h", "phi3", "qwen4_exp_text", "step3p7"),
]
with TABLE.open(encoding="utf-8", newline="") as opened:
    FOUND: dict[str, Row] = {row["model type"]: row for row in csv.DictReader(opened)}
TRIED = {kind: row for kind, row in FOUND.items() if row["gradients"]}
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
        require_near_gradients(row)
        require_exact(row)


# Each is a command of its own: what it forks must not have what other tests have left.
_TRAIN = """
import json, sys
from functools import partial
from benchmarks.models import in_own_process, trained
rows = json.loads(sys.argv[1])
print(json.dumps([in_own_process(partial(trained, row), row["model type"]) for row in rows]))
"""


@pytest.mark.full
@pytest.mark.parametrize("first", range(0, len(FAMILIES), 10))
def test_runs_are_exact_on_one_rank_on_two_and_in_stages(first):
    """Of every third family: `python -m benchmarks models` trains all."""
    rows = [without_numbers(FOUND[kind]) for kind in FAMILIES[first : first + 10 : 3]]
    command = [sys.executable, "-c", _TRAIN, json.dumps(rows)]
    done = completed(command, REPOSITORY, os.environ | {"OMP_NUM_THREADS": "1"}, timeout_s=590)
    for row in json.loads(finish(done).splitlines()[-1]):
        assert row["rows"] != "fails", row
        require_exact(row)


def test_a_distance_that_is_no_number_is_not_small():
    assert math.isnan(relative([1.0, math.nan], [1.0, 1.0]))
    assert relative([1.0, 1.0], [1.0, 2.0]) == 0.5


def require_near_gradients(row: Row) -> None:
    assert float(row["losses"]) < 2e-6 and float(row["gradients"]) < 1e-5, row["model type"]


def require_exact(row: Row) -> None:
    """Losses, and norms and weights but for what the loop in float32 is from one in float64."""
    kind, rounding = row["model type"], 4 * float(row["rounding"] or 0.0)
    keeps_state = not WITH_STATE.isdisjoint(row["layers"].split(", "))
    exact_norm = 10 * EXACT if keeps_state else EXACT
    assert float(row["losses"]) <= EXACT, kind
    for run in RUNS:
        if row[run] not in ("", "no"):
            assert float(row[run]) <= max(exact_norm, rounding), f"{kind}, {run}"
    assert float(row["weights"]) <= max(10 * EXACT, rounding), kind


@pytest.mark.parametrize(
    "kind",
    [
        *QUICK,
        *(pytest.param(kind, marks=pytest.mark.full) for kind in FAMILIES if kind not in QUICK),
    ],
)
def test_a_row_is_what_the_code_does(kind):
    row = in_own_process(checked, kind)
    require_near_gradients(row)
    assert _words(row) == _words(without_numbers(FOUND[kind]))


def without_numbers(row: Row) -> Row:
    """Return a row of the table as it is before its runs, which need its loss."""
    runs = {run: "yes" for run in RUNS if row[run] not in ("", "no")}
    return row | runs | {"weights": "", "rounding": ""}


def _words(row: Row) -> Row:
    """Leave out numbers, which differ from CPU to CPU, and the names of folders."""
    return {
        name: " ".join(w for w in row.get(name, "").split() if "%" not in w and "/" not in w)
        for name in COLUMNS
        if name not in ("losses", "gradients")
    }
