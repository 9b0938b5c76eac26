"""Why sources cannot be used, or what is said of their records: sums over each, in words."""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardtune.config import DataConfig
from shardtune.data.records import TOO_LONG, BrokenRecord, Outcome, RecordSums
from shardtune.data.tokenize import RecordHash, TokenizedChunk
from shardtune.errors import counted, first_few

_NAMED_PROBLEMS = 10
_OFTEN_BROKEN = 0.1  # a source with more broken records has a form that was not recognised


class BrokenRecords:
    """The broken records of a source, folded by the kinds of their problems."""

    def __init__(self) -> None:
        self.count, self.end_files = 0, False
        self._places: list[str] = []
        self._firsts: dict[str, BrokenRecord] = {}
        self._alike: Counter[str] = Counter()

    def add(self, broken: BrokenRecord) -> None:
        self.count += 1
        self.end_files |= broken.ends_file
        if len(self._places) <= _NAMED_PROBLEMS:
            self._places.append(broken.place)
        kind = re.sub(r"\d+|'[^']*'|(?<=]) \([^)]*\)", "0", broken.kind)  # (its role)
        if kind in self._firsts or len(self._firsts) < _NAMED_PROBLEMS:
            self._firsts.setdefault(kind, broken)
            self._alike[kind] += 1

    def removal(self) -> str:
        """Return a command to leave these lines out, or "" if many or not of one .jsonl."""
        files, numbers = zip(*(place.rpartition(":")[::2] for place in self._places), strict=True)
        is_one = len(set(files)) == 1 and files[0].endswith((".jsonl", ".ndjson"))
        if not is_one or self.count > _NAMED_PROBLEMS:
            return ""
        lines = ";".join(f"{number}d" for number in numbers)
        return f" (sed '{lines}' {shlex.quote(files[0])} > NEW.jsonl)"

    def lines(self) -> dict[str, int]:
        """Return a line for each of the first kinds, with the index of its first record."""
        lines = {}
        for kind, first in self._firsts.items():
            more = f" (and {n} more like it)" if (n := self._alike[kind] - 1) else ""
            lines[f"{first.place}: {first.problem}{more}"] = first.record
        return lines


@dataclass
class SourceSums:
    """Sums over the source that `spec`, the value of `key`, names."""

    key: str
    spec: str
    n_read: int = 0
    n_bytes: int = 0
    broken: BrokenRecords = field(default_factory=BrokenRecords)
    own: RecordSums = field(default_factory=RecordSums)  # neither broken nor held out
    fields: set[str] = field(default_factory=set)
    files: set[str] = field(default_factory=set)  # that have a record

    def add(self, tokenized: TokenizedChunk) -> None:
        chunk = tokenized.chunk
        self.files.add(chunk.file)
        self.n_read += len(chunk.numbers)
        self.n_bytes += chunk.n_bytes
        for broken in tokenized.broken:
            self.broken.add(broken)
        self.own.include(tokenized.sets[chunk.set_name])
        self.fields |= tokenized.fields

    def refuses_broken(self, data: DataConfig) -> bool:
        """Return whether broken records end the run. A broken file loses what follows."""
        are_all = self.broken.count == self.n_read > 0
        return self.broken.end_files or are_all or self.broken_share > data.most_broken

    @property
    def broken_share(self) -> float:
        return self.broken.count / max(1, self.n_read)

    def dropped_lines(self) -> dict[str, int]:
        """Return a line of the broken records and one for each kind, with their first records."""
        if not (kinds := self.broken.lines()):
            return {}
        count = f"broken records, dropped: {self.broken.count} of {self.n_read}"
        lines = {count: min(kinds.values())} | kinds
        return {f"WARNING: {line}": record for line, record in lines.items()}


SumsBySource = Mapping[tuple[str, int], SourceSums]  # by its set, and its index there
SetSums = Mapping[str, RecordSums]  # over each set of records


def problems_of(data: DataConfig, sums: SumsBySource, sets: SetSums) -> list[str]:
    """Return why these sources cannot be used."""
    refused = [each.broken for each in sums.values() if each.refuses_broken(data)]
    problems = [line for broken in refused for line in broken.lines()][:_NAMED_PROBLEMS]
    problems += _unmatched_columns(data, set().union(*(each.fields for each in sums.values())))
    for each in sums.values():
        problems += _source_problems(each, data)
    return problems or _unmatched_roles(data, sets.values()) or _not_held_out(data, sums, sets)


def _source_problems(sums: SourceSums, data: DataConfig) -> list[str]:
    """Return why this source cannot be used."""
    if sums.broken.end_files:
        said = "its broken records are not counted, as a file cannot be used to its end"
        return [f"{sums.key}: {said} - do what is said above"]
    if sums.refuses_broken(data):
        count = f"{sums.broken.count} of {sums.n_read} records broken"
        remedy, share = "repair or remove them", math.ceil(100 * sums.broken_share) / 100
        if sums.broken.count < sums.n_read:
            remedy += sums.broken.removal()
        if 0 < data.most_broken < sums.broken_share:
            most = f"{100 * data.most_broken:g}%"
            count += f", and data.on_broken leaves out {most} of a source at most"
        if share <= _OFTEN_BROKEN:
            value = f'"data.on_broken={{drop: {share}}}"' if share > 0.01 else "data.on_broken=drop"
            remedy += f", or leave them out with {value}"
        return [f"{sums.key}: {count} - {remedy}"]
    if not sums.n_read:
        return [f"{sums.key}={sums.spec}: no record in it - name data that has some"]
    if sums.own.n_sequences:
        return []
    problem = _nothing_to_train(sums.key, sums.spec, sums.own)
    all_held_out = data.eval is None and data.eval_fraction > 0 and not sums.own.n_records
    return [f"{problem} or lower data.eval_fraction" if all_held_out else problem]


def _nothing_to_train(key: str, spec: str, sums: RecordSums) -> str:
    """Return the problem of a source without a token to train; `spec` is the value of `key`."""
    causes = "; ".join(sums.outcomes.lines(warning="").values())
    is_too_long = any(outcome in TOO_LONG for outcome, *_ in sums.outcomes)
    holds_all = f"data.max_length={sums.longest}, which holds all, or data.overflow=split"
    return (
        f"{key}: no token to train in {counted(sums.n_records, 'record')}"
        f"{causes and f' ({causes})'} - write records with turns to train in {spec}"
        f"{f' or write {holds_all}' if is_too_long else ''} (data.roles: other names of roles)"
    )


def _not_held_out(data: DataConfig, sums: SumsBySource, sets: SetSums) -> list[str]:
    """Return the problem of a fraction that holds out nothing to evaluate."""
    if data.eval is not None or not data.eval_fraction or sets["eval"].n_sequences:
        return []
    if sets["eval"].n_records:
        problem = _nothing_to_train("data.eval", sums["train", 0].spec, sets["eval"])
        return [f"{problem}, or raise data.eval_fraction"]
    records = counted(sets["train"].n_records, "record")
    return [
        f"data.eval_fraction={data.eval_fraction:g} took none of {records} for evaluation - raise "
        "it, or train without evaluation (data.eval_fraction=0)"
    ]


def _unmatched_columns(data: DataConfig, fields: set[str]) -> list[str]:
    """Return a problem for each entry of `data.columns` that names none of the data's `fields`."""
    return [
        f"data.columns.{ours}={column}: no record of any source has {column} - name one of "
        f"{first_few(sorted(fields), 10)}"
        for ours, column in data.field_names.items()
        if column and fields and column not in fields
    ]


def _unmatched_roles(data: DataConfig, sets: Iterable[RecordSums]) -> list[str]:
    """Return a problem for each role of `data.roles` that no record of these sets has."""
    keys = [key for sums in sets for key in sums.outcomes]
    found = sorted({role for outcome, role, _ in keys if outcome is Outcome.ROLE})
    return [
        f"data.roles.{role}: no record has this role - name one that they have: "
        f"{first_few(found, 10) or 'none'}"
        for role in data.roles.keys() - found
    ]


class RecordHashes:
    """The hashes of all records of a set that have a row."""

    def __init__(self) -> None:
        self._parts = [np.empty((0, 2), np.uint64)]

    def add(self, hashes: Sequence[RecordHash]) -> None:
        self._parts.append(np.array(hashes, np.uint64).reshape(-1, 2))

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def shared_with(self, other: RecordHashes) -> list[int]:
        """Return the records whose tokens equal those of a record in `other`, trained or not."""
        tokens, records = np.concatenate(self._parts).T
        of_other, _ = np.concatenate(other._parts).T
        return records[np.isin(tokens, of_other)].tolist()


def describe_leaks(sets: Mapping[str, RecordHashes]) -> dict[str, int]:
    """Return a line for each set with records of data.train, and the first of these there."""
    remedy = (
        "the perplexity tells nothing of new text; docs/data.md has the command that drops them"
    )
    lines = {}
    for name, hashes in sets.items():
        if name != "train" and (shared := hashes.shared_with(sets["train"])):
            line = f"data.{name}: WARNING: records that data.train has too"
            line += f": {len(shared)} of {len(hashes)} - {remedy}"
            lines[line] = sets["train"].shared_with(hashes)[0]
    return lines
