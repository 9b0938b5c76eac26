"""Shows which tokens of real records the loss counts."""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardtune.config import DataConfig
from shardtune.config_io import load_config
from shardtune.data.chat_encoder import ChatEncoder
from shardtune.data.dataset import (
    PreparedData,
    TokenDataset,
    build_encoder,
    find_sources,
    open_prepared,
    prepare_data,
)
from shardtune.data.overflow import fit_to_length
from shardtune.data.records import check_record
from shardtune.data.sources import RecordChunk
from shardtune.data.tokenize import ChunkTokenizer, encode_record
from shardtune.log import logger, quiet_libraries

_RECORDS_IN_PICTURE = 3
_COLOURED = ("\033[1;32m", "\033[0m")
_BRACKETED = ("⟦", "⟧")
_BETWEEN_TOKENS = "│"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", required=True, type=Path, metavar="FILE", help="the run's configuration"
    )
    parser.add_argument(
        "--records",
        type=int,
        metavar="N",
        help="show the first N records of data.train "
        f"(default: {_RECORDS_IN_PICTURE}; all of them with --json)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="one object a line per sequence, before packing: "
        '{"record": n, "input_ids": [...], "trained": [...]}',
    )
    parser.add_argument(
        "assignments", nargs="*", metavar="section.key=value", help="override the configuration"
    )


def inspect_data(
    config_path: Path, assignments: Sequence[str], n_records: int | None, as_json: bool
) -> None:
    """Tokenize the data of a configuration as a run does, and print its first `n_records` records.

    Raises:
        UserError: a wrong configuration, no tokenizer, broken data.
    """
    config = load_config(config_path, assignments, os.environ)
    quiet_libraries(is_main=True)
    logger.handlers = [logging.StreamHandler(sys.stderr)]  # standard output is for the records
    logger.setLevel(logging.INFO)
    encoder = build_encoder(config.model.path, config.data, datetime.date.today())
    prepared = open_prepared(prepare_data(config.data, encoder))
    if as_json:
        _print_json(prepared.train, n_records)
        for line in prepared.lines():
            logger.info(line)
    else:
        n_shown = _RECORDS_IN_PICTURE if n_records is None else n_records
        _print_picture(config.data, encoder, n_shown)
        _print_summary(prepared)


def _print_json(dataset: TokenDataset, n_records: int | None) -> None:
    stop = len(dataset) if n_records is None else int(np.searchsorted(dataset.record, n_records))
    for i in range(stop):
        tokens, trained = dataset[i]
        row = {
            "record": int(dataset.record[i]),
            "input_ids": tokens.tolist(),
            "trained": trained.tolist(),
        }
        print(json.dumps(row))


@dataclass(frozen=True)
class _Piece:
    """A sequence as it is trained; it had `uncut_length` tokens before it was cut to a row."""

    tokens: list[int]
    trained: npt.NDArray[np.bool_]
    roles: list[str]
    uncut_length: int


def _print_picture(data: DataConfig, encoder: ChatEncoder, n_records: int) -> None:
    has_colour = (
        sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )
    begin, end = _COLOURED if has_colour else _BRACKETED
    tokens_by_role: Counter[str] = Counter()
    trained_by_role: Counter[str] = Counter()
    for chunk, i, value in itertools.islice(_raw_records(data), n_records):
        title = f"Record {chunk.first_record + i} ({chunk.place(i)})"
        record, _ = check_record(value)
        if ChunkTokenizer(encoder, data).is_held_out(record):
            print(f"{title}: taken for evaluation (data.eval_fraction)\n")
            continue
        pieces = _pieces(data, encoder, record)
        if not pieces:
            print(f"{title}: dropped, no token to train\n")
        for number, piece in enumerate(pieces, start=1):
            cut = f", of {piece.uncut_length}" if piece.uncut_length > len(piece.tokens) else ""
            print(
                f"{title}, sequence {number} of {len(pieces)}: {len(piece.tokens)} tokens{cut}, "
                f"{piece.trained.sum()} trained"
            )
            print(_picture(encoder.tokenizer, piece, begin, end) + "\n")
            tokens_by_role.update(piece.roles)
            trained_by_role.update(itertools.compress(piece.roles, piece.trained))
    if tokens_by_role:
        print(f"{'In the records above':<24}{'tokens':>12}{'trained':>12}")
        for role, count in tokens_by_role.most_common():
            print(f"  {role:<22}{count:>12}{trained_by_role[role]:>12}")
        print()


def _raw_records(data: DataConfig) -> Iterator[tuple[RecordChunk, int, Any]]:
    for chunk in find_sources(data)["train"].chunks("train"):
        for i, value in enumerate(chunk.parse()):
            yield chunk, i, value


def _pieces(data: DataConfig, encoder: ChatEncoder, record: dict[str, Any]) -> list[_Piece]:
    return [
        _Piece(sequence.input_ids[piece], trained, sequence.roles[piece], len(sequence.input_ids))
        for sequence in encode_record(encoder, record, with_roles=True).sequences
        for piece, trained in fit_to_length(sequence.trained, data.max_length, data.overflow)
    ]


def _picture(tokenizer: Any, piece: _Piece, begin: str, end: str) -> str:
    """Return the tokens with a stroke between them, each trained run within `begin` and `end`."""
    runs = []
    pairs = zip(piece.tokens, piece.trained, strict=True)
    for trained, run in itertools.groupby(pairs, key=lambda pair: bool(pair[1])):
        text = _BETWEEN_TOKENS.join(_token_text(tokenizer, token) for token, _ in run)
        runs.append(begin + text + end if trained else text)
    return "".join(runs)


def _token_text(tokenizer: Any, token: int) -> str:
    """Return the text of a token, with everything visible that a terminal would not show."""
    entry = str(tokenizer.convert_ids_to_tokens(token))
    text = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if "\ufffd" in text or not text:
        text = entry  # part of a character
    elif entry.startswith("▁") and not text.startswith(" "):
        text = f" {text}"  # decoding drops the blank at the start of a text
    return "".join(
        "⏎\n" if c == "\n" else c if c.isprintable() else c.encode("unicode_escape").decode()
        for c in text
    )


def _print_summary(prepared: PreparedData) -> None:
    for line in prepared.lines():
        print(line)
    for name, values in (
        ("tokens", prepared.train.lengths),
        ("trained tokens", prepared.train.trained_counts),
    ):
        print(
            f"data.train: {name} in a sequence: min {values.min()}, median {np.median(values):g}, "
            f"mean {values.mean():.1f}, 95% {np.percentile(values, 95):g}, max {values.max()}"
        )
