"""`inspect-data --html`: conversations as a person reads them, with what is trained in colour."""

from __future__ import annotations

import datetime
import itertools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from shardtune.config import Config
from shardtune.config_io import load_config
from shardtune.data.chat_encoder import ChatEncoder, EncodedRecord, EncodedSequence, TrainedTurn
from shardtune.data.dataset import (
    PreparedData,
    TokenDataset,
    build_encoder,
    find_sources,
    open_prepared,
    other_counts,
    prepare_data,
)
from shardtune.data.messages import train_flag
from shardtune.data.overflow import fit_to_length
from shardtune.data.packing import best_fit
from shardtune.data.records import check_record, rename_fields
from shardtune.data.sources import read_records
from shardtune.data.tokenize import SetChunk, encode_record
from shardtune.errors import UserError
from shardtune.log import quiet_libraries
from shardtune.report.draw import COLOURS, histogram_svg

RECORDS_ON_PAGE = 50
_EXTREMES = 20  # records of each kind, beside the first ones
FILTERS = {
    "all": "all of these",
    "cut": "truncated or split",
    "dropped": "dropped",
    "longest": "longest",
    "least": "least trained",
}


@dataclass(frozen=True)
class Span:
    """Text of neighbouring tokens, with the reason why they are not trained, or none."""

    text: str
    reason: str = ""


@dataclass(frozen=True)
class Conversation:
    """One record as the page shows it. `kinds`: the filters that it passes."""

    place: str
    title: str
    notes: list[str]
    sequences: list[list[Span]]
    kinds: set[str]


def write_data_page(
    config_path: Path, assignments: Sequence[str], n_records: int | None, out: Path
) -> list[str]:
    """Tokenize data.train as a run does, and write a page of its first records and its extremes.

    Returns:
        A sentence for each thing that happened to the data, as a run logs them.

    Raises:
        UserError: a wrong configuration, no tokenizer, broken data, or the page cannot be written.
    """
    config = load_config(config_path, assignments, os.environ)
    quiet_libraries(is_main=True)
    encoder = build_encoder(config.model.path, config.data, datetime.date.today())
    prepared = open_prepared(prepare_data(config.data, encoder))
    chosen = _choose(prepared.train, RECORDS_ON_PAGE if n_records is None else n_records)
    conversations = list(_conversations(config, encoder, chosen))
    template = files(__package__).joinpath("data_page.html.jinja").read_text(encoding="utf-8")
    html = (
        jinja2.Environment(autoescape=True)
        .from_string(template)
        .render(
            title=f"{config_path.name}: what is trained",
            lines=prepared.lines,
            colours=COLOURS,
            histograms=_histograms(prepared, config),
            filters=FILTERS,
            counts=Counter(kind for each in conversations for kind in each.kinds),
            conversations=conversations,
        )
    )
    try:
        out.write_text(html, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{out}: the page cannot be written ({error.strerror}) - name another file"
        ) from error
    return prepared.lines


def _choose(train: TokenDataset, n_first: int) -> dict[int, set[str]]:
    """Return the records to show, by their index, and why: the first ones and the extremes."""
    chosen: dict[int, set[str]] = {i: {"all"} for i in range(n_first)}
    share = train.trained_counts / train.lengths
    dropped = np.setdiff1d(np.arange(train.record.max() + 1), train.record)
    for kind, records in (
        ("longest", train.record[np.argsort(-train.lengths, kind="stable")[:_EXTREMES]]),
        ("least", train.record[np.argsort(share, kind="stable")[:_EXTREMES]]),
        ("dropped", dropped[:_EXTREMES]),
    ):
        for record in records.tolist():
            # What is dropped shows when it is encoded: a held-out record has no sequence either.
            chosen.setdefault(record, {"all"}).update({kind} - {"dropped"})
    return chosen


def _conversations(
    config: Config, encoder: ChatEncoder, chosen: dict[int, set[str]]
) -> Iterator[Conversation]:
    data, last = config.data, max(chosen, default=-1)
    max_length = data.max_length if data.overflow == "turns" else None
    for chunk in read_records({"train": find_sources(data)["train"]}):
        if chunk.first_record > last:
            return
        of_source = encoder.with_loss_on(chunk.loss_on or data.loss_on)
        for i, value in enumerate(chunk.parse()):
            index = chunk.first_record + i
            if index not in chosen:
                continue
            record, *_ = check_record(rename_fields(value, data.field_names))
            encoded = encode_record(of_source, record, max_length)
            counted = SetChunk()
            counted.add(index, encoded, data)
            pieces = list(_pieces(encoded, config))
            notes = other_counts(counted.counts)
            kinds = set(chosen[index])
            if not pieces:
                kinds.add("dropped")
            elif encoded.too_long or any("longer than" in note for note in notes):
                kinds.add("cut")
            whole = pieces or [(s, "dropped") for s in encoded.too_long or encoded.sequences]
            yield Conversation(
                place=chunk.place(i),
                title=_title(index, counted),
                notes=notes,
                sequences=[
                    _spans(sequence, record, of_source, len(whole) > 1, reason)
                    for sequence, reason in whole
                ],
                kinds=kinds,
            )


def _title(index: int, counted: SetChunk) -> str:
    sequences, tokens, trained = (
        counted.counts[name] for name in ("sequences", "tokens", "trained tokens")
    )
    several = f" in {sequences} sequences" if sequences > 1 else ""
    return f"Record {index}: {tokens} tokens{several}, {trained} trained"


def _pieces(encoded: EncodedRecord, config: Config) -> Iterator[tuple[EncodedSequence, str]]:
    """Yield what is kept of each sequence, with its turns, and no reason to be left out."""
    for sequence in encoded.sequences:
        for part, trained in fit_to_length(
            sequence.trained, config.data.max_length, config.data.overflow
        ):
            turns = [
                TrainedTurn(turn.message, turn.begin - part.start, turn.end - part.start)
                for turn in sequence.turns
            ]
            ids = sequence.input_ids[part]
            yield replace(sequence, input_ids=ids, trained=trained.tolist(), turns=turns), ""


def _spans(
    sequence: EncodedSequence,
    record: dict[str, Any],
    encoder: ChatEncoder,
    is_one_of_many: bool,
    reason: str,
) -> list[Span]:
    """Return the text of each run of tokens that are trained, or are not for one reason."""
    spans, begin = [], 0
    for is_trained, run in itertools.groupby(sequence.trained):
        end = begin + len(list(run))
        text = encoder.tokenizer.decode(
            sequence.input_ids[begin:end], clean_up_tokenization_spaces=False
        )
        why = "" if is_trained else _reason(begin, sequence, record, encoder, is_one_of_many)
        spans.append(Span(text, reason or why))
        begin = end
    return spans


def _reason(
    begin: int,
    sequence: EncodedSequence,
    record: dict[str, Any],
    encoder: ChatEncoder,
    is_one_of_many: bool,
) -> str:
    """Say why the tokens from `begin` to the next trained one are not trained."""
    messages = _messages(record)
    following = next((turn for turn in sequence.turns if turn.begin >= max(begin, 1)), None)
    before = [turn for turn in sequence.turns if turn.end <= begin]
    if following is None and any(turn.begin <= begin < turn.end for turn in sequence.turns):
        return "the first token, which nothing predicts"
    if following is None:
        return (
            "behind the end of the last turn: the template writes it, and not the model"
            if before
            else "the first token, which nothing predicts"
        )
    if not messages:
        return "the prompt"
    first = before[-1].message + 1 if before else 0
    parts = [
        _message_reason(i, messages, record, encoder, is_one_of_many)
        for i in range(first, following.message)
    ]
    return "; ".join([*parts, f"what the template writes before message {following.message}"])


def _messages(record: dict[str, Any]) -> list[dict[str, Any]]:
    if "messages" in record:
        return list(record["messages"])
    prompt, completion = record.get("prompt"), record.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        return [*prompt, *completion]
    return []


def _message_reason(
    index: int,
    messages: list[dict[str, Any]],
    record: dict[str, Any],
    encoder: ChatEncoder,
    is_one_of_many: bool,
) -> str:
    message = messages[index]
    named = f"message {index} ({message['role']})"
    if message["role"] != "assistant":
        return f"{named} is context"
    if train_flag(message) is False:
        return f"{named} says train: false or weight: 0"
    if "prompt" in record and index < len(record["prompt"]):
        return f"{named} is in the prompt"
    if encoder.loss_on == "last":
        return f"{named} is not the last turn (loss_on=last)"
    return f"{named} has a sequence of its own" if is_one_of_many else f"{named} is context"


def _histograms(prepared: PreparedData, config: Config) -> list[str]:
    """Return the spread of lengths and of trained shares, and how full the rows are, as SVG."""
    train, limit = prepared.train, config.data.max_length
    rows = np.arange(len(train)), len(train)
    if config.data.packing:
        rows = best_fit(train.lengths, limit)
        order = np.argsort(-train.lengths, kind="stable")
        filled = np.bincount(rows[0], train.lengths[order], rows[1])
    else:
        filled = train.lengths
    share = 100 * train.trained_counts / train.lengths
    return [
        histogram_svg(train.lengths, "Lengths", "tokens in a sequence", limit),
        histogram_svg(share, "Trained share", "% of a sequence", 100),
        histogram_svg(100 * filled / limit, "Row fill", "% of data.max_length", 100),
    ]
