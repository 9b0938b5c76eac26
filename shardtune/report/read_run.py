"""Read a run's directory as it is: unfinished, resumed, or with lines that a crash broke."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NotRequired

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from shardtune.config_io import bare, read_written
from shardtune.errors import UserError
from shardtune.run_files import METRICS

Entry = dict[str, Any]
FloatArray = npt.NDArray[np.float64]


Number = float | None  # None stands for what is missing, NaN and infinity
_with_others = with_config(ConfigDict(extra="allow"))
Count = Annotated[int, Field(ge=0, le=10**12)]


@_with_others
class _Object(TypedDict):
    """What every object of `metrics.jsonl` has. Fields that are not named here are kept."""

    kind: str
    step: Count
    time: NotRequired[str]


@_with_others
class _Step(_Object):
    loss: NotRequired[Number]
    grad_norm: NotRequired[Number]
    lr: NotRequired[Number]
    tokens: NotRequired[Number]
    tokens_per_second: NotRequired[Number]
    seconds: NotRequired[Number]
    data_seconds: NotRequired[Number]
    mfu: NotRequired[Number]
    memory_bytes: NotRequired[Number]


@_with_others
class _Evaluation(_Object):
    loss: NotRequired[Number]
    perplexity: NotRequired[Number]
    tokens: NotRequired[Number]
    set: NotRequired[str]


@_with_others
class _Ranks(_Object):
    slowest_rank: NotRequired[Count]
    host: NotRequired[str]
    ratio: NotRequired[Number]
    phase: NotRequired[str]
    seconds: dict[str, float]


@_with_others
class _Save(_Object):
    seconds: NotRequired[Number]
    stall_seconds: NotRequired[Number]


@_with_others
class _Layer(TypedDict):
    entropy: float
    without_tokens: Count
    rank_imbalance: NotRequired[float]


@_with_others
class _Experts(_Object):
    layers: list[_Layer]


@_with_others
class _Profile(_Object):
    first_step: NotRequired[Count]
    seconds: dict[str, float]


class _Change(TypedDict):
    key: str
    old: Any
    new: Any


@_with_others
class _Start(_Object):
    total_steps: NotRequired[Count]
    world_size: NotRequired[Count]
    changes: NotRequired[list[_Change]]
    data: NotRequired[list[str]]


@_with_others
class _Plan(_Object):
    predicted_peak_bytes: NotRequired[Number]


_OBJECT = TypeAdapter(_Object)
_KINDS: dict[str, TypeAdapter[Any]] = {
    kind: TypeAdapter(fields)
    for kind, fields in {
        "step": _Step,
        "eval": _Evaluation,
        "ranks": _Ranks,
        "save": _Save,
        "experts": _Experts,
        "profile": _Profile,
        "start": _Start,
        "plan": _Plan,
    }.items()
}


@dataclass(frozen=True)
class RunRecord:
    """The objects of `metrics.jsonl` by kind, in the order of their steps, and the configuration.

    `settings`: each key as `section.key`, with its value and its origin. `unread`: how many lines
    are not an object of a run.
    """

    path: Path
    name: str
    entries: dict[str, list[Entry]] = field(default_factory=dict)
    settings: dict[str, tuple[str, str]] = field(default_factory=dict)
    unread: int = 0
    _columns: dict[tuple[str, str], FloatArray] = field(default_factory=dict, repr=False)

    def of_kind(self, kind: str) -> list[Entry]:
        return self.entries.get(kind, [])

    @property
    def start(self) -> Entry:
        """The last start, which has the numbers of the whole run; empty where none was written."""
        return self.of_kind("start")[-1] if self.of_kind("start") else {}

    @property
    def total_steps(self) -> int | None:
        return self.start.get("total_steps")

    @property
    def last_step(self) -> int:
        return max((entry["step"] for entry in self.of_kind("step")), default=0)

    @property
    def model(self) -> str:
        """The value of model.path, or an empty text where config.yaml is missing."""
        return self.settings.get("model.path", ("", ""))[0]

    def column(self, kind: str, name: str) -> FloatArray:
        """Return a field of all objects of a kind, NaN where one lacks it, float64 [objects]."""
        if (kind, name) not in self._columns:
            values = [entry.get(name) for entry in self.of_kind(kind)]
            self._columns[kind, name] = np.array(values, np.float64)  # None becomes NaN
        return self._columns[kind, name]

    @cached_property
    def _sums(self) -> dict[str, FloatArray]:
        """Of each axis, how far it has come when each step has ended, from 0 on."""
        amounts = {"tokens": self.column("step", "tokens") / 1e6}
        amounts["time"] = self.column("step", "seconds") / 3600
        return {axis: np.nancumsum([0.0, *values]) for axis, values in amounts.items()}

    def positions(self, steps: FloatArray) -> dict[str, FloatArray]:
        """Return where steps lie on each axis: the step, millions of tokens, hours of training."""
        known = np.array([0.0, *self.column("step", "step")])
        return {"step": steps} | {
            axis: np.interp(steps, known, sums) for axis, sums in self._sums.items()
        }


def read_run(path: Path) -> RunRecord:
    """Read a run's directory.

    Raises:
        UserError: it has no `metrics.jsonl` that can be read, or it has not one object of a run.
    """
    file = path / METRICS
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise UserError(
            f"{path}: no run ({file.name}: {error.strerror}) - name the run.dir of a run that has "
            "begun"
        ) from error
    entries: dict[str, list[Entry]] = {}
    unread = 0
    for line in lines:
        if entry := read_entry(line):
            entries.setdefault(entry["kind"], []).append(entry)
        else:
            unread += 1
    if not entries:
        content = f"none of {unread} lines is an object of a run" if lines else "it is empty"
        raise UserError(f"{file}: {content} - wait for the first step, or name another run")
    for of_kind in entries.values():
        of_kind.sort(key=lambda entry: entry["step"])  # a save is written some steps later
    return RunRecord(path, path.resolve().name, entries, read_settings(path), unread)


def read_entry(line: bytes | str) -> Entry | None:
    """Return the object of a line of `metrics.jsonl`; None for a broken or foreign line."""
    try:
        entry: Entry = dict(_OBJECT.validate_json(line))
        return (
            dict(_KINDS[entry["kind"]].validate_python(entry)) if entry["kind"] in _KINDS else entry
        )
    except ValidationError:
        return None


def read_settings(path: Path) -> dict[str, tuple[str, str]]:
    """Return each key of the run's config.yaml with its value, as text, and its origin."""
    try:
        written = read_written(path / "config.yaml")
    except UserError:
        return {}
    return {key: (bare(value), origin) for key, (value, origin) in written.items()}
