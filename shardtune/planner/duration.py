"""How long a run is: its steps, from its data where this machine has it."""

from __future__ import annotations

import datetime
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardtune.config import Config
from shardtune.data.dataset import build_encoder, find_sources
from shardtune.data.outcomes import BrokenRecords
from shardtune.data.packing import best_fit
from shardtune.data.sources import Source, read_records
from shardtune.data.tokenize import ChunkTokenizer
from shardtune.distributed.layout import Layout
from shardtune.errors import UserError

_SAMPLE_BYTES = 1 << 20  # of each source's text; to tokenize them takes a second or two
_COUNTED_BYTES = 2 << 20  # of its files, for the share of the sample in all text


@dataclass(frozen=True)
class RunLength:
    """The steps of a run and the tokens of all of them, estimated unless `is_counted`."""

    steps: int
    tokens: int
    is_counted: bool


def run_length(config: Config, layout: Layout) -> RunLength | str:
    """Return the length of a run, or why it is not known.

    The beginning of each source is tokenized, and stands for the rest.
    """
    specs = [source.path for source in config.data.train_sources.values()]
    if missing := [spec for spec in specs if not Path(spec).exists()]:
        return f"data.train={missing[0]} is not on this machine"
    try:
        rows, tokens, is_counted = _rows_and_tokens(config)
    except UserError as error:  # the run says so too; memory can be planned all the same
        return error.problems[0]
    if not rows:
        return f"data.train={', '.join(specs)} has nothing to train"
    train = config.train
    steps_per_epoch = max(1, -(-round(rows) // layout.rows_per_step))
    steps = min(train.epochs * steps_per_epoch, train.max_steps or train.epochs * steps_per_epoch)
    return RunLength(steps, round(tokens * steps / steps_per_epoch), is_counted)


def _rows_and_tokens(config: Config) -> tuple[float, float, bool]:
    """Return rows and tokens of an epoch, and whether both are exact.

    Raises:
        UserError: the tokenizer is missing, or it cannot read the data.
    """
    encoder = build_encoder(config.model.path, config.data, datetime.date.today())
    tokenizer = ChunkTokenizer(encoder, config.data)
    sources = find_sources(config.data)["train"]
    rows, tokens, is_counted = 0.0, 0.0, True
    weights = [source.weight for source in config.data.train_sources.values()]
    for source, weight in zip(sources, weights, strict=True):
        lengths, share = _sample(source, tokenizer)
        is_counted = is_counted and share == 1
        n_rows = len(lengths)
        if config.data.packing and n_rows:
            n_rows = best_fit(lengths, config.data.max_length)[1]
        rows += weight * n_rows / share
        tokens += weight * float(lengths.sum()) / share
    return rows, tokens, is_counted


def _sample(source: Source, tokenizer: ChunkTokenizer) -> tuple[np.ndarray, float]:
    """Tokenize the beginning of a source; return the tokens of each sequence and the share read.

    Raises:
        UserError: its beginning has broken records, with which a run is refused.
    """
    lengths: list[int] = []
    n_bytes = n_records = text_bytes = 0
    sampled_bytes = sampled_text_bytes = 0
    for chunk in read_records({"train": [source]}):
        n_bytes += chunk.n_bytes
        text_bytes += chunk.text_bytes
        if sampled_text_bytes >= _SAMPLE_BYTES:
            # Compressed bytes are read in large pieces: few of them do not tell a share.
            if n_bytes < _COUNTED_BYTES and not chunk.is_table:
                continue
            share = sampled_text_bytes / text_bytes * min(1.0, n_bytes / source.n_bytes)
            if chunk.is_table:  # whose bytes are those of so many rows
                share = sampled_bytes / source.n_bytes
            share = max(share, n_records / (source.max_records or math.inf))
            return np.array(lengths, np.int64), share
        n_records += len(chunk.numbers)
        sampled_bytes, sampled_text_bytes = n_bytes, text_bytes
        tokenized = tokenizer.tokenize(chunk)
        broken = BrokenRecords()
        for each in tokenized.broken:
            broken.add(each)
        # Whether those that are dropped are too many shows at the end of the source.
        if broken.end_files or (broken.count and not tokenizer.data.most_broken):
            raise UserError(*broken.lines())
        lengths += [len(ids) for ids, *_ in tokenized.sets["train"].sequences]
    return np.array(lengths, np.int64), sampled_text_bytes / text_bytes if text_bytes else 1.0
