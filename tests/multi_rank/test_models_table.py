"""The table of architectures in docs/models.csv says what the code does."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from conftest import REPOSITORY

from benchmarks.models import architectures, in_own_process
from benchmarks.models_page import EXACT, PAGE, RESULTS, RUNS, TABLE, as_csv, with_counts
from benchmarks.runs import relative, runs_of

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
FOUND: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8"))
TRIED = {kind: row for kind, row in FOUND.items() if "rows" in row}
TRAINED: dict[str, dict[str, Any]] = json.loads(RUNS.read_text(encoding="utf-8"))
WITH_STATE = {"linear_attention", "hybrid", "hybrid_sliding", "conv"}  # kinds of layers
NUMBERS = {"loss off": 2e-6, "gradients off": 1e-5}


def test_the_page_has_the_rows_that_were_found():
    text = PAGE.read_text(encoding="utf-8")
    assert list(FOUND) == architectures()
    assert with_counts(text, FOUND, TRAINED) == text
    assert as_csv(FOUND, TRAINED) == TABLE.read_text(encoding="utf-8")


def test_most_rows_are_flat_and_all_are_exact():
    flat = [kind for kind, row in TRIED.items() if row["rows"] == "flat"]
    assert len(flat) >= 0.75 * len(TRIED) and not any("fails" in row for row in FOUND.values())
    for kind, row in TRIED.items():
        assert all(row[name] < limit for name, limit in NUMBERS.items()), kind
        require_exact(kind, TRAINED[kind], runs_of(TRIED[kind]))


# Each is a command of its own: what it forks must not have what other tests have left.
_TRAIN = """
import json, sys
from benchmarks.runs import distances_of
given = json.loads(sys.argv[1])
print(json.dumps({kind: distances_of(kind, names) for kind, names in given.items()}))
"""


@pytest.mark.full
@pytest.mark.parametrize("first", range(0, len(FAMILIES), 10))
def test_runs_are_exact_on_one_rank_on_two_and_in_stages(first):
    """Of every second family: `python -m benchmarks runs` trains all."""
    given = {kind: runs_of(TRIED[kind]) for kind in FAMILIES[first : first + 10 : 2]}
    done = subprocess.run(
        [sys.executable, "-c", _TRAIN, json.dumps(given)],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=True,
    )
    trained = json.loads(done.stdout.splitlines()[-1])
    for kind, names in given.items():
        require_exact(kind, trained[kind], names)


def test_a_distance_that_is_no_number_is_not_small():
    off = relative(([1.0, math.nan], [1.0, 1.0]), ([1.0, 1.0], [1.0, 2.0]))
    assert math.isnan(off["loss"]) and off["norm"] == 0.5


def require_exact(kind: str, runs: dict[str, Any], names: list[str]) -> None:
    """Losses, and norms and weights but for what the loop in float32 is from one in float64."""
    runs = dict(runs)
    keeps_state = not WITH_STATE.isdisjoint(TRIED[kind]["layers"])
    exact_norm = 10 * EXACT if keeps_state else EXACT
    rounding = 4 * (runs.pop("rounding", None) or 0.0)
    assert list(runs) == names, kind
    for name, off in runs.items():
        assert not isinstance(off, str), f"{kind}, {name}: {off}"
        assert off["loss"] <= EXACT and off["norm"] <= max(exact_norm, rounding), f"{kind}, {name}"
        assert off["weights"] <= max(10 * EXACT, rounding), f"{kind}, {name}"


@pytest.mark.parametrize(
    "kind",
    [
        *QUICK,
        *(pytest.param(kind, marks=pytest.mark.full) for kind in FAMILIES if kind not in QUICK),
    ],
)
def test_a_row_is_what_the_code_does(kind):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a fork has no other threads
    try:
        row = in_own_process(kind)
    finally:
        torch.set_num_threads(threads)
    for name, limit in NUMBERS.items():
        if name in row:
            assert row[name] < limit
    assert _words(row) == _words(FOUND[kind])


def _words(row: dict[str, Any]) -> dict[str, Any]:
    """Leave out numbers, which differ from CPU to CPU, and the names of folders."""
    return {
        name: " ".join(word for word in str(value).split() if "%" not in word and "/" not in word)
        for name, value in row.items()
        if name not in NUMBERS
    }
