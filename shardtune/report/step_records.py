"""`inspect-data --step`: from a step to the records that it trained."""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from shardtune.config import Config
from shardtune.config_io import bare, load_config, read_written, shared_settings
from shardtune.data.dataset import PreparedData, build_encoder, open_prepared, prepare_data
from shardtune.data.inspect_data import log_to_stderr, picture, places_of
from shardtune.data.schedule import (
    Cost,
    Position,
    Schedule,
    Step,
    rows_of_rank,
    source_weights,
)
from shardtune.distributed.layout import Layout
from shardtune.errors import UserError
from shardtune.report.read_run import Entry, read_run
from shardtune.run_files import METRICS

_PER_TOKEN = Cost(1, 0, 0)  # with one rank the costs of rows only order them
_ROW_FIELDS = ("data_ranks", "micro_batch_size", "gradient_accumulation_steps", "row_cost")
_OF_ORDER = ("run.seed", "data.train", "data.max_length", "data.packing")
_NEEDED = (*_ROW_FIELDS, "epoch", "row", "date", "data_key")


@dataclass(frozen=True)
class Division:
    """The division of rows since one start of a run, and where that start begins.

    `words`: describes the start. `key`: the digest of the run's data; None without a run.
    """

    words: str
    ranks: int
    micro_batch: int
    accumulation: int
    cost: Cost
    begin: Position
    date: datetime.date
    key: str | None
    last_step: int | None


class ShownSequence(NamedTuple):
    """A sequence of a step, and the data rank, micro-batch and row that train it."""

    data_rank: int
    micro_batch: int
    row: int
    number: int  # the sequence's number


def show_step(
    config_path: Path, assignments: Sequence[str], number: int, n_records: int | None, as_json: bool
) -> None:
    """Print the records that the step with this number trains, at most `n_records`.

    Raises:
        UserError: a wrong configuration, no such step, or other data than the run had.
    """
    config = load_config(config_path, assignments, os.environ)
    log_to_stderr()
    division = _division_of(config, number)
    encoder = build_encoder(config.model.path, config.data, division.date)
    prepared = open_prepared(prepare_data(config.data, encoder))
    if division.key not in (None, prepared.key):
        raise UserError(
            f"{config.run.dir} has trained other data in step {number} than this configuration "
            f"gives now - use --config {config.run.dir}/config.yaml, with the files of data.train "
            "as they were"
        )
    step = _find_step(config, prepared, division, number)
    train, shown = prepared.train, list(_sequences_of(step, division))
    records = list(dict.fromkeys(int(train.record[s.number]) for s in shown))[:n_records]
    shown = [sequence for sequence in shown if train.record[sequence.number] in records]
    places = places_of(config.data, set(records))
    n_records_in_step = len({*train.record[step.rows.members].tolist()})
    print(
        f"Step {number}, epoch {step.epoch}, {division.words}: {division.micro_batch} "
        f"(micro-batch) x {division.accumulation} (accumulation) x {division.ranks} (data ranks) | "
        f"Rows: {len(step.rows)} | Records: {n_records_in_step} | Tokens: {step.tokens} | "
        f"Trained tokens: {step.trained_tokens}",
        file=sys.stderr if as_json else sys.stdout,
    )
    for sequence in shown:
        tokens, trained = (column.tolist() for column in train[sequence.number])
        record = int(train.record[sequence.number])
        if as_json:
            position = {
                "step": number,
                "data_rank": sequence.data_rank,
                "micro_batch": sequence.micro_batch,
                "row": sequence.row,
            }
            content = {"record": record, "input_ids": tokens, "trained": trained}
            print(json.dumps(position | content | {"place": places[record]}))
        else:
            print(
                f"\nData rank {sequence.data_rank}, micro-batch {sequence.micro_batch}, row "
                f"{sequence.row}: record {record} of {places[record]}: {len(tokens)} tokens, "
                f"{sum(trained)} trained"
            )
            print(picture(encoder.tokenizer, tokens, trained))


def _division_of(config: Config, number: int) -> Division:
    """Return how the run divides the rows of a step; without a run, how one data rank would.

    Raises:
        UserError: the run's directory cannot be read, or the run has no such step.
    """
    directory, layout = Path(config.run.dir), Layout.of(config)
    run = read_run(directory) if (directory / METRICS).exists() else None
    starts = run.of_kind("start") if run else []
    if starts and number <= starts[0]["step"]:
        raise UserError(
            f"{directory} begins behind step {starts[0]['step']}, so that it has no step {number} "
            "- name the run.dir of the run whose checkpoint it goes on from"
        )
    if not starts or not all(name in starts[-1] for name in _NEEDED):
        reason = f"an older version wrote {directory}" if starts else f"{directory} holds no run"
        return Division(
            f"as one data rank would take it ({reason})",
            1,
            layout.micro_batch_size,
            layout.micro_batches,
            _PER_TOKEN,
            Position(),
            datetime.date.today(),
            None,
            None,
        )
    _require_same_order(config, directory / "config.yaml")
    # A resume may change the division: the last start before the step counts.
    start: Entry = [entry for entry in starts if entry["step"] < number][-1]
    if number > start["total_steps"]:
        raise UserError(
            f"{directory} ends with step {start['total_steps']}, so that it has no step {number} - "
            "name one of its steps"
        )
    took = f"took it from its start at step {start['step']}"
    if run and number > run.last_step:
        took = f"would take it (the last step in its metrics is {run.last_step})"
    return Division(
        f"as {directory} {took}",
        start["data_ranks"],
        start["micro_batch_size"],
        start["gradient_accumulation_steps"],
        Cost(**start["row_cost"]),
        Position(start["step"], start["epoch"], start["row"]),
        datetime.date.fromisoformat(start["date"]),
        start["data_key"],
        start["total_steps"],
    )


def _require_same_order(config: Config, written: Path) -> None:
    """Refuse settings that change the order of the data, which the digest does not show."""
    settings, current = read_written(written) if written.exists() else {}, shared_settings(config)
    problems = [
        f"{key} is {bare(current[key])}, and {bare(settings[key][0])} in the run - "
        f"use --config {written}"
        for key in _OF_ORDER
        if key in settings and settings[key][0] != current[key]
    ]
    if problems:
        raise UserError(*problems)


def _find_step(config: Config, prepared: PreparedData, division: Division, number: int) -> Step:
    """Return the step with this number."""
    # A run may have had other epochs than the configuration has now, so its schedule has no end.
    is_of_run = division.last_step is not None
    schedule = Schedule(
        prepared.train,
        max_length=config.data.max_length,
        packing=config.data.packing,
        seed=config.run.seed,
        rows_per_step=division.ranks * division.micro_batch * division.accumulation,
        epochs=sys.maxsize if is_of_run else config.train.epochs,
        max_steps=number if is_of_run else config.train.max_steps,
        start=division.begin,
        weights=source_weights(config.data),
    )
    step = next((step for step in schedule.steps() if step.number == number), None)
    if step is None:
        raise UserError(
            f"--step {number}: one data rank would take {schedule.total_steps} steps - name one of "
            "them"
        )
    return step


def _sequences_of(step: Step, division: Division) -> Iterator[ShownSequence]:
    """Yield the sequences of a step by rank and micro-batch, all numbers from 0."""
    costs = step.costs(division.cost)
    for rank in range(division.ranks):
        shares = rows_of_rank(costs, rank, division.ranks, division.micro_batch)
        for micro_batch, rows in enumerate(shares):
            for row in rows:
                for sequence in step.rows[row].tolist():
                    yield ShownSequence(rank, micro_batch, row, sequence)
