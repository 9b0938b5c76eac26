"""Plans of runs that others measured: docs/published.md is what the code computes."""

from __future__ import annotations

import json
from argparse import Namespace
from statistics import median

import pytest

from benchmarks import published

GROUPS, FIGURES = published.read()
ROWS = [*GROUPS["best"], *GROUPS["others"]]


def _ratios(place: int) -> list[float]:
    pairs = (published.compare(row, FIGURES)[place] for row in GROUPS["best"])
    return [planned / measured for measured, planned in pairs if measured == measured]


def test_plans_of_the_best_runs_are_near_what_was_measured():
    memory, seconds = _ratios(0), _ratios(1)
    assert (len(ROWS), len(memory), len(seconds)) == (44, 15, 17)
    assert all(0.9 <= ratio <= 1.1 for ratio in memory) and 0.97 <= median(memory) <= 1.03
    assert all(0.7 <= ratio <= 1.3 for ratio in seconds)


def test_every_run_has_its_source_settings_and_figures():
    for row in ROWS:
        assert row["link"].startswith("https://") and row["settings"] and row["hardware"]
        assert row["measured"]["step_s"] and published._plan_id(row) in FIGURES


@pytest.mark.full
# Together they take all choices of other programs, and balanced experts.
@pytest.mark.parametrize(
    "name",
    [
        "prime-06b-sft-8k",
        "titan-8b-8-b1",
        "kempner-7b-4",
        "automodel-gptoss-20b",
    ],
)
def test_the_command_plans_a_run_anew_and_writes_the_page(name, tmp_path, monkeypatch):
    others = {key: counted for key, counted in FIGURES.items() if key != name}
    (tmp_path / "published.json").write_text(json.dumps(others), encoding="utf-8")
    monkeypatch.setattr(published, "FIGURES", tmp_path / "published.json")
    page = published.PAGE.read_text(encoding="utf-8")
    monkeypatch.setattr(published, "PAGE", tmp_path / "published.md")
    published.main(Namespace(names=[name]))
    assert published.read()[1] == FIGURES
    assert published.PAGE.read_text(encoding="utf-8") == page
