"""The schema of metrics.jsonl: its page, and what a reader takes."""

from __future__ import annotations

import json

import pytest
from helpers.commands import REPOSITORY

from shardtune import metrics_schema
from shardtune.metrics_schema import KINDS, markdown
from shardtune.report.read_run import read_entry


def test_the_committed_page_is_current():
    page = REPOSITORY / "docs/metrics.md"
    assert markdown() == page.read_text(encoding="utf-8"), "run `make docs`"


def test_every_kind_of_object_is_read_and_has_a_table():
    """A class that is left out of the union is written, and neither checked nor explained."""
    written = {
        name
        for name, value in vars(metrics_schema).items()
        if name.endswith("Entry") and "kind" in getattr(value, "__annotations__", ())
    }
    assert written - {"_Entry"} == {entry.__name__ for entry in KINDS.values()}


@pytest.mark.parametrize(
    ("entry", "is_read"),
    [
        ({"kind": "step", "step": 3}, True),  # of an older run
        ({"kind": "step", "step": 3, "loss": None, "heat": [9]}, True),  # of a newer one
        ({"kind": "weather", "step": 3, "loss": "low"}, True),
        ({"kind": "step", "step": "3"}, False),
        ({"kind": "step"}, False),
    ],
)
def test_a_line_is_read_by_the_fields_that_it_has(entry, is_read):
    assert read_entry(json.dumps(entry)) == (entry if is_read else None)
