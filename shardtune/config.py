"""The strict configuration: a YAML file, then `section.key=value` assignments, checked as a whole before anything runs.

A key is one line of a dataclass below: its name, its type with the allowed values, and its default.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from difflib import SequenceMatcher
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import yaml

from shardtune.errors import UserError


class Constraint(NamedTuple):
    """What a value must be, in words, and the test of it once its type is right."""

    text: str
    holds: Callable[[Any], bool]


Text = Annotated[str, Constraint("text that is not empty", bool)]
Count = Annotated[int, Constraint("an integer of at least 1", lambda n: n >= 1)]
CountOrZero = Annotated[int, Constraint("an integer of at least 0", lambda n: n >= 0)]
Length = Annotated[int, Constraint("an integer of at least 2", lambda n: n >= 2)]
Seed = Annotated[int, Constraint("an integer from 0 to 2**63 - 1", lambda n: 0 <= n < 2**63)]
Positive = Annotated[float, Constraint("a number above 0", lambda x: x > 0)]
NotNegative = Annotated[float, Constraint("a number of at least 0", lambda x: x >= 0)]
Fraction = Annotated[float, Constraint("a number from 0 to 1", lambda x: 0 <= x <= 1)]
FractionBelowOne = Annotated[float, Constraint("a number from 0 to below 1", lambda x: 0 <= x < 1)]
Seconds = Annotated[
    float, Constraint("a number of seconds, above 0 and at most 1e9", lambda x: 0 < x <= 1e9)
]
Betas = Annotated[
    tuple[float, float],
    Constraint(
        "a list of two numbers from 0 to below 1", lambda betas: all(0 <= b < 1 for b in betas)
    ),
]
Names = Annotated[
    tuple[str, ...], Constraint("a list of module names", lambda names: bool(names) and all(names))
]


@dataclass(frozen=True)
class RunConfig:
    dir: Text = field(
        metadata={"example": "runs/mine"}
    )  # runs/<name of the file>, known once there is a file
    seed: Seed = 1234
    resume: Text = "auto"  # auto, never or a checkpoint directory
    ignore_plan: bool = False


@dataclass(frozen=True)
class ModelConfig:
    path: Text = field(metadata={"example": "zai-org/GLM-4.5-Air"})
    init: Literal["pretrained", "random"] = "pretrained"
    master_dtype: Literal["float32", "bfloat16"] = "float32"
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    attention: Literal["auto", "sdpa", "eager"] = "auto"
    compile: bool = False


@dataclass(frozen=True)
class DataConfig:
    train: Text = field(metadata={"example": "data/train.jsonl"})
    eval: Text | None = None
    eval_fraction: FractionBelowOne = 0.0
    max_length: Length = 4096  # tokens in a row
    overflow: Literal["truncate", "split", "drop", "error"] = "truncate"
    loss_on: Literal["assistant", "last", "all"] = "assistant"
    packing: bool = True


@dataclass(frozen=True)
class ParallelConfig:
    replicate: Count = 1
    expert: Count = 1


@dataclass(frozen=True)
class TrainConfig:
    epochs: Count = 3
    max_steps: Count | None = None
    micro_batch_size: Count = 1  # rows per rank per forward
    gradient_accumulation_steps: Count = 1
    max_grad_norm: Positive | None = 1.0


@dataclass(frozen=True)
class OptimizerConfig:
    name: Literal["adamw", "adamw8bit"] = "adamw"
    lr: NotNegative = 1e-5
    betas: Betas = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.0


@dataclass(frozen=True)
class LoraConfig:
    rank: Count | None = None
    alpha: Positive | None = None  # 2 x rank, once there is a rank
    targets: Literal["all-linear"] | Names = "all-linear"


@dataclass(frozen=True)
class SchedulerConfig:
    name: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_ratio: Fraction = 0.03
    min_lr_ratio: Fraction = 0.1


@dataclass(frozen=True)
class EvalConfig:
    baseline: bool = True
    every_steps: CountOrZero = 0


@dataclass(frozen=True)
class CheckpointConfig:
    every_steps: CountOrZero = 500
    keep: Count = 2
    mode: Literal["async", "sync"] = "async"


@dataclass(frozen=True)
class ExportConfig:
    final: bool = True
    dtype: Literal["source", "float32", "bfloat16", "float16"] = "source"


@dataclass(frozen=True)
class LoggingConfig:
    every_steps: Count = 1


@dataclass(frozen=True)
class DistributedConfig:
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    join_timeout_s: Seconds = 300.0
    step_timeout_s: Seconds = 600.0
    save_timeout_s: Seconds = 3600.0


@dataclass(frozen=True)
class Config:
    """Every section, and where each `section.key` came from: default, file, environment or command line."""

    run: RunConfig
    model: ModelConfig
    data: DataConfig
    parallel: ParallelConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    lora: LoraConfig
    scheduler: SchedulerConfig
    eval: EvalConfig
    checkpoint: CheckpointConfig
    export: ExportConfig
    logging: LoggingConfig
    distributed: DistributedConfig
    origins: dict[str, str] = field(compare=False)


_PATHS = ("run.dir", "run.resume", "model.path", "data.train", "data.eval")

# Of each key with values that are still to come, those that work so far.
_BUILT: dict[str, tuple[Any, ...]] = {
    "parallel.expert": (1,),
    "optimizer.name": ("adamw",),
    "lora.rank": (None,),
    "model.master_dtype": ("float32",),
}

_RESUME_MAY_CHANGE = re.compile(
    r"run\.(dir|resume|ignore_plan)|train\.(?!max_grad_norm$).+"
    r"|(parallel|eval|checkpoint|export|logging|distributed)\..+"
)

_SECTIONS: dict[str, type] = {
    name: hint for name, hint in get_type_hints(Config).items() if name != "origins"
}
_FIELDS: dict[str, Field[Any]] = {
    f"{name}.{key.name}": key for name, cls in _SECTIONS.items() for key in fields(cls)
}
_TYPES: dict[str, Any] = {
    f"{name}.{key}": hint
    for name, cls in _SECTIONS.items()
    for key, hint in get_type_hints(cls, include_extras=True).items()
}

# The plain values of YAML 1.2. PyYAML keeps to 1.1, where `1e-5` is text, `no` is false, `1:30` is 90 and `010` is 8.
# Longer integers than any key takes fall through to float, which turns them into inf where int would raise.
_PLAIN: tuple[tuple[str, Callable[[str], Any]], ...] = (
    (r"~|null|Null|NULL|", lambda text: None),
    (r"true|True|TRUE", lambda text: True),
    (r"false|False|FALSE", lambda text: False),
    (r"[-+]?[0-9]{1,19}", int),
    (r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", float),
)


class _Given(NamedTuple):
    """A value that was asked for: as read, as written, and where."""

    value: Any
    text: str
    where: str
    origin: str


def load_config(path: Path, assignments: Sequence[str], environ: Mapping[str, str]) -> Config:
    """The configuration of `path`, overridden by JOIN_TIMEOUT of `environ` and then by `section.key=value` assignments.

    Raises Refused with every problem found in all three.
    """
    problems: list[str] = []
    in_file = _read_file(path, problems)
    given = dict(in_file or {})
    if join_timeout := environ.get("JOIN_TIMEOUT"):
        given["distributed.join_timeout_s"] = _read_value(
            join_timeout, "environment JOIN_TIMEOUT", "environment"
        )
    given |= _read_assignments(assignments, problems)
    values: dict[str, Any] = {}
    for key, declared in _FIELDS.items():
        if key in given:
            try:
                values[key] = _fit(given[key].value, _TYPES[key])
                if key in _PATHS and str(values[key]).startswith("~"):
                    values[key] = str(Path(values[key]).expanduser())
            except ValueError as error:
                problems.append(_misfit(key, given[key], str(error)))
            except RuntimeError:  # pathlib's, where it finds no home
                problems.append(
                    f"{key} = {given[key].text} ({given[key].where}) is in no known home - write it out"
                )
            else:
                if values[key] not in _BUILT.get(key, (values[key],)):
                    built = " or ".join(
                        v if isinstance(v, str) else json.dumps(v) for v in _BUILT[key]
                    )
                    problems.append(
                        f"{key} = {given[key].text} ({given[key].where}) is not built yet - use {built}"
                    )
        elif key == "run.dir":
            values[key] = f"runs/{path.stem}"
        elif declared.default is not MISSING:
            values[key] = declared.default
        elif in_file is not None:
            problems.append(f"{key} is required - for example {key}={declared.metadata['example']}")
    if problems:
        raise UserError(*problems)
    if values["lora.alpha"] is None and values["lora.rank"] is not None:
        values["lora.alpha"] = 2.0 * values["lora.rank"]
    sections: dict[str, Any] = {
        name: cls(**{key.name: values[f"{name}.{key.name}"] for key in fields(cls)})
        for name, cls in _SECTIONS.items()
    }
    return Config(
        **sections,
        origins={key: given[key].origin if key in given else "default" for key in _FIELDS},
    )


def remarks(config: Config) -> list[str]:
    """A line for each value that the user set and that another setting switches off."""
    data, lora, export = config.data, config.lora, config.export
    no_lora = "lora.rank is null, so every weight is trained"
    without_data = data.eval is None and data.eval_fraction == 0
    switched_off = [
        ("run.ignore_plan", config.run.ignore_plan, "no plan refuses a run yet"),
        (
            "data.eval_fraction",
            data.eval_fraction > 0 and data.eval is not None,
            "data.eval is given",
        ),
        ("lora.alpha", lora.rank is None and lora.alpha is not None, no_lora),
        ("lora.targets", lora.rank is None and lora.targets != "all-linear", no_lora),
        (
            "scheduler.min_lr_ratio",
            config.scheduler.name == "constant",
            "scheduler.name is constant",
        ),
        (
            "eval.every_steps",
            without_data and config.eval.every_steps > 0,
            "no evaluation data is given",
        ),
        ("export.dtype", not export.final and export.dtype != "source", "export.final is false"),
    ]
    values = _flat(to_dict(config))
    return [
        f"{key} = {_yaml(values[key])} ({config.origins[key]}) has no effect: {why}"
        for key, is_off, why in switched_off
        if is_off and config.origins[key] != "default"
    ]


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """Section, key, value, in nothing but JSON's types."""
    sections = {name: asdict(getattr(config, name)) for name in _SECTIONS}
    return cast(dict[str, dict[str, Any]], json.loads(json.dumps(sections)))


def write_config(config: Config, path: Path) -> None:
    """Write, whole or not at all, a YAML file that `load_config` reads back, with the origin behind every value."""
    lines = []
    for name, values in to_dict(config).items():
        lines.append(f"{name}:")
        lines += [
            f"  {key}: {_yaml(value)}  # {config.origins[f'{name}.{key}']}"
            for key, value in values.items()
        ]
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
    """Each (section.key, saved value, current value) that differs: what may change on a resume, and what may not.

    `saved` is what `to_dict` gave. A key that it lacks had its default; one that is no longer known is None now.
    """
    new = _flat(to_dict(current))
    defaults = {
        key: declared.default
        for key, declared in _FIELDS.items()
        if declared.default is not MISSING
    }
    old = json.loads(json.dumps(defaults)) | _flat(saved)
    changes = [
        (key, old.get(key), new.get(key)) for key in new | old if old.get(key) != new.get(key)
    ]
    may = [change for change in changes if _RESUME_MAY_CHANGE.fullmatch(change[0])]
    return may, [change for change in changes if change not in may]


def _flat(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        f"{name}.{key}": value for name, values in sections.items() for key, value in values.items()
    }


def _yaml(value: Any) -> str:
    """One line that `_value` reads back. Text is always quoted: what PyYAML would leave bare may be a number here."""
    if isinstance(value, str):
        return str(yaml.safe_dump(value, default_style='"', width=1 << 30)).strip()
    return (
        f"[{', '.join(_yaml(item) for item in value)}]"
        if isinstance(value, list)
        else json.dumps(value)
    )


def _value(node: yaml.Node | None) -> Any:
    """The plain value, or list of plain values, of a node; any other stays a node, which no key's type accepts."""
    if isinstance(node, yaml.SequenceNode):
        return [_value(item) if isinstance(item, yaml.ScalarNode) else item for item in node.value]
    if not isinstance(node, yaml.ScalarNode) or node.tag != yaml.BaseLoader.DEFAULT_SCALAR_TAG:
        return node
    if node.style is not None:
        return node.value
    return next(
        (read(node.value) for pattern, read in _PLAIN if re.fullmatch(pattern, node.value)),
        node.value,
    )


def _read_file(path: Path, problems: list[str]) -> dict[str, _Given] | None:
    """The known keys of the file; None if it is no mapping or cannot be read at all."""
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.BaseLoader)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", "it is not UTF-8 text")
        problems.append(
            f"the configuration file {path} cannot be read: {reason} - name one with --config FILE"
        )
        return None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        problems.append(
            f"{path}{f':{mark.line + 1}' if mark else ''} is not YAML: {reason} - correct it"
        )
        return None
    if not isinstance(root, yaml.MappingNode | None):
        problems.append(
            f"{path} is not a mapping - write sections such as `model:` with keys such as `  path: ...` below"
        )
        return None
    given: dict[str, _Given] = {}
    seen: dict[str, str] = {}
    for name, node, where in _items(root, str(path)):
        is_mapping = isinstance(node, yaml.MappingNode)
        if name in seen:
            problems.append(f"{name} is given twice ({seen[name]} and {where}) - keep one of them")
        elif name in _FIELDS:
            source = " ".join(text[node.start_mark.index : node.end_mark.index].split()) or "null"
            given[name] = _Given(_value(node), source, where, "file")
        elif name not in _SECTIONS:
            problems.append(_unknown(name, where, _SECTIONS if is_mapping else _FIELDS))
        elif not is_mapping and _value(node) is not None:
            problems.append(f"{name} ({where}) is a section - write its keys below it")
        seen.setdefault(name, where)
    return given


def _items(
    mapping: yaml.MappingNode | None, file: str, prefix: str = ""
) -> Iterator[tuple[str, yaml.Node, str]]:
    """Each section and each `section.key`, known or not, with its node and its `file:line`."""
    for key, node in mapping.value if mapping else ():
        name = f"{prefix}{key.value}"
        yield name, node, f"{file}:{key.start_mark.line + 1}"
        if name in _SECTIONS and isinstance(node, yaml.MappingNode):
            yield from _items(node, file, f"{name}.")


def _read_assignments(assignments: Sequence[str], problems: list[str]) -> dict[str, _Given]:
    given: dict[str, _Given] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals:
            problems.append(f"{assignment} is not an assignment - write section.key=value")
        elif name not in _FIELDS:
            problems.append(_unknown(name, "command line", _FIELDS))
        elif name in given:
            problems.append(
                f"{name} is assigned twice ({given[name].text} and {text}) - keep one of them"
            )
        else:
            given[name] = _read_value(text, "command line", "command line")
    return given


def _read_value(text: str, where: str, origin: str) -> _Given:
    """Text that is not YAML, or that YAML would cut at a `#`, has the error for its value, which no type accepts."""
    try:
        node = yaml.compose(text, Loader=yaml.BaseLoader)
        if text[node.end_mark.index if node else 0 :].strip():
            raise yaml.YAMLError("a comment")
        return _Given(_value(node), text, where, origin)
    except yaml.YAMLError as error:
        return _Given(error, text, where, origin)


def _unknown(name: str, where: str, known: Iterable[str]) -> str:
    """The problem of a name that is not in `known`, keys or sections: `train.lr` and `lr` are near `optimizer.lr`."""

    def likeness(other: str) -> tuple[float, float]:
        whole = SequenceMatcher(None, name.lower(), other).ratio()
        last = SequenceMatcher(
            None, name.lower().rpartition(".")[2], other.rpartition(".")[2]
        ).ratio()
        return max(whole, last), whole

    nearest = max(known, key=likeness)
    is_near = likeness(nearest)[0] >= 0.6
    advice = (
        f"the nearest known one is {nearest}"
        if is_near
        else f"the sections are {', '.join(_SECTIONS)}"
    )
    return f"{name} ({where}) is not known - {advice}"


def _misfit(key: str, given: _Given, accepted: str) -> str:
    """The problem of a value that its key's type does not accept."""
    told = f"{key} = {given.text} ({given.where})"
    if isinstance(given.value, bool | int | float | yaml.YAMLError) and Text in (
        _TYPES[key],
        *get_args(_TYPES[key]),
    ):
        quoted = json.dumps(given.text, ensure_ascii=False)
        advice = (
            f"'{key}={quoted}'"
            if given.origin == "command line"
            else f"{key.rpartition('.')[2]}: {quoted}"
        )
        return f"{told} is not text to YAML - quote it: {advice}"
    return f"{told} is not allowed - use {accepted}"


def _fit(value: Any, hint: Any) -> Any:
    """The value in the type of `hint`; else ValueError, with what that type accepts in words."""
    kind, options = get_origin(hint), get_args(hint)
    if kind is Annotated:
        with contextlib.suppress(ValueError):
            value = _fit(value, options[0])
            if options[1].holds(value):
                return value
        raise ValueError(options[1].text)
    if kind in (Union, types.UnionType):
        wanted = []
        for option in options:
            try:
                return _fit(value, option)
            except ValueError as error:
                wanted.append(str(error))
        raise ValueError(" or ".join(wanted))
    if kind is Literal:
        if value in options:
            return value
        raise ValueError(" or ".join(options))
    if kind is tuple:
        if isinstance(value, list) and (options[1] is ... or len(value) == len(options)):
            return tuple(_fit(item, options[0]) for item in value)
        raise ValueError("a list")
    if (
        hint in (int, float)
        and type(value) in (int, float)
        and math.isfinite(value)
        and hint(value) == value
    ):
        return hint(value)
    if hint not in (int, float) and type(value) is hint:
        return value
    raise ValueError({bool: "true or false", types.NoneType: "null"}.get(hint, hint.__name__))
