"""The descriptions of the configuration and of metrics.jsonl are complete and current."""

from __future__ import annotations

import json

import pytest
from helpers.commands import REPOSITORY
from helpers.configs import DEFAULTS

from shardtune import metrics_schema
from shardtune.__main__ import run
from shardtune.metrics_schema import KINDS, markdown
from shardtune.report.read_run import read_entry

SCHEMA = REPOSITORY / "docs/config.schema.json"


@pytest.mark.parametrize(
    ("arguments", "file"),
    [([], "docs/config.schema.json"), (["--markdown"], "docs/configuration.md")],
)
def test_the_committed_description_is_current(arguments, file, capsys):
    assert run(["config-schema", *arguments]) == 0
    printed = capsys.readouterr().out
    assert printed == (REPOSITORY / file).read_text(encoding="utf-8"), "run `make docs`"


def test_every_key_has_its_default_and_a_description():
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    assert set(schema["properties"]) == set(DEFAULTS)
    required = []
    for section, defaults in DEFAULTS.items():
        reference = schema["properties"][section]["$ref"].rpartition("/")[2]
        model = schema["$defs"][reference]
        assert model["properties"].keys() == defaults.keys() and not model["additionalProperties"]
        required += [f"{section}.{name}" for name in model.get("required", [])]
        for name, key in model["properties"].items():
            assert key["description"].endswith((".", "`"))
            if "default" in key and (section, name) != ("run", "dir"):
                assert key["default"] == defaults[name]
    assert required == ["model.path", "data.train"]


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
        ({"kind": "step", "step": 3, "loss": "low"}, False),
        ({"kind": "step", "step": -1}, False),
        ({"kind": "experts", "step": 3, "layers": [{"entropy": 1.0}]}, False),
    ],
)
def test_a_line_is_read_by_the_fields_that_it_has(entry, is_read):
    assert read_entry(json.dumps(entry)) == (entry if is_read else None)
