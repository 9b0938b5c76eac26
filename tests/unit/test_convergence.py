"""The page of convergence says what the runs have shown, and equal ways are equal there."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

from benchmarks.convergence import PAGE, RESULTS, SHORT, VARIANTS, charts, furthest, page
from shardtune.report.draw import write_svg

FOUND: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8"))
EQUAL = [name for name, variant in VARIANTS.items() if variant.reference]


def test_the_page_and_its_picture_have_the_runs_that_were_made(tmp_path):
    assert list(FOUND) == list(VARIANTS)
    assert page(FOUND) == PAGE.read_text(encoding="utf-8")
    write_svg(charts(FOUND), tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_bytes() == PAGE.with_suffix(".svg").read_bytes()


def test_runs_that_divide_the_work_lose_what_one_rank_loses():
    assert EQUAL == ["replicas", "stages", "tiny experts, divided"]
    for name in EQUAL:
        assert furthest(FOUND, name, steps=1) < 1e-5
        assert furthest(FOUND, name) < 0.02, "bfloat16 rounds more with each step"
        changed = deepcopy(FOUND)
        changed[name]["losses"][3] *= 1.5
        assert 0.4 < furthest(changed, name) < 0.6


def test_every_run_learns():
    for name, result in FOUND.items():
        first, last = result["perplexities"]
        assert last < 0.6 * first
        assert VARIANTS[name].is_tiny or result["exact after"] > result["exact before"]


def test_a_short_run_leaves_the_page_as_it_is():
    assert {SHORT["results"], SHORT["page"]}.isdisjoint({RESULTS, PAGE})
