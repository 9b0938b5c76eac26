"""Descriptions of the configuration: JSON schema for editors, Markdown for people."""

import json
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from shardtune import other_names
from shardtune.config import KEYS, SECTIONS, Config, resume_may_change
from shardtune.config_io import allowed_values, bare

_INTRODUCTION = """\
# Configuration

`shardtune config-schema` prints the JSON schema, and with `--markdown` this page.

A run reads a YAML file (`--config FILE`; by default `config.yaml`, whose comments name the cost of
each key), then `JOIN_TIMEOUT` of the environment, then `section.key=value` arguments. A value is
YAML, and `1e-5` is a number. `config.yaml` in `run.dir` holds every value of a run and its origin.
An editor with a YAML language server checks a file that begins with this line and offers its keys:

    # yaml-language-server: $schema=docs/config.schema.json

A resume may change the keys marked "yes", and the number of ranks. It refuses any other change.
"""


class _WithoutTitles(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def json_schema() -> str:
    schema = Config.model_json_schema(schema_generator=_WithoutTitles)
    return json.dumps(schema, indent=2) + "\n"


def markdown() -> str:
    """Return docs/configuration.md: a table per section."""
    lines = [_INTRODUCTION]
    for section, model in SECTIONS.items():
        properties = model.model_json_schema()["properties"]
        lines += [f"## {section}", "", f"{model.__doc__}", ""]
        lines += [
            "| key | default | allowed | a resume may change it | meaning |",
            "|---|---|---|---|---|",
        ]
        for name, schema in properties.items():
            key = f"{section}.{name}"
            default = "required" if KEYS[key].is_required() else f"`{bare(schema['default'])}`"
            allowed = allowed_values(key)
            may_change = "yes" if resume_may_change(key) else "no"
            meaning = " ".join(schema["description"].split())
            lines.append(f"| `{key}` | {default} | {allowed} | {may_change} | {meaning} |")
        lines.append("")
    return "\n".join([*lines, other_names.markdown()])
