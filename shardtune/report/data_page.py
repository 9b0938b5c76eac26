"""`inspect-data --html`: conversations as a person reads them, with what is trained in colour."""

from __future__ import annotations

import datetime
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from operator import eq
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pyarrow

from shardtune.config import Config, DataConfig
from shardtune.config_io import load_config
from shardtune.data.chat_encoder import ChatEncoder, EncodedRecord, EncodedSequence, TrainedTurn
from shardtune.data.dataset import (
    PreparedData,
    TokenDataset,
    build_encoder,
    find_sources,
    open_prepared,
    prepare_data,
)
from shardtune.data.inspect_data import log_to_stderr
from shardtune.data.messages import train_flag
from shardtune.data.outcomes import TOO_LONG
from shardtune.data.overflow import encode_to_fit, fit_to_length, lead_of
from shardtune.data.packing import best_fit
from shardtune.data.record_error import RecordError
from shardtune.data.record_files import RecordChunk
from shardtune.data.records import read_record
from shardtune.data.sources import Source, read_records
from shardtune.data.tokenize import ChunkTokenizer, SetChunk
from shardtune.errors import UserError
from shardtune.report.draw import COLOURS, histogram_svg
from shardtune.report.report_command import require_page

RECORDS_ON_PAGE = 50
_MOST_CHARACTERS = 4000  # shown of a record that is not rendered
_WARNING = ": WARNING: "
_EXTREMES = 20  # records of each kind, beside the first ones
_HELD_OUT = "held out for evaluation (data.eval_fraction)"
_CUT_OFF = "cut off: longer than data.max_length"
FILTERS = {
    "all": "all of these",
    "cut": "truncated or split",
    "dropped": "dropped",
    "longest": "longest",
    "least": "least trained",
}


@dataclass(frozen=True)
class Span:
    """Text of neighbouring tokens, and why they are not trained (empty if they are)."""

    text: str
    reason: str = ""


@dataclass(frozen=True)
class Conversation:
    """One record as the page shows it. `kinds`: the filters that it passes.

    `record`: its index in data.train, or the name of another set and its index there.
    """

    record: str
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
        UserError: the configuration or the data is wrong, the tokenizer is missing, or `out`
            cannot be written or is not a page.
    """
    require_page(out)
    config = load_config(config_path, assignments, os.environ)
    log_to_stderr()
    encoder = build_encoder(config.model.path, config.data, datetime.date.today())
    prepared = open_prepared(prepare_data(config.data, encoder))
    chosen = _choose(prepared.train, RECORDS_ON_PAGE if n_records is None else n_records)
    examples = {line: record for line, record in prepared.examples.items() if _WARNING in line}
    for record in examples.values():
        chosen.setdefault(record, {"all"})
    conversations: list[Conversation] = []
    for name, sources in find_sources(config.data).items():
        conversations += _conversations(config, encoder, prepared, sources, name, chosen)
        chosen = {}  # evaluation data shows its dropped records alone
    template = files(__package__).joinpath("data_page.html.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True)
    html = environment.from_string(template).render(
        title=f"{config_path.name}: what is trained",
        lines=[(line, _WARNING in line, examples.get(line)) for line in prepared.lines],
        colours=COLOURS,
        histograms=_histograms(prepared, config),
        filters=FILTERS,
        counts=Counter(kind for shown in conversations for kind in shown.kinds),
        conversations=conversations,
    )
    try:
        out.write_text(html, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{out}: the page cannot be written ({error.strerror}) - name another file"
        ) from error
    return prepared.lines


def _choose(train: TokenDataset, n_first: int) -> dict[int, set[str]]:
    """Return the indexes of the first and the extreme records, and the filters of each."""
    chosen: dict[int, set[str]] = {i: {"all"} for i in range(n_first)}
    first = np.flatnonzero(train.begins_record)
    longest = np.maximum.reduceat(train.lengths, first)
    share = np.add.reduceat(train.trained_counts, first) / np.add.reduceat(train.lengths, first)
    for kind, rank in (("longest", -longest), ("least", share)):
        order = np.argsort(rank, kind="stable")[:_EXTREMES]
        for record in train.record[first[order]].tolist():
            chosen.setdefault(record, {"all"}).add(kind)
    return chosen


def _conversations(
    config: Config,
    encoder: ChatEncoder,
    prepared: PreparedData,
    sources: list[Source],
    set_name: str,
    chosen: dict[int, set[str]],
) -> Iterator[Conversation]:
    """Yield the chosen records of a set, and its first dropped records."""
    data, last = config.data, max(chosen, default=-1)
    tokenizer = ChunkTokenizer(encoder, data)
    sets = [prepared.sets[set_name]]
    if data.eval is None and data.eval_fraction:
        sets.append(prepared.sets["eval"])  # its records keep their numbers in data.train
    n_dropped = _EXTREMES  # dropped records still to find
    for chunk in read_records({set_name: sources}):
        if chunk.first_record > last and n_dropped <= 0:
            return
        indexes = range(chunk.first_record, chunk.first_record + len(chunk.numbers))
        for index in sorted(_without_sequence(indexes, sets) | (chosen.keys() & indexes)):
            if index not in chosen and n_dropped <= 0:
                continue
            i = index - chunk.first_record
            (value,) = replace(chunk, rows=chunk.rows[i : i + 1]).parse()
            kinds = chosen.get(index, {"all"})
            try:
                record, *_ = read_record(value, data)
                is_held_out = tokenizer.is_held_out(record)
                if is_held_out and index not in chosen:
                    continue  # it trains nothing, and was not dropped from data.train
                conversation = _conversation(tokenizer, chunk, index, record, kinds, is_held_out)
            except RecordError as error:  # left out: data.on_broken=drop
                title, spans = f"Record {index}: broken", [[Span(_written(chunk, i), "dropped")]]
                kinds = kinds | {"dropped"}
                conversation = Conversation(
                    str(index), chunk.place(i), title, [str(error)], spans, kinds
                )
            n_dropped -= "dropped" in conversation.kinds
            if set_name != "train":
                title = f"data.{set_name}: {conversation.title}"
                conversation = replace(conversation, record=f"{set_name}-{index}", title=title)
            yield conversation


def _written(chunk: RecordChunk, i: int) -> str:
    """Return the beginning of a record's text as the data has it."""
    row = chunk.rows[i : i + 1]
    if isinstance(row, pyarrow.Table):
        return json.dumps(row.to_pylist()[0], ensure_ascii=False, default=str)[:_MOST_CHARACTERS]
    text = row[0].written if isinstance(row[0], RecordError) else row[0].decode(errors="replace")
    return text[:_MOST_CHARACTERS]


def _without_sequence(indexes: range, sets: list[TokenDataset]) -> set[int]:
    """Return the `indexes` of records without a sequence in any of the sets."""
    missing = set(indexes)
    for dataset in sets:
        begin, end = np.searchsorted(dataset.record, (indexes.start, indexes.stop))
        missing.difference_update(dataset.record[begin:end].tolist())
    return missing


def _conversation(
    tokenizer: ChunkTokenizer,
    chunk: RecordChunk,
    index: int,
    record: dict[str, Any],
    kinds: set[str],
    is_held_out: bool,
) -> Conversation:
    data = tokenizer.data
    encoder = tokenizer.encoder_of(chunk, record)
    encoded = encode_to_fit(encoder, record, data)
    counted = SetChunk()
    counted.add(index, encoded, data, encoder.bos_ids)
    notes, title = [*counted.outcomes.lines().values()], _title(index, counted)
    pieces = [] if is_held_out else list(_pieces(encoded, data, encoder.bos_ids))
    if is_held_out:
        title = f"Record {index}: {_HELD_OUT}"
    elif not pieces:
        kinds = kinds | {"dropped"}
    elif any(outcome in TOO_LONG for outcome, *_ in counted.outcomes):
        kinds = kinds | {"cut"}
    sequences = [
        _spans(piece, record, encoder, len(pieces) > 1) + _span(encoder, rest, _CUT_OFF)
        for piece, rest in pieces
    ] or [
        _span(encoder, whole.input_ids, _HELD_OUT if is_held_out else "dropped")
        for whole in encoded.too_long or encoded.sequences
    ]
    i = index - chunk.first_record
    if not sequences:  # without a turn to train nothing is rendered
        sequences = [[Span(_written(chunk, i), _HELD_OUT if is_held_out else "dropped")]]
    return Conversation(str(index), chunk.place(i), title, notes, sequences, kinds)


def _title(index: int, counted: SetChunk) -> str:
    n_tokens = sum(len(tokens) for tokens, *_ in counted.sequences)
    n_trained = sum(int(trained.sum()) for _, trained, _ in counted.sequences)
    n_sequences = len(counted.sequences)
    several = f" in {n_sequences} sequences" if n_sequences > 1 else ""
    return f"Record {index}: {n_tokens} tokens{several}, {n_trained} trained"


def _pieces(
    encoded: EncodedRecord, data: DataConfig, bos_ids: list[int]
) -> Iterator[tuple[EncodedSequence, list[int]]]:
    """Yield each kept part of a sequence with its turns, and the tokens cut off after it."""
    for sequence in encoded.sequences:
        n_lead = len(lead_of(sequence.input_ids, bos_ids, data.max_length))
        parts = fit_to_length(sequence.trained, data.max_length, data.overflow, n_lead)
        for part, trained in parts:
            turns = [
                TrainedTurn(turn.message, turn.begin - part.start, turn.end - part.start)
                for turn in sequence.turns
            ]
            ids, rest = sequence.input_ids[part], []
            if data.overflow == "truncate":
                rest = sequence.input_ids[part.stop :]
            elif len(encoded.sequences) == len(encoded.too_long) == 1:
                # A template may write a turn otherwise where it is the last one.
                whole = encoded.too_long[0].input_ids
                rest = whole[sum(itertools.takewhile(bool, map(eq, ids, whole))) :]
            yield replace(sequence, input_ids=ids, trained=trained.tolist(), turns=turns), rest


def _span(encoder: ChatEncoder, ids: list[int], reason: str) -> list[Span]:
    text = encoder.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    return [Span(text, reason)] if ids else []


def _spans(
    sequence: EncodedSequence, record: dict[str, Any], encoder: ChatEncoder, is_one_of_many: bool
) -> list[Span]:
    """Split the text where trained tokens begin or end, with the reasons of the untrained parts."""
    spans: list[Span] = []
    begin = 0
    for is_trained, run in itertools.groupby(sequence.trained):
        end = begin + len(list(run))
        why = "" if is_trained else _reason(begin, sequence, record, encoder, is_one_of_many)
        spans += _span(encoder, sequence.input_ids[begin:end], why)
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
    if "loss_mask" in record:
        return "the data's labels or loss_mask leave it out, or nothing predicts it, as the first"
    messages = _messages(record)
    following = next((turn for turn in sequence.turns if turn.begin >= max(begin, 1)), None)
    before = [turn for turn in sequence.turns if turn.end <= begin]
    is_within = any(turn.begin <= begin < turn.end for turn in sequence.turns)
    if following is None and before and not is_within:
        return "behind the end of the last turn: the template writes it, and not the model"
    if following is None:
        return "the first token, which nothing predicts"
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
        return f"{named} is marked as not to be trained"
    if "prompt" in record and index < len(record["prompt"]):
        return f"{named} is in the prompt"
    if encoder.loss_on == "last":
        return f"{named} is not the last turn (loss_on=last)"
    return f"{named} has a sequence of its own" if is_one_of_many else f"{named} is context"


def _histograms(prepared: PreparedData, config: Config) -> list[str]:
    """Draw histograms of lengths, trained shares and the fill of rows, as SVG."""
    train, limit = prepared.train, config.data.max_length
    if config.data.packing:
        row_of_sequence, n_rows = best_fit(train.lengths, limit)
        order = np.argsort(-train.lengths, kind="stable")
        filled = np.bincount(row_of_sequence, train.lengths[order], n_rows)
    else:
        filled = train.lengths
    share = 100 * train.trained_counts / train.lengths
    return [
        histogram_svg(train.lengths, "Lengths", "tokens in a sequence", limit),
        histogram_svg(share, "Trained share", "% of a sequence", 100),
        histogram_svg(100 * filled / limit, "Row fill", "% of data.max_length", 100),
    ]
