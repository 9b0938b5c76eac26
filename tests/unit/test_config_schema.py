"""The descriptions of the configuration: complete, current, and named by the shipped YAML files."""

from __future__ import annotations

import json

import pytest
from helpers.commands import REPOSITORY
from helpers.configs import DEFAULTS

from shardtune.__main__ import run

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
