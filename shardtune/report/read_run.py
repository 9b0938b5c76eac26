"""Read a run's directory as it is: unfinished, resumed, or with lines that a crash broke."""

import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardtune.config_io import bare, read_written
from shardtune.errors import UserError, counted
from shardtune.run_files import LOCK, METRICS, is_locked

Entry = dict[str, Any]
ENDED_EARLY = "the run ended before its first step"
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RunRecord:
    """The objects of `metrics.jsonl` by kind, in the order of their steps, and the configuration.

    `settings`: each key as `section.key`, with its value and its origin. `unread`: how many lines
    are not an object of a run. `is_locked`: whether a process of the run lives; None: unknown.
    """

    path: Path
    name: str
    entries: dict[str, list[Entry]] = field(default_factory=dict)
    settings: dict[str, tuple[str, str]] = field(default_factory=dict)
    unread: int = 0
    is_locked: bool | None = None
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
    def unread_note(self) -> str:
        lines = counted(self.unread, "line")
        return f"left out {lines} of {METRICS} that cannot be read" if self.unread else ""

    @property
    def missing_note(self) -> str:
        begins = next((start["step"] for start in self.of_kind("start")), 0)
        where = f"steps before {begins + 1} are missing: the run goes on from a checkpoint"
        return f"{where}, and another folder or node has them" if begins else ""

    @property
    def model(self) -> str:
        return self.settings.get("model.path", ("", ""))[0]

    def column(self, kind: str, name: str) -> FloatArray:
        """Return a field of all objects of a kind, NaN where one lacks it, float64 [objects]."""
        if (kind, name) not in self._columns:
            values = [entry.get(name) for entry in self.of_kind(kind)]
            self._columns[kind, name] = np.array(values, np.float64)  # None becomes NaN
        return self._columns[kind, name]


def read_run(path: Path) -> RunRecord:
    """Read a run's directory. Raises UserError."""
    file = path / METRICS
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        if (path / LOCK).exists():
            state = "the run still loads - wait for its first step"
            if is_locked(path) is False:
                state = f"{ENDED_EARLY} - the ERROR: line of its log says why"
            raise UserError(f"{path}: {state}") from error
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
        content = f"no object of a run in {counted(unread, 'line')}" if lines else "it is empty"
        ended = is_locked(path) is False
        remedy = "name another run" if ended else "wait for the first step, or name another run"
        raise UserError(f"{file}: {content} - {remedy}")
    for objects in entries.values():
        objects.sort(key=lambda entry: entry["step"])  # a save is written some steps later
    settings = read_settings(path)
    return RunRecord(path, path.resolve().name, entries, settings, unread, is_locked(path))


def read_entry(line: bytes | str) -> Entry | None:
    """Return the object of a line of `metrics.jsonl`; None for a broken or foreign line."""
    with contextlib.suppress(ValueError, RecursionError):
        match json.loads(line):
            case {"kind": str(), "step": int()} as entry:
                return entry
    return None


def read_settings(path: Path) -> dict[str, tuple[str, str]]:
    try:
        written = read_written(path / "config.yaml")
    except UserError:
        return {}
    return {key: (bare(value), origin) for key, (value, origin) in written.items()}
