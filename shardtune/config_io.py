"""Read configurations from YAML, environment and command line; write and compare them.

This module does not import torch, so that a command line is refused before that takes its seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml
from pydantic import ValidationError
from pydantic_core import to_jsonable_python

from shardtune.config import KEYS, SECTIONS, Config, marks, resume_may_change
from shardtune.errors import UserError, first_line

# YAML 1.2's plain values. In PyYAML's 1.1 `1e-5` is text, `no` false, `1:30` 90 and `010` 8.
_WORDS: dict[str, Any] = dict.fromkeys(("", "~", "null", "Null", "NULL"))
_WORDS |= dict.fromkeys(("true", "True", "TRUE"), True)
_WORDS |= dict.fromkeys(("false", "False", "FALSE"), False)
_NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map")}  # no other was written
_DEFAULTS: dict[str, Any] = to_jsonable_python(
    {key: field.default for key, field in KEYS.items() if not field.is_required()}
)
_TEXT = "text that is not empty"
_BOUNDS = {
    "minimum": "of at least",
    "exclusiveMinimum": "above",
    "exclusiveMaximum": "below",
    "maximum": "at most",
}
_MOST_NESTED = 4  # a list of mappings in a section has 3; an alias to itself would nest for ever


class _Given(NamedTuple):
    """A value of the file, the environment or the command line: parsed, as written, and where."""

    value: Any
    text: str
    where: str
    origin: str

    def __str__(self) -> str:
        return f"{self.text} ({self.where})"


class Parser(argparse.ArgumentParser):
    """An argument parser that raises UserError, so that a wrong command line ends as a refusal."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} - see {self.prog} --help")


def read_run_arguments(arguments: Sequence[str], default_config: Path) -> Config:
    """Read the arguments of train_fsdp.py: [--config FILE] [section.key=value ...].

    Raises:
        UserError: with every problem of the arguments, the file and the environment.
    """
    parser = Parser(
        prog="train_fsdp.py",
        description="Fine-tune a causal language model with FSDP.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        type=Path,
        default=default_config,
        metavar="FILE",
        help="YAML file with the run's configuration (default: the config.yaml beside this script)",
    )
    parser.add_argument(
        "assignments",
        nargs="*",
        metavar="section.key=value",
        help="values that override the file's",
    )
    options = parser.parse_intermixed_args(arguments)  # an assignment may stand behind an option
    return load_config(options.config, options.assignments, os.environ)


def load_config(path: Path, assignments: Sequence[str], environ: Mapping[str, str]) -> Config:
    """Read `path`, then JOIN_TIMEOUT of `environ`, then `section.key=value` assignments.

    Raises:
        UserError: with every problem of all three.
    """
    problems: list[str] = []
    given: dict[str, _Given] = {}
    is_readable = True
    try:
        given |= _collect(_items(*_read_file(path), str(path)), problems)
    except UserError as error:
        problems += error.problems
        is_readable = False
    if join_timeout := environ.get("JOIN_TIMEOUT"):
        key = "distributed.join_timeout_s"
        given[key] = _parse(join_timeout, "environment JOIN_TIMEOUT", "environment")
    given |= _read_assignments(assignments, problems)

    sections: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    sections["run"]["dir"] = f"runs/{path.stem}"
    for key, (value, *_) in given.items():
        section, _, name = key.partition(".")
        sections[section][name] = value
    origins = {key: given[key].origin if key in given else "default" for key in KEYS}
    errors: dict[str, str] = {}
    try:
        config = Config.model_validate({**sections, "origins": origins})
    except ValidationError as error:
        errors = {".".join(map(str, each["loc"][:2])): each["type"] for each in error.errors()}
    for key, field in KEYS.items():
        if key in given:
            problem = _problem(key, given[key], errors.get(key))
            problems += [problem] if problem else []
        elif key in errors and is_readable:
            example = f"{key}={(field.examples or [''])[0]}"
            problems.append(f"{key} is required - for example {example}")
    if problems:
        raise UserError(*problems)
    return config


def remarks(config: Config) -> list[str]:
    """Return a line for each value, other than the default, that another setting switches off."""
    data = config.data
    has_eval_data = data.eval is not None or data.eval_fraction > 0
    no_lora = config.lora.rank is None and "lora.rank is null, so every weight is trained"
    is_constant = config.scheduler.name == "constant"
    reasons = {
        "run.ignore_plan": "no plan refuses a run yet",
        "data.eval_fraction": data.eval is not None and "data.eval is given",
        "lora.alpha": no_lora,
        "lora.dropout": no_lora,
        "lora.targets": no_lora,
        "scheduler.min_lr_ratio": is_constant and "scheduler.name is constant",
        "eval.every_steps": not has_eval_data and "no evaluation data is given",
        "export.dtype": not config.export.final and "export.final is false",
        "export.merge": no_lora,
    }
    values = _flat(to_dict(config))
    return [
        f"{key} = {_to_yaml(values[key])} ({config.origins[key]}) has no effect: {reason}"
        for key, reason in reasons.items()
        if reason and values[key] != _DEFAULTS[key]
    ]


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """Return section -> key -> value, in JSON's types alone."""
    return config.model_dump(mode="json")


def write_config(config: Config, path: Path) -> None:
    """Write a file for `load_config` atomically, with the origin of every value behind it."""
    lines = []
    for section, values in to_dict(config).items():
        lines.append(f"{section}:")
        for key, value in values.items():
            lines.append(f"  {key}: {_to_yaml(value)}  # {config.origins[f'{section}.{key}']}")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text("\n".join(lines) + "\n", encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


Change = tuple[str, Any, Any]


def changed_keys(
    saved: Mapping[str, Mapping[str, Any]], current: Config
) -> tuple[list[Change], list[Change]]:
    """Compare a configuration that `to_dict` returned with the current one.

    A key that `saved` lacks had its default; a key that is not known any more is None now.

    Returns:
        Each difference as (section.key, saved value, current value): those that a resume allows,
        and the others.
    """
    new = _flat(to_dict(current))
    old = _DEFAULTS | _flat(saved)
    changes = [
        (key, old.get(key), new.get(key)) for key in new | old if old.get(key) != new.get(key)
    ]
    allowed = [change for change in changes if resume_may_change(change[0])]
    return allowed, [change for change in changes if change not in allowed]


def allowed_values(schema: Mapping[str, Any]) -> str:
    """Describe in words the values that the JSON schema of one key accepts."""
    kind = schema.get("type", "")
    if "anyOf" in schema:
        return " or ".join(map(allowed_values, schema["anyOf"]))
    if "enum" in schema:
        return " or ".join(schema["enum"])
    if kind in ("integer", "number"):
        bounds = [f"{word} {schema[bound]}" for bound, word in _BOUNDS.items() if bound in schema]
        return f"{'an integer' if kind == 'integer' else 'a number'} {' and '.join(bounds)}"
    if kind == "array":
        each = schema.get("prefixItems") or [schema["items"]]
        number = "two values" if len(each) == 2 else "values"
        return f"a list of {number}, each {allowed_values(each[0])}"
    return {"boolean": "true or false", "null": "null", "object": "a mapping"}.get(kind, _TEXT)


def _flat(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        f"{section}.{key}": value
        for section, values in sections.items()
        for key, value in values.items()
    }


def _to_yaml(value: Any) -> str:
    """Write a value as one line that `_to_python` reads back.

    Text is always quoted: PyYAML would leave bare some that is a number here.
    """
    if isinstance(value, str):
        return str(yaml.safe_dump(value, default_style='"', width=1 << 30)).strip()
    if isinstance(value, list):
        return f"[{', '.join(map(_to_yaml, value))}]"
    return json.dumps(value)


def _to_python(node: yaml.Node | None, depth: int = 0) -> Any:
    """Return a node's value. With a tag, or nested too deep, it stays a node: no key accepts it."""
    if node is None or node.tag not in _TAGS or depth > _MOST_NESTED:
        return node
    if isinstance(node, yaml.SequenceNode):
        return [_to_python(item, depth + 1) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return {key.value: _to_python(value, depth + 1) for key, value in node.value}
    is_quoted = isinstance(node, yaml.ScalarNode) and node.style is not None
    return node.value if is_quoted else _plain_value(node.value)


def _plain_value(text: str) -> Any:
    """Return the value of unquoted text. `1e3` is an integer, which may stand for a float."""
    if text in _WORDS:
        return _WORDS[text]
    if not _NUMBER.fullmatch(text):
        return text
    number = float(text)
    if not number.is_integer():
        return number
    return int(text) if text.lstrip("+-").isdigit() else int(number)


def _read_file(path: Path) -> tuple[yaml.MappingNode | None, str]:
    """Return the file's YAML, unless it is empty, and its text.

    Raises:
        UserError: because the file cannot be read or is not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.BaseLoader)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", "it is not UTF-8 text")
        raise UserError(
            f"the configuration file {path} cannot be read: {reason} - name one with --config FILE"
        ) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else path
        reason = getattr(error, "problem", None) or first_line(error)
        raise UserError(f"{where} is not YAML: {reason} - correct it") from error
    if isinstance(root, yaml.MappingNode | None):
        return root, text
    raise UserError(
        f"{path} is not a mapping - write sections such as `model:` with keys such as "
        "`  path: ...` below"
    )


def _items(
    mapping: yaml.MappingNode | None, text: str, file: str, section: str = ""
) -> Iterator[tuple[str, _Given]]:
    """Yield each section and each `section.key` of a file, known or not."""
    for key, node in mapping.value if mapping else ():
        source = " ".join(text[node.start_mark.index : node.end_mark.index].split()) or "null"
        name, where = f"{section}{key.value}", f"{file}:{key.start_mark.line + 1}"
        yield name, _Given(_to_python(node), source, where, "file")
        if name in SECTIONS and isinstance(node, yaml.MappingNode):
            yield from _items(node, text, file, f"{name}.")


def _read_assignments(assignments: Sequence[str], problems: list[str]) -> dict[str, _Given]:
    items = []
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if equals:
            items.append((name, _parse(text, "command line", "command line")))
        else:
            problems.append(f"{assignment} is not an assignment - write section.key=value")
    return _collect(items, problems)


def _parse(text: str, where: str, origin: str) -> _Given:
    """Parse a YAML value. If YAML rejects the text or cuts it at a `#`, the value is the error."""
    try:
        node = yaml.compose(text, Loader=yaml.BaseLoader)
        if text[node.end_mark.index if node else 0 :].strip():
            raise yaml.YAMLError("a comment")
        return _Given(_to_python(node), text, where, origin)
    except yaml.YAMLError as error:
        return _Given(error, text, where, origin)


def _collect(items: Iterable[tuple[str, _Given]], problems: list[str]) -> dict[str, _Given]:
    """Return the values of known keys; add a problem per name that is unknown or given twice."""
    given: dict[str, _Given] = {}
    for name, item in items:
        if name in given:
            places = (
                f"{given[name]} and {item}"
                if name in KEYS
                else f"{given[name].where} and {item.where}"
            )
            problems.append(f"{name} is given twice ({places}) - keep one of them")
        elif name in SECTIONS:
            if not isinstance(item.value, dict | None):
                problems.append(f"{name} = {item} is a section - give values to its keys")
        elif name not in KEYS:
            problems.append(_unknown(name, item))
        given.setdefault(name, item)
    return {key: item for key, item in given.items() if key in KEYS}


def _unknown(name: str, item: _Given) -> str:
    """Name the nearest key, or section for a mapping: `train.lr` is near `optimizer.lr`."""

    def likeness(other: str) -> tuple[float, float]:
        pairs = (name.lower(), other), (name.lower().rpartition(".")[2], other.rpartition(".")[2])
        whole, last = (SequenceMatcher(None, *pair).ratio() for pair in pairs)
        return max(whole, last), whole

    nearest = max(SECTIONS if isinstance(item.value, dict) else KEYS, key=likeness)
    if likeness(nearest)[0] >= 0.6:
        return f"{name} ({item.where}) is not known - the nearest known one is {nearest}"
    return f"{name} ({item.where}) is not known - the sections are {', '.join(SECTIONS)}"


def _problem(key: str, given: _Given, error: str | None) -> str | None:
    """Return the problem of a given value, if any; `error` is the type of pydantic's error."""
    if error is None:
        built = marks(key).get("built", [given.value])
        words = " or ".join(v if isinstance(v, str) else json.dumps(v) for v in built)
        return None if given.value in built else f"{key} = {given} is not built yet - use {words}"
    if error == "unknown_home":
        return f"{key} = {given}: cannot expand ~ - write the whole path"
    if key in ("data.train", "data.eval") and isinstance(given.value, list | dict):
        return f"{key} = {given} is not built yet - use one file, directory or hub dataset"
    section, _, name = key.partition(".")
    allowed = allowed_values(SECTIONS[section].model_json_schema()["properties"][name])
    if _TEXT not in allowed or not isinstance(given.value, int | float | yaml.YAMLError):
        return f"{key} = {given} is not allowed - use {allowed}"
    quoted = json.dumps(given.text, ensure_ascii=False)
    advice = f"'{key}={quoted}'" if given.origin == "command line" else f"{name}: {quoted}"
    return f"{key} = {given} is not text to YAML - quote it: {advice}"
