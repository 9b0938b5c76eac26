"""Read configurations from YAML, environment and command line; write and compare them.

This module does not import torch, which takes seconds: a wrong command line is refused at once.
"""

import argparse
import contextlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NoReturn

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails, to_jsonable_python

from shardtune.config import (
    KEYS,
    LORA_LR,
    RECORD_FIELDS,
    SECTIONS,
    Config,
    LoraConfig,
    TrainSource,
)
from shardtune.errors import UserError
from shardtune.other_names import KEY_OF

_DEFAULTS: dict[str, Any] = to_jsonable_python(
    {key: field.default for key, field in KEYS.items() if not field.is_required()}
)
_OF_A_NODE = {"run.dir", "distributed.join_timeout_s"}
_ORIGINS = "origins.json"
_TEXT = "text that is not empty (in quotes where YAML would read a number)"
_IS_LIKE = 0.75  # the least similarity of a name that is proposed
_BOUNDS = {"minimum": "of at least", "exclusiveMinimum": "above"}
_BOUNDS |= {"exclusiveMaximum": "below", "maximum": "at most"}


class _Loader(yaml.SafeLoader):
    """YAML 1.2's plain values, and no key twice.

    In PyYAML's 1.1 `1e-5` is text, `no` false, `1:30` 90 and `010` 8.
    """

    def construct_number(self, node: yaml.Node) -> int | float:
        """Return an integer for `1e3` too; float keys accept an integer."""
        number = float(node.value)
        return int(Decimal(node.value)) if number.is_integer() else number

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value]
        for i, (key, _) in enumerate(node.value):
            if key.value in names[:i]:
                problem = f"{key.value} is given twice - keep one of them"
                raise yaml.MarkedYAMLError(None, None, problem, key.start_mark)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern in {
    "null": r"(~|null|Null|NULL)?$",
    "bool": r"(true|True|TRUE|false|False|FALSE)$",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$",
}.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), None)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_number)


class Parser(argparse.ArgumentParser):
    """An argument parser that raises UserError, so that a wrong command line ends as a refusal."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} - see {self.prog} --help")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        names = [each.partition("=")[0] for each in (sys.argv[1:] if args is None else args)]
        if names.count("--config") > 1:  # argparse would read the last one alone
            raise UserError(
                "--config is given more than once - name one file, and what differs from it as "
                "section.key=value"
            )
        return super().parse_known_args(args, namespace)


def read_run_arguments(arguments: Sequence[str], default_config: Path) -> Config:
    """Read the arguments of train_fsdp.py: [--config FILE] [section.key=value ...].

    Raises UserError.
    """
    parser = Parser(prog="train_fsdp.py", allow_abbrev=False)
    add_run_arguments(parser, default_config)
    options = parser.parse_intermixed_args(arguments)  # an assignment may stand behind an option
    return load_config(options.config, options.assignments, os.environ)


def add_run_arguments(parser: argparse.ArgumentParser, default_config: Path) -> None:
    parser.add_argument(
        "--config",
        type=Path,
        default=default_config,
        metavar="FILE",
        help="the run's configuration (default: the config.yaml beside train_fsdp.py)",
    )
    parser.add_argument(
        "assignments", nargs="*", metavar="section.key=value", help="override the configuration"
    )


def load_config(
    source: Path | Mapping[str, Any], assignments: Sequence[str], environ: Mapping[str, str]
) -> Config:
    """Read a file, then JOIN_TIMEOUT of `environ`, then `section.key=value` assignments.

    `source`: the file, or a mapping as a file has it, whose keys may be `section.key` too. Raises
    UserError.
    """
    join_timeout = environ.get("JOIN_TIMEOUT")
    values: dict[str, Any] = {}
    origins = dict.fromkeys(KEYS, "default")
    texts = {name: text for name, equals, text in (a.partition("=") for a in assignments) if equals}
    for origin, given in {
        "file": _read_file(source)
        if isinstance(source, Path)
        else _flat(to_jsonable_python(source)),
        "environment": {"distributed.join_timeout_s": _parse(join_timeout)} if join_timeout else {},
        "command line": {name: _parse(text) for name, text in texts.items()},
    }.items():
        values |= given
        origins |= dict.fromkeys(given, origin)

    sections: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    sections["run"]["dir"] = f"runs/{source.stem if isinstance(source, Path) else 'config'}"
    for key in KEYS.keys() & values.keys():
        section, _, name = key.partition(".")
        sections[section][name] = values[key]
    refused: dict[str, list[ErrorDetails]] = {}
    try:
        config = Config.model_validate({**sections, "origins": origins})
    except ValidationError as error:
        for each in error.errors():
            refused.setdefault(".".join(map(str, each["loc"][:2])), []).append(each)
    problems = [_no_assignment(argument) for argument in assignments if "=" not in argument]
    problems += [_unknown(name, origins[name]) for name in values if name not in KEYS]
    for key in KEYS:
        said = f"{key} = {_to_yaml(values.get(key))} ({origins[key]})"
        if key in refused and key not in values:
            problems.append(f"{key} is required - set it in the file, or write {key}=...")
        elif key in refused:
            problems += list(_inner_problems(key, refused[key], origins[key])) or [
                f"{said} is not allowed - use {allowed_values(key)}"
            ]
    problems += _contradictions(values, origins)
    if problems:
        raise UserError(*problems)
    return config


def remarks(config: Config) -> list[str]:
    """Return a line for each value, but for defaults, that another setting switches off.

    Where adapters are trained with the default learning rate, return a line about that rate too.
    """
    data = config.data
    has_eval_data = data.eval is not None or data.eval_fraction > 0
    no_lora = config.lora.rank is None and "lora.rank is null, so every weight is trained"
    with_lora = config.lora.rank is not None and (
        "lora.rank is given, so the weights are frozen in model.compute_dtype, and AdamW updates "
        "float32 factors"
    )
    is_constant = config.scheduler.name == "constant"
    reasons = {
        "data.eval_fraction": data.eval is not None and "data.eval is given",
        **dict.fromkeys(
            (*(f"lora.{key}" for key in LoraConfig.model_fields if key != "rank"), "export.merge"),
            no_lora,
        ),
        "lora.rows": no_lora or (not config.model.new_tokens and "model.new_tokens is empty"),
        **dict.fromkeys(("model.master_dtype", "optimizer.name", "optimizer.offload"), with_lora),
        "scheduler.min_lr_ratio": is_constant and "scheduler.name is constant",
        "eval.every_steps": not has_eval_data and "no evaluation data is given",
        "eval.keep_best": not has_eval_data and "no evaluation data is given",
        "eval.samples": not has_eval_data and "no evaluation data is given",
        "eval.sample_tokens": not config.eval.samples and "eval.samples is 0",
        "export.dtype": not (
            config.export.final or config.eval.keep_best or config.export.every_steps
        )
        and "export.final is false",
        "export.keep": not config.export.every_steps and "export.every_steps is 0",
        "export.command": not (config.export.final or config.export.every_steps)
        and "no model is written",
    }
    values = _flat(to_dict(config))
    lines = [
        f"{key} = {_to_yaml(values[key])} ({config.origins[key]}) has no effect: {reason}"
        for key, reason in reasons.items()
        if reason and values[key] != _DEFAULTS[key]
    ]
    if config.lora.rank and config.origins["optimizer.lr"] == "default":
        slow = f"optimizer.lr = {config.optimizer.lr:g} (default) is low for adapters"
        lines.append(f"{slow} - try optimizer.lr={LORA_LR:g}")
    return lines


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """Return section -> key -> value, in JSON's types alone."""
    return config.model_dump(mode="json")


def shared_settings(config: Config) -> dict[str, Any]:
    """Return section.key -> value, without the keys that may differ between nodes.

    Node 0 decides those.
    """
    return {key: v for key, v in _flat(to_dict(config)).items() if key not in _OF_A_NODE}


def write_config(config: Config, path: Path) -> None:
    """Write a file for `load_config`, with the origin of every value as comments and as data."""
    lines = []
    for section, values in to_dict(config).items():
        lines.append(f"{section}:")
        for key, value in values.items():
            lines.append(f"  {key}: {_to_yaml(value)}  # {config.origins[f'{section}.{key}']}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    path.with_name(_ORIGINS).write_text(json.dumps(config.origins, indent=2) + "\n", "utf-8")


def read_written(path: Path) -> dict[str, tuple[Any, str]]:
    """Return each key of a file of `write_config` with its value and its origin.

    Origins are empty in a file of an earlier version, which wrote them as comments alone. Raises
    UserError.
    """
    origins: Any = {}
    with contextlib.suppress(OSError, ValueError):
        origins = json.loads(path.with_name(_ORIGINS).read_text(encoding="utf-8"))
    if not isinstance(origins, dict):
        origins = {}
    return {key: (value, str(origins.get(key, ""))) for key, value in _read_file(path).items()}


def changed_keys(
    saved: Mapping[str, Mapping[str, Any]], current: Config
) -> list[tuple[str, Any, Any]]:
    """Compare a configuration that `to_dict` returned with the current one.

    A key that `saved` lacks had its default. A key that this version does not know is None now.

    Returns:
        Each difference as (section.key, saved value, current value).
    """
    new = _flat(to_dict(current))
    old = _DEFAULTS | _flat(saved)
    if not isinstance(sources := old["data.train"], str):
        options = TrainSource.model_construct(path="").model_dump(mode="json")
        old["data.train"] = [options | source for source in sources]
    return [(key, old.get(key), new.get(key)) for key in new | old if old.get(key) != new.get(key)]


def allowed_values(key: str) -> str:
    """Describe in words the values that `section.key` accepts."""
    section, _, name = key.partition(".")
    return _in_words(SECTIONS[section].model_json_schema()["properties"][name])


def bare(value: Any) -> str:
    """Return text as it is, and any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def _inner_problems(key: str, errors: Iterable[ErrorDetails], origin: str) -> Iterator[str]:
    """Yield the problems inside a list of sources or a mapping of columns, in pydantic's words."""
    names = {"data.train": TrainSource.model_fields, "data.columns": RECORD_FIELDS}.get(key, ())
    for error in errors:
        # Where several types are allowed, pydantic adds the type's name to the path of an error.
        path = [part for part in error["loc"][2:] if not re.search(r"[\[(]", str(part))]
        if not path or not names:
            continue
        name = key + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
        said, use = f"{name} = {_to_yaml(error['input'])} ({origin})", error["msg"]
        if error["type"] == "missing":
            yield f"{name} is required - give this source one"
        elif error["type"] == "extra_forbidden" or error["loc"][-1] == "[key]":
            nearest, _ = _nearest(str(path[-1]), names)
            yield f"{name} ({origin}) is not known - the nearest known one is {nearest}"
        elif error["type"] == "model_type":
            yield f"{said} is not allowed - use a mapping with {', '.join(names)}"
        else:
            yield f"{said} is not allowed - {use.replace('Input', 'it')}"


def _contradictions(values: Mapping[str, Any], origins: Mapping[str, str]) -> Iterator[str]:
    """Yield contradictions within sources, within columns, and of attention and shared rows."""
    attention = values.get("model.attention", "auto")
    works = {"parallel.context": "exchanges heads in", "parallel.tensor": "cuts matrices around"}
    for key, work in works.items():
        if attention != "auto" and (degree := values.get(key, 1)) != 1:
            yield (
                f"model.attention = {_to_yaml(attention)} ({origins['model.attention']}) is not "
                f"for {key}={_to_yaml(degree)}, which {work} document attention - use "
                f"model.attention=auto, or {key}=1"
            )
    sources, columns = (values.get(key) for key in ("data.train", "data.columns"))
    if isinstance(sources, list):
        said = f"data.train ({origins['data.train']})"
        mappings = [source for source in sources if isinstance(source, dict)]
        paths = [source for source in mappings if isinstance(source.get("path"), str)]
        for name in _repeated(str(each.get("name") or Path(each["path"]).stem) for each in paths):
            yield f"{said} has several sources named {name} - give each its own name"
        if mappings and all(source.get("weight", 1) == 0 for source in mappings):
            yield f"{said} has no weight above 0 - give a source one"
    if isinstance(columns, dict):
        for column in _repeated(each for each in columns.values() if isinstance(each, str)):
            ours = " and ".join(str(name) for name, other in columns.items() if other == column)
            said = f"data.columns ({origins['data.columns']})"
            yield f"{said} reads {column} as {ours} - keep one of them"


def _repeated(names: Iterable[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def _in_words(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type", "")
    if "$ref" in schema:
        return f"a mapping with {', '.join(TrainSource.model_fields)}"
    if "patternProperties" in schema:
        return "a mapping of names (letters, digits, _ . and -, not Step) to such texts"
    if "enum" in schema:
        return " or ".join(map(bare, schema["enum"]))
    if "const" in schema:
        return bare(schema["const"])
    if "anyOf" in schema:
        return " or ".join(map(_in_words, schema["anyOf"]))
    if kind in ("integer", "number"):
        bounds = [f"{word} {schema[bound]}" for bound, word in _BOUNDS.items() if bound in schema]
        return f"{'an integer' if kind == 'integer' else 'a number'} {' and '.join(bounds)}"
    if kind == "array":
        each = schema.get("prefixItems") or [schema["items"]]
        number = "two values" if len(each) == 2 else "values"
        return f"a list of {number}, each {_in_words(each[0])}"
    if name := schema.get("propertyNames", {}).get("const"):
        return f"a mapping of {name} to {_in_words(schema['additionalProperties'])}"
    words = {"boolean": "true or false", "null": "null", "object": "a mapping", "string": _TEXT}
    return words[kind]


def _flat(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return section.key -> value; a section without keys stays as it is."""
    flat: dict[str, Any] = {}
    for section, values in sections.items():
        if section in SECTIONS and isinstance(values, dict | None):
            flat |= {f"{section}.{key}": value for key, value in (values or {}).items()}
        else:
            flat[str(section)] = values
    return flat


def _to_yaml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _read_file(path: Path) -> dict[str, Any]:
    try:
        with path.open(encoding="utf-8") as stream:
            content = yaml.load(stream, _Loader) or {}
        if not isinstance(content, dict):
            raise ValueError("it is not a mapping of sections such as `model:`")
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"the configuration file {path} cannot be read ({reason}) - correct it, or name one "
            "with --config FILE"
        ) from error
    return _flat(content)


def _no_assignment(argument: str) -> str:
    nearest, likeness = _nearest(argument, KEYS)
    form = nearest if likeness > _IS_LIKE else "section.key"
    return f"{argument} is not an assignment - write {form}=value"


def _parse(text: str) -> Any:
    """Return the value of a YAML text, or the text itself where YAML rejects it."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError):
        return text


def _unknown(name: str, origin: str) -> str:
    """Name the key that another tool calls so, or the nearest: `train.lr` is `optimizer.lr`."""
    if name in SECTIONS:
        return f"{name} ({origin}) is a section - give values to its keys"
    nearest, likeness = _nearest(name, [*SECTIONS, *KEYS])
    remedy = "docs/configuration.md has all keys"
    if likeness > _IS_LIKE:
        remedy = f"the nearest known one is {nearest}"
    if key := KEY_OF.get(name.lower().rpartition(".")[2]):
        meaning, *_ = " ".join((KEYS[key].description or "").split()).split(". ")
        remedy = f"here it is named {key}: {meaning.rstrip('.')}"
    return f"{name} ({origin}) is not known - {remedy}"


def _nearest(name: str, known_names: Iterable[str]) -> tuple[str, float]:
    """Return the most similar name, compared as a whole or behind the dot, and its similarity."""

    def likeness(known: str) -> tuple[float, float]:
        pairs = (name.lower(), known), (name.lower().rpartition(".")[2], known.rpartition(".")[2])
        whole, last = (SequenceMatcher(None, *pair).ratio() for pair in pairs)
        return max(whole, last), whole

    nearest = max(known_names, key=likeness)
    return nearest, likeness(nearest)[0]
