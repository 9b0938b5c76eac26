"""Estimate the steps and tokens of a run from its data, where this machine has it."""

import datetime
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shardtune.config import Config
from shardtune.data.dataset import TokenDataset, build_encoder, find_sources
from shardtune.data.order import best_fit
from shardtune.data.refusal import BrokenRecords
from shardtune.data.schedule import Position, Schedule, source_weights
from shardtune.data.sources import Source, read_records
from shardtune.data.tokenize import ChunkTokenizer
from shardtune.distributed.layout import Layout
from shardtune.errors import UserError

_SAMPLE_BYTES = 1 << 20  # text of each source, tokenized in a second or two
_COUNTED_BYTES = 2 << 20  # read of a source's files, to tell the sample's share


@dataclass(frozen=True)
class RunLength:
    """The steps of a run and the tokens of all of them, estimated unless `is_counted`."""

    steps: int
    tokens: int
    is_counted: bool


def run_length(config: Config, layout: Layout, tokens: float | None = None) -> RunLength | str:
    """Return the length of a run, or why it is not known.

    The beginning of each source is tokenized, and stands for the rest. `tokens`: those to train
    instead, in full rows.
    """
    if tokens:
        steps = math.ceil(tokens / (layout.rows_per_step * layout.max_length))
        return RunLength(steps, round(tokens), is_counted=True)
    specs = [source.path for source in config.data.train_sources.values()]
    if missing := [spec for spec in specs if not Path(spec).exists()]:
        return f"data.train={missing[0]} is not on this machine"
    try:
        samples = _samples(config)
    except UserError as error:  # the run says so too; memory can be planned all the same
        return error.problems[0]
    empty = [spec for spec, sample in zip(specs, samples, strict=True) if not len(sample.lengths)]
    if empty:
        return f"data.train={', '.join(empty)} has nothing to train"
    weights, data, train = source_weights(config.data), config.data, config.train
    if all(sample.share == 1 for sample in samples):
        settings = data.max_length, data.packing, config.run.seed, layout.rows_per_step
        ends = train.epochs, train.max_steps
        schedule = Schedule(_Lengths(samples), *settings, *ends, Position(), weights)
        steps, steps_per_epoch = schedule.total_steps, schedule.steps_per_epoch
        if not steps:
            return f"data.train={', '.join(specs)} has nothing to train"
        n_tokens = float(schedule.dataset.lengths[schedule.first_epoch].sum())
        return RunLength(steps, round(n_tokens * steps / steps_per_epoch), is_counted=True)
    rows = n_tokens = 0.0
    for (lengths, _, share), weight in zip(samples, map(float, weights), strict=True):
        n_rows = best_fit(lengths, data.max_length)[1] if data.packing else len(lengths)
        rows += weight * n_rows / share
        n_tokens += weight * float(lengths.sum()) / share
    steps_per_epoch = max(1, -(-round(rows) // layout.rows_per_step))
    steps = min(train.epochs * steps_per_epoch, train.max_steps or sys.maxsize)
    return RunLength(steps, round(n_tokens * steps / steps_per_epoch), is_counted=False)


class _Sample(NamedTuple):
    lengths: np.ndarray  # tokens of each sequence
    records: np.ndarray  # the number of each sequence's record
    share: float  # the tokenized share of the source


class _Lengths(TokenDataset):
    """A dataset of lengths alone, which is all that a schedule reads."""

    def __init__(self, samples: Sequence[_Sample]) -> None:
        self.lengths = np.concatenate([sample.lengths for sample in samples])
        self.trained_counts = self.trained_weights = self.lengths
        sources = [np.full(len(sample.lengths), n) for n, sample in enumerate(samples)]
        self.source = np.concatenate(sources)
        begins = [np.diff(sample.records, prepend=-1) != 0 for sample in samples]
        self.record = np.cumsum(np.concatenate(begins)) - 1


def _samples(config: Config) -> list[_Sample]:
    """Tokenize the beginning of each source.

    Raises:
        UserError: the tokenizer is missing, or it cannot read the data.
    """
    encoder = build_encoder(config.model, config.data, datetime.date.today())
    tokenizer = ChunkTokenizer(encoder, config.data)
    return [_sample(source, tokenizer) for source in find_sources(config.data)["train"]]


def _sample(source: Source, tokenizer: ChunkTokenizer) -> _Sample:
    """Tokenize the beginning of a source.

    Raises:
        UserError: the beginning has broken records that a run refuses.
    """
    sequences: list[tuple[int, int]] = []  # tokens, and the number of the record
    n_bytes = n_records = text_bytes = 0
    sampled_bytes = sampled_text_bytes = 0
    for chunk in read_records({"train": [source]}):
        n_bytes += chunk.n_bytes
        text_bytes += chunk.text_bytes
        if sampled_text_bytes >= _SAMPLE_BYTES:
            # Compressed files are read in large pieces, and a few pieces do not tell the share.
            if n_bytes < _COUNTED_BYTES and not chunk.is_table:
                continue
            share = sampled_text_bytes / text_bytes * min(1.0, n_bytes / source.n_bytes)
            if chunk.is_table:  # its bytes are counted by rows, exactly
                share = sampled_bytes / source.n_bytes
            share = max(share, n_records / (source.max_records or math.inf))
            break
        n_records += len(chunk.numbers)
        sampled_bytes, sampled_text_bytes = n_bytes, text_bytes
        tokenized = tokenizer.tokenize(chunk)
        broken = BrokenRecords()
        for error in tokenized.broken:
            broken.add(error)
        # Only at the end of a source is it known whether too many records are dropped.
        if broken.end_files or (broken.count and not tokenizer.data.most_broken):
            raise UserError(*broken.lines())
        sequences += [(len(ids), n) for ids, _, n in tokenized.sets["train"].sequences]
    else:
        share = sampled_text_bytes / text_bytes if text_bytes else 1.0
    lengths, records = np.array(sequences, np.int64).reshape(-1, 2).T
    return _Sample(lengths, records, share)
