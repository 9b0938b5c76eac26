"""`inspect-data --step`: from a step to the records that it trained."""

import datetime
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from shardtune.config import Config
from shardtune.config_io import bare, load_config, read_written, shared_settings
from shardtune.data.dataset import TokenDataset, build_encoder, open_prepared, prepare_data
from shardtune.data.schedule import (
    Cost,
    Position,
    Schedule,
    Step,
    rows_of_rank,
    source_weights,
)
from shardtune.errors import UserError
from shardtune.report.inspect_data import columns, counts, log_to_stderr, picture, places_of
from shardtune.report.read_run import Entry, RunRecord, read_run

_OF_ORDER = ("run.seed", "data.train", "data.max_length", "data.packing")


def show_step(config_path: Path, assignments: Sequence[str], number: int, as_json: bool) -> None:
    """Print the records that the run in run.dir trained, or would train, in a step.

    Raises UserError.
    """
    config = load_config(config_path, assignments, os.environ)
    log_to_stderr()
    run = read_run(Path(config.run.dir))
    start = _start_of(run, number)
    _require_same_order(config, run.path / "config.yaml")
    date = datetime.date.fromisoformat(start["date"])
    encoder = build_encoder(config.model, config.data, date)
    prepared = open_prepared(prepare_data(config.data, encoder))
    if start["data_key"] != prepared.key:
        raise UserError(
            f"{run.path} has trained other data in step {number} than this configuration gives now "
            f"- use --config {run.path}/config.yaml, with the files of data.train as they were"
        )
    train = prepared.train
    step = _find_step(config, train, start, number)
    places = places_of(config.data, {*train.record[step.rows.members].tolist()})
    took = f"took it from its start at step {start['step']}"
    if number > run.last_step:
        took = f"would take it (the last step in its metrics is {run.last_step})"
    print(
        f"Step {number}, epoch {step.epoch}, as {run.path} {took}: {start['micro_batch_size']} "
        f"(micro-batch) x {start['gradient_accumulation_steps']} (accumulation) x "
        f"{start['data_ranks']} (data ranks) | Rows: {len(step.rows)} | Records: {len(places)} | "
        f"Tokens: {step.tokens} | Trained tokens: {step.trained_tokens}",
        file=sys.stderr if as_json else sys.stdout,
    )
    for data_rank, micro_batch, row, sequence in _sequences_of(step, start):
        tokens, trained, weights = columns(train, sequence)
        record = int(train.record[sequence])
        if as_json:
            position = {"step": number, "data_rank": data_rank, "micro_batch": micro_batch}
            content = {"record": record, "input_ids": tokens, "trained": trained}
            place = {"place": places[record]}
            print(json.dumps(position | {"row": row} | content | place | weights))
        else:
            print(
                f"\nData rank {data_rank}, micro-batch {micro_batch}, row {row}: record {record} "
                f"of {places[record]}: {counts(trained, weights)}"
            )
            print(picture(encoder.tokenizer, tokens, trained))


def _start_of(run: RunRecord, number: int) -> Entry:
    """Return the last start before a step, since a resume may change how ranks divide the rows.

    Raises UserError.
    """
    starts = [start for start in run.of_kind("start") if start["step"] < number]
    if not starts:
        raise UserError(
            f"{run.path} begins behind step {number}, so that it has no step {number} - name the "
            "run.dir of the run whose checkpoint it goes on from"
        )
    if number > starts[-1]["total_steps"]:
        raise UserError(
            f"{run.path} ends with step {starts[-1]['total_steps']}, so that it has no step "
            f"{number} - name one of its steps"
        )
    return starts[-1]


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


def _find_step(config: Config, train: TokenDataset, start: Entry, number: int) -> Step:
    sizes = ("data_ranks", "micro_batch_size", "gradient_accumulation_steps")
    schedule = Schedule(
        train,
        max_length=config.data.max_length,
        packing=config.data.packing,
        seed=config.run.seed,
        rows_per_step=math.prod(start[size] for size in sizes),
        epochs=sys.maxsize,  # the run may have had other ones than the configuration has now
        max_steps=number,
        start=Position(start["step"], start["epoch"], start["row"]),
        weights=source_weights(config.data),
    )
    return next(step for step in schedule.steps() if step.number == number)


def _sequences_of(step: Step, start: Entry) -> Iterator[tuple[int, int, int, int]]:
    """Yield data rank, micro-batch, row and number of each sequence of a step, all from 0."""
    costs = step.costs(Cost(**start["row_cost"]))
    for rank in range(start["data_ranks"]):
        shares = rows_of_rank(costs, rank, start["data_ranks"], start["micro_batch_size"])
        for micro_batch, rows in enumerate(shares):
            for row in rows:
                for sequence in step.rows[row].tolist():
                    yield rank, micro_batch, row, sequence
