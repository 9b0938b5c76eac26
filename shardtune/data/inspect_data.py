"""Shows which tokens of real records the loss counts."""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
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
    open_prepared,
    prepare_data,
)
from shardtune.data.records import Chunk, check_record, find_source
from shardtune.data.tokenize import Tokeniser, encode_record, kept_pieces
from shardtune.log import quiet_libraries

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
        help=f"show the first N records of data.train (default: {_RECORDS_IN_PICTURE}; all of them with --json)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help='one object a line per sequence, before packing: {"record": n, "input_ids": [...], "trained": [...]}',
    )
    parser.add_argument(
        "assignments", nargs="*", metavar="section.key=value", help="override the configuration"
    )


def inspect_data(
    config_path: Path, assignments: Sequence[str], n_records: int | None, as_json: bool
) -> None:
    """Tokenise the data of a configuration as a run does, and print its first `n_records` records.

    Raises:
        UserError: a wrong configuration, no tokenizer, broken data.
    """
    config = load_config(config_path, assignments, os.environ)
    quiet_libraries(is_main=True)
    encoder = build_encoder(config.model.path, config.data, datetime.date.today())
    prepared = open_prepared(prepare_data(config.data, encoder, _say_on_stderr))
    if as_json:
        _print_json(prepared.train, n_records)
        for line in prepared.lines():
            _say_on_stderr(line)
    else:
        _print_picture(
            config.data, encoder, _RECORDS_IN_PICTURE if n_records is None else n_records
        )
        _print_summary(prepared)


def _say_on_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


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
class _Shown:
    """One sequence of a record, and how many tokens it had before it was cut to a row."""

    tokens: list[int]
    trained: npt.NDArray[np.bool_]
    roles: list[str]
    uncut_length: int


def _print_picture(data: DataConfig, encoder: ChatEncoder, n_records: int) -> None:
    colour = (
        sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )
    tokens_of: Counter[str] = Counter()
    trained_of: Counter[str] = Counter()
    for chunk, i, value in itertools.islice(_raw_records(data), n_records):
        title = f"Record {chunk.first_record + i} ({chunk.place(i)})"
        record, _ = check_record(value)
        if Tokeniser(encoder, data).is_held_out(record):
            print(f"{title}: taken for evaluation (data.eval_fraction)\n")
            continue
        sequences = _sequences(data, encoder, record)
        if not sequences:
            print(f"{title}: dropped, no token to train\n")
        for number, shown in enumerate(sequences, start=1):
            cut = f", of {shown.uncut_length}" if shown.uncut_length > len(shown.tokens) else ""
            print(
                f"{title}, sequence {number} of {len(sequences)}: {len(shown.tokens)} tokens{cut}, "
                f"{shown.trained.sum()} trained"
            )
            print(_picture(encoder.tokenizer, shown, *(_COLOURED if colour else _BRACKETED)) + "\n")
            tokens_of.update(shown.roles)
            trained_of.update(
                role for role, flag in zip(shown.roles, shown.trained, strict=True) if flag
            )
    if tokens_of:
        print(f"{'In the records above':<24}{'tokens':>12}{'trained':>12}")
        for role, count in tokens_of.most_common():
            print(f"  {role:<22}{count:>12}{trained_of[role]:>12}")
        print()


def _raw_records(data: DataConfig) -> Iterator[tuple[Chunk, int, Any]]:
    source = find_source(
        "data.train", data.train, say=lambda line: None
    )  # said when the data was prepared
    for chunk in source.chunks("train"):
        for i, value in enumerate(chunk.parsed()):
            yield chunk, i, value


def _sequences(data: DataConfig, encoder: ChatEncoder, record: dict[str, Any]) -> list[_Shown]:
    return [
        _Shown(sequence.input_ids[piece], trained, sequence.roles[piece], len(sequence.input_ids))
        for sequence in encode_record(encoder, record, with_roles=True).sequences
        for piece, trained in kept_pieces(sequence.trained, data.max_length, data.overflow)
    ]


def _picture(tokenizer: Any, shown: _Shown, begin: str, end: str) -> str:
    """The tokens with a stroke between them, and each trained stretch between `begin` and `end`."""
    stretches = []
    pairs = zip(shown.tokens, shown.trained, strict=True)
    for trained, stretch in itertools.groupby(pairs, key=lambda pair: bool(pair[1])):
        text = _BETWEEN_TOKENS.join(_token_text(tokenizer, token) for token, _ in stretch)
        stretches.append(begin + text + end if trained else text)
    return "".join(stretches)


def _token_text(tokenizer: Any, token: int) -> str:
    """What a token writes, with everything visible that a terminal would not show."""
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
