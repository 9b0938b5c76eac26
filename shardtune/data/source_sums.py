"""Sums over the records of one source, and why sources cannot be used."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shardtune.config import DataConfig
from shardtune.data.outcomes import (
    NAMED_PROBLEMS,
    TOO_LONG,
    BrokenRecords,
    Outcome,
    OutcomeCounts,
)
from shardtune.data.sources import Source
from shardtune.data.tokenize import TokenizedChunk
from shardtune.errors import counted, first_few

_OFTEN_BROKEN = 0.1  # a source with more broken records has a form that was not recognised

SourceKey = tuple[str, int]  # the set of a source, and its index there


@dataclass
class SourceSums:
    """Sums over one source: its records, its broken ones, and those that its own set got."""

    n_read: int = 0
    n_bytes: int = 0
    broken: BrokenRecords = field(default_factory=BrokenRecords)
    n_records: int = 0  # neither broken nor held out
    n_sequences: int = 0
    longest: int = 0  # tokens of a record that is not broken
    outcomes: OutcomeCounts = field(default_factory=OutcomeCounts)
    fields: set[str] = field(default_factory=set)
    files: set[str] = field(default_factory=set)  # that have a record

    def add(self, chunk: TokenizedChunk) -> None:
        own = chunk.sets[chunk.set_name]
        self.files.add(chunk.file)
        self.n_read += chunk.n_records
        self.n_bytes += chunk.n_bytes
        for broken in chunk.broken:
            self.broken.add(broken)
        self.n_records += own.n_records
        self.n_sequences += len(own.sequences)
        self.longest = max(self.longest, own.longest)
        self.outcomes.update(own.outcomes)
        self.fields |= chunk.fields

    def refuses_broken(self, data: DataConfig) -> bool:
        """Return whether broken records end the run. A broken file loses what follows."""
        return self.broken.end_files or self.broken_share > data.most_broken

    @property
    def broken_share(self) -> float:
        return self.broken.count / max(1, self.n_read)

    def dropped_lines(self) -> dict[str, int]:
        """Return a line with the number of broken records, and one for each kind of them.

        Each line comes with the index of its first record.
        """
        if not (kinds := self.broken.lines()):
            return {}
        count = f"broken records, dropped: {self.broken.count} of {self.n_read}"
        lines = {count: min(kinds.values())} | kinds
        return {f"WARNING: {line}": record for line, record in lines.items()}


def problems_of(
    data: DataConfig,
    sources: Mapping[SourceKey, Source],
    sums: Mapping[SourceKey, SourceSums],
    outcomes: Iterable[OutcomeCounts],
) -> list[str]:
    """Return why these sources cannot be used. `outcomes`: of the records of each set."""
    refused = [each.broken for each in sums.values() if each.refuses_broken(data)]
    problems = [line for broken in refused for line in broken.lines()][:NAMED_PROBLEMS]
    problems += _unmatched_columns(data, set().union(*(each.fields for each in sums.values())))
    for key, source in sources.items():
        problems += _source_problems(source, sums[key], data)
    return problems or _unmatched_roles(data, outcomes)


def nothing_held_out(
    data: DataConfig,
    spec: str,
    n_read: int,
    n_held_out: int,
    outcomes: OutcomeCounts,
    longest: int,
) -> str:
    """Return the problem of a fraction that holds out nothing to evaluate."""
    if n_held_out:
        problem = _nothing_to_train("data.eval", spec, n_held_out, outcomes, longest)
        return f"{problem}, or raise data.eval_fraction"
    return (
        f"data.eval_fraction={data.eval_fraction:g} took none of {counted(n_read, 'record')} for "
        "evaluation - raise it, or train without evaluation (data.eval_fraction=0)"
    )


def _nothing_to_train(
    key: str, spec: str, n_records: int, outcomes: OutcomeCounts, longest: int
) -> str:
    """Return the problem of a source without a token to train; `spec` is the value of `key`."""
    causes = "; ".join(outcomes.lines(warning="").values())
    is_too_long = any(outcome in TOO_LONG for outcome, *_ in outcomes)
    holds_all = f" or write data.max_length={longest}, which holds all, or data.overflow=split"
    longer = holds_all if is_too_long else ""
    return (
        f"{key}: no token to train in {counted(n_records, 'record')}"
        f"{causes and f' ({causes})'} - "
        f"write records with turns to train in {spec}{longer} (data.roles: other names of roles)"
    )


def _unmatched_columns(data: DataConfig, fields: set[str]) -> list[str]:
    """Return a problem for each entry of `data.columns` that names none of the data's `fields`."""
    return [
        f"data.columns.{ours}={column}: no record of any source has {column} - name one of "
        f"{first_few(sorted(fields), 10)}"
        for ours, column in data.field_names.items()
        if column and fields and column not in fields
    ]


def _unmatched_roles(data: DataConfig, outcomes: Iterable[OutcomeCounts]) -> list[str]:
    """Return a problem for each role of `data.roles` that no record of these sets has."""
    keys = [key for of_set in outcomes for key in of_set]
    found = sorted({role for outcome, role, _ in keys if outcome is Outcome.ROLE})
    return [
        f"data.roles.{role}: no record has this role - name one that they have: "
        f"{first_few(found, 10) or 'none'}"
        for role in data.roles.keys() - found
    ]


def _source_problems(source: Source, sums: SourceSums, data: DataConfig) -> list[str]:
    """Return why this source cannot be used."""
    if sums.broken.end_files:
        return [
            f"{source.key}: its broken records are not counted, as a file cannot be used to its "
            "end - do what is said above"
        ]
    if sums.refuses_broken(data):
        count = f"{sums.broken.count} of {sums.n_read} records broken"
        remedy, share = "repair or remove them", math.ceil(100 * sums.broken_share) / 100
        if sums.broken.count < sums.n_read:
            remedy += sums.broken.removal()
        if data.most_broken:
            most = f"{100 * data.most_broken:g}%"
            count += f", and data.on_broken leaves out {most} of a source at most"
        if share <= _OFTEN_BROKEN:
            value = f'"data.on_broken={{drop: {share}}}"' if share > 0.01 else "data.on_broken=drop"
            remedy += f", or leave them out with {value}"
        return [f"{source.key}: {count} - {remedy}"]
    if not sums.n_read:
        return [f"{source.name}: no record in it - name data that has some"]
    if sums.n_sequences:
        return []
    problem = _nothing_to_train(
        source.key, source.spec, sums.n_records, sums.outcomes, sums.longest
    )
    all_held_out = data.eval is None and data.eval_fraction > 0 and not sums.n_records
    return [f"{problem} or lower data.eval_fraction" if all_held_out else problem]
