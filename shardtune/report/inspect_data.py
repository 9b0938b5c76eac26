"""Shows which tokens of real records the loss counts."""

import datetime
import itertools
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardtune.config import Config, DataConfig
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
from shardtune.data.sources import read_records
from shardtune.log import logger, quiet_libraries

_RECORDS_IN_PICTURE = 3
_COLOURED = ("\033[1;32m", "\033[0m")
_BRACKETED = ("⟦", "⟧")
_BETWEEN_TOKENS = "│"
_BYTES_OF_A_CHARACTER = 4  # at most, and as many tokens


class ShownSequence(NamedTuple):
    """A sequence of data.train, its record, and where this stands."""

    record: int
    place: str
    source: str  # empty where the sources have no names
    tokens: list[int]
    trained: list[bool]
    weights: dict[str, list[float]]  # `weights` of the tokens, if any lies between 0 and 1


def inspect_data(
    config_path: Path, assignments: Sequence[str], n_records: int | None, as_json: bool
) -> None:
    """Tokenize the data of a configuration as a run does, and print its first `n_records` records.

    Raises:
        UserError: a wrong configuration, no tokenizer, broken data.
    """
    config, encoder, prepared = tokenized(config_path, assignments)
    n_shown = n_records if n_records is not None or as_json else _RECORDS_IN_PICTURE
    for shown in sequences(config.data, prepared.train, n_shown):
        record, place, source, tokens, trained, weights = shown
        if as_json:
            fields = {"record": record, "input_ids": tokens, "trained": trained, "place": place}
            print(json.dumps(fields | ({"source": source} if source else {}) | weights))
        else:
            of = f" ({source})" if source else ""
            print(f"Record {record}{of} of {place}: {counts(trained, weights)}")
            print(picture(encoder.tokenizer, tokens, trained) + "\n")
    said = lines(prepared)
    if encoder.tokenizer.chat_template:
        facts = json.dumps(asdict(encoder.template.facts), ensure_ascii=False)
        said.append(f"Chat template: {facts}")
    for line in said:
        print(line, file=sys.stderr if as_json else sys.stdout)


def tokenized(
    config_path: Path, assignments: Sequence[str]
) -> tuple[Config, ChatEncoder, PreparedData]:
    """Tokenize the data of a configuration as a run does. Raises UserError."""
    config = load_config(config_path, assignments, os.environ)
    log_to_stderr()
    encoder = build_encoder(config.model, config.data, datetime.date.today())
    return config, encoder, open_prepared(prepare_data(config.data, encoder))


def sequences(
    data: DataConfig, train: TokenDataset, n_records: int | None
) -> Iterator[ShownSequence]:
    """Yield the sequences of the first `n_records` records, None: of all."""
    sources = [key.removeprefix("data.train").lstrip(".") for key in data.train_sources]
    places = _places(data)
    stop = len(train) if n_records is None else np.searchsorted(train.record, n_records)
    record, place = -1, ""
    for i in range(stop):
        while record < train.record[i]:
            record, place = next(places)
        yield ShownSequence(record, place, sources[train.source[i]], *columns(train, i))


def columns(train: TokenDataset, i: int) -> tuple[list[int], list[bool], dict[str, list[float]]]:
    """Return a sequence's tokens, whether each is trained, and `weights` if any is not 0 or 1."""
    tokens, weights = train[i]
    trained = (weights > 0).tolist()
    if not ((weights > 0) & (weights < 1)).any():
        return tokens.tolist(), trained, {}
    # By its text a float32 is 0.3, else 0.30000001.
    return tokens.tolist(), trained, {"weights": [float(str(weight)) for weight in weights]}


def counts(trained: Sequence[bool], weights: Mapping[str, Sequence[float]]) -> str:
    """Return the numbers of a sequence's tokens, of the trained ones, and of those by weight."""
    by_weight = sorted(Counter(filter(None, weights.get("weights", ()))).items())
    said = ", ".join(f"{n} by {weight:g}" for weight, n in by_weight)
    return f"{len(trained)} tokens, {sum(trained)} trained" + (f" ({said})" if said else "")


def lines(prepared: PreparedData) -> list[str]:
    """Return what a run logs of the data, and how long its sequences are."""
    train = prepared.train
    lengths = {"tokens": train.lengths, "trained tokens": train.trained_counts}
    return [*prepared.lines, *(_spread(name, values) for name, values in lengths.items())]


def log_to_stderr() -> None:
    """Leave standard output to the records."""
    quiet_libraries(is_main=True)
    logger.handlers = [logging.StreamHandler(sys.stderr)]
    logger.setLevel(logging.INFO)


def places_of(data: DataConfig, records: Collection[int]) -> dict[int, str]:
    """Return where each of these records of data.train stands, by its index."""
    last = max(records, default=-1)
    reached = itertools.takewhile(lambda place: place[0] <= last, _places(data))
    return {record: place for record, place in reached if record in records}


def _places(data: DataConfig) -> Iterator[tuple[int, str]]:
    """Yield each record of data.train, by its index, and where it stands: its file and line."""
    for chunk in read_records({"train": find_sources(data)["train"]}):
        for i in range(len(chunk.numbers)):
            yield chunk.first_record + i, chunk.place(i)


def picture(tokenizer: Any, tokens: list[int], trained: list[bool]) -> str:
    """Return the tokens with a stroke between them; each trained run is coloured or bracketed."""
    has_colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    begin, end = _COLOURED if has_colour else _BRACKETED
    runs = []
    pairs = zip(tokens, trained, strict=True)
    for is_trained, run in itertools.groupby(pairs, key=lambda pair: pair[1]):
        text = _BETWEEN_TOKENS.join(_texts(tokenizer, [token for token, _ in run]))
        runs.append(begin + text + end if is_trained else text)
    return "".join(runs)


def _texts(tokenizer: Any, tokens: Iterable[int]) -> Iterator[str]:
    """Yield the texts of tokens, with everything visible that a terminal would not show.

    Tokens of which each has a part of a character are joined.
    """
    parts: list[int] = []
    for token in tokens:
        parts.append(token)
        text = tokenizer.decode(
            parts, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        if "\ufffd" in text and len(parts) < _BYTES_OF_A_CHARACTER:
            continue
        yield _visible(text, str(tokenizer.convert_ids_to_tokens(parts[0])))
        parts = []
    yield from (_visible("", str(tokenizer.convert_ids_to_tokens(token))) for token in parts)


def _visible(text: str, entry: str) -> str:
    """Return a text, or the vocabulary's `entry` where there is none."""
    if entry.startswith("▁") and not text.startswith(" "):
        text = f" {text}"  # decoding drops the blank at the start of a text
    return "".join(
        "⏎\n" if c == "\n" else c if c.isprintable() else c.encode("unicode_escape").decode()
        for c in text or entry
    )


def _spread(name: str, values: npt.NDArray[np.int32]) -> str:
    return (
        f"data.train: {name} in a sequence: min {values.min()}, median {np.median(values):g}, "
        f"mean {values.mean():.1f}, 95% {np.percentile(values, 95):g}, max {values.max()}"
    )
