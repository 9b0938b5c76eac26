"""The table of architectures in docs/models.md says what the code does."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from benchmarks.models import PAGE, RESULTS, architectures, in_own_process, with_tables

# Experts with a state, sinks, keys that are not tokens, logits that are changed in place, positions
# of a model's own, layers that hand on more than hidden states, convolutions without a module, and
# positions that a class hands down without naming them.
QUICK = ["qwen3_5_moe", "gpt_oss", "deepseek_v4", "chameleon", "kosmos-2.5", "falcon_h1"]
QUICK += ["inkling2_text", "moss_transcribe_diarize"]
FOUND: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8"))
NUMBERS = {"loss off": 2e-6, "gradients off": 1e-5}


def test_the_page_has_the_rows_that_were_found() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert list(FOUND) == architectures()
    assert with_tables(text, FOUND) == text


def test_most_rows_are_flat_and_all_are_exact() -> None:
    tried = {kind: row for kind, row in FOUND.items() if "rows" in row}
    flat = [kind for kind, row in tried.items() if row["rows"] == "flat"]
    assert len(flat) >= 0.75 * len(tried) and not any("fails" in row for row in FOUND.values())
    for kind, row in tried.items():
        assert all(row[name] < limit for name, limit in NUMBERS.items()), kind


@pytest.mark.parametrize(
    "kind",
    [
        *QUICK,
        *(
            pytest.param(kind, marks=pytest.mark.full)
            for kind in architectures()
            if kind not in QUICK
        ),
    ],
)
def test_a_row_is_what_the_code_does(kind: str) -> None:
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
