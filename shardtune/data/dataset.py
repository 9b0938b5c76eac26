"""The token sequences of a run: tokenized once a node, cached, and memory-mapped by all ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from tqdm import tqdm
from transformers import AutoTokenizer

from shardtune.config import DataConfig
from shardtune.data.cache import build_entry, cache_key, cache_root, read_meta
from shardtune.data.chat_encoder import ChatEncoder, stop_token_ids
from shardtune.data.hub import hub_problem
from shardtune.data.sources import Source, find_source
from shardtune.data.tokenize import (
    ChunkSequences,
    ChunkTokenizer,
    TokenizedChunk,
    tokenize_chunks,
)
from shardtune.errors import UserError, all_of, first_few, first_line
from shardtune.log import logger

# One file for each column of a set; tokens and trained flags stand end to end.
_COLUMNS: dict[str, type[np.generic]] = {
    "tokens": np.uint32,
    "trained": np.bool_,
    "starts": np.int64,
    "lengths": np.int32,
    "trained_counts": np.int32,
    "record": np.int64,
}
_NAMED_PROBLEMS = 10
_LOG_EVERY_S = 10.0


@dataclass(frozen=True)
class DataSummary:
    """Counts of the records and tokens of one set, before packing.

    `lost_tokens`, `lost_trained_tokens`: of sequences longer than `max_length`, in no piece of
    them. `repeated_tokens`: context at the start of a piece. `added_tokens`: by the sequences that
    rewritten history needs.
    """

    name: str
    max_length: int
    overflow: str
    records: int = 0
    sequences: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    untrained_records: int = 0
    long_sequences: int = 0
    lost_records: int = 0
    lost_tokens: int = 0
    lost_trained_tokens: int = 0
    repeated_tokens: int = 0
    rewritten_records: int = 0
    added_tokens: int = 0
    appended_stops: int = 0
    notes: dict[str, int] = field(default_factory=dict)
    unread_fields: dict[str, int] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Return sentences for the user, one for each kind of thing that happened."""
        sequences = _count(self.sequences, "sequence")
        lines = [
            _count(self.records, "record")
            + (f" in {sequences}" if self.sequences != self.records else "")
            + f", {_count(self.tokens, 'token')}, {self.trained_tokens} of them trained"
        ]
        if self.untrained_records:
            lines.append(
                f"WARNING: {_count(self.untrained_records, 'record')} without a token to train, "
                "dropped"
            )
        if self.long_sequences:
            done = {"truncate": "truncated", "split": "split", "drop": "dropped"}[self.overflow]
            line = (
                f"{_count(self.long_sequences, 'sequence')} longer than "
                f"data.max_length={self.max_length}, {done} (data.overflow={self.overflow}): "
                f"{_count(self.lost_tokens, 'token')} lost, {self.lost_trained_tokens} of them "
                "trained"
            )
            if self.lost_records:
                line += f"; {_count(self.lost_records, 'record')} lost whole"
            if self.repeated_tokens:
                line += f"; {self.repeated_tokens} repeated as context"
            lines.append(line)
        if self.rewritten_records:
            lines.append(
                f"the template rewrites earlier turns of {_count(self.rewritten_records, 'record')}"
                f": each turn becomes a sequence, {_count(self.added_tokens, 'token')} more"
            )
        if self.appended_stops:
            lines.append(f"end token appended to {_count(self.appended_stops, 'record')} without")
        lines += [f"{note} ({_count(n, 'record')})" for note, n in self.notes.items()]
        if self.unread_fields:
            names = [f"{name} ({_count(n, 'record')})" for name, n in self.unread_fields.items()]
            lines.append(f"fields that nothing reads: {', '.join(names)}")
        return [f"{self.name}: {line}" for line in lines]

    def problems(self) -> list[str]:
        """Return why there is nothing to train, if there is nothing."""
        if self.sequences:
            return []
        if not self.records:
            return [
                f"{self.name}: data.eval_fraction leaves no record to it - "
                "change the fraction or name data.eval"
            ]
        return [
            f"{self.name}: no token to train in {_count(self.records, 'record')} "
            f"({self.untrained_records} have none, {self.lost_records} lost all of them to "
            f"data.max_length={self.max_length} with data.overflow={self.overflow}) - "
            "write records with assistant turns, or raise data.max_length"
        ]


class TokenDataset:
    """The sequences of one set, memory-mapped.

    `lengths`, `trained_counts`: int32 [sequences], tokens and trained tokens of each. `record`:
    int64 [sequences], the index of its record in the source, which does not decrease.
    """

    def __init__(self, folder: Path, name: str) -> None:
        columns = {c: _map(folder / f"{name}.{c}", dtype) for c, dtype in _COLUMNS.items()}
        self._tokens, self._trained = columns["tokens"], columns["trained"]
        self._starts, self.record = columns["starts"], columns["record"]
        self.lengths, self.trained_counts = columns["lengths"], columns["trained_counts"]

    def __len__(self) -> int:
        return len(self.lengths)

    def largest_token(self) -> int:
        return int(self._tokens.max())

    def __getitem__(self, i: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return copies of token ids int64 [length] and trained flags bool [length].

        Raises:
            IndexError: no such sequence.
        """
        start = self._starts[i]
        stop = start + self.lengths[i]
        return self._tokens[start:stop].astype(np.int64), self._trained[start:stop].copy()


@dataclass(frozen=True)
class PreparedData:
    """The sets of a run. `key`: a digest of their tokens and trained flags, and nothing else."""

    train: TokenDataset
    eval: TokenDataset | None
    train_summary: DataSummary
    eval_summary: DataSummary | None
    key: str

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence of any set."""
        return max(int(tokens.lengths.max()) for tokens in self._sets())

    def require_vocabulary(self, tokenizer: Any, vocabulary: int) -> None:
        """Raise UserError when a token is not among the `vocabulary` ids that the model knows."""
        if max(tokenizer.get_vocab().values()) < vocabulary:
            return
        largest = max(tokens.largest_token() for tokens in self._sets())
        if largest >= vocabulary:
            raise UserError(
                f"the data has the token {largest} ({tokenizer.convert_ids_to_tokens(largest)!r}) "
                f"and the model a vocabulary of {vocabulary} - "
                "use the tokenizer that belongs to the model"
            )

    def lines(self) -> list[str]:
        return self.train_summary.lines() + (self.eval_summary.lines() if self.eval_summary else [])

    def _sets(self) -> list[TokenDataset]:
        return [tokens for tokens in (self.train, self.eval) if tokens is not None]


def build_encoder(model_path: str, data: DataConfig, date: datetime.date) -> ChatEncoder:
    """Return the encoder of a model's tokenizer; templates that print today's date get `date`.

    Raises:
        UserError: there is no tokenizer, or its stop tokens are unknown.
    """
    if not Path(model_path).is_dir():
        hub_problem()  # where the hub cannot be reached, its cache is read without retries
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path)
        stops = stop_token_ids(tokenizer, model_path)
        name = f"the chat template of {model_path}"
        return ChatEncoder(tokenizer, stops, data.loss_on, date, template_name=name)
    except UserError:
        raise
    except Exception as error:  # tokenizers raises nothing more specific
        raise UserError(
            f"model.path={model_path}: no tokenizer and configuration that transformers can read "
            f"({first_line(error)}) - name a hub id or a directory with tokenizer.json, "
            "tokenizer_config.json and config.json"
        ) from error


def find_sources(data: DataConfig) -> dict[str, Source]:
    """Return the source of each set that `data` names.

    Raises:
        UserError: with a problem for each source that is not there.
    """
    specs = {"train": data.train} | ({"eval": data.eval} if data.eval is not None else {})
    sources = all_of(*(partial(find_source, f"data.{name}", spec) for name, spec in specs.items()))
    return dict(zip(specs, sources, strict=True))


def prepare_data(data: DataConfig, encoder: ChatEncoder) -> Path:
    """Tokenize `data` unless the cache has it; returns the entry for `open_prepared`.

    One process per node calls this. Large data starts worker processes, which import the main
    module anew.

    Raises:
        UserError: no such source, broken records (ten are named), nothing to train, or the cache
            cannot be written.
    """
    started = time.monotonic()
    sources = find_sources(data)
    for source in sources.values():
        if source.ignored:
            names = first_few(source.ignored, 10)
            logger.info(f"{source.name}: ignored (not .json, .jsonl, .parquet): {names}")
    entry = cache_root() / cache_key(sources, data, encoder)
    if read_meta(entry) is not None:
        logger.info(f"Data: cached in {entry}")
        return entry
    if entry.exists():
        logger.info(f"Data: {entry} is damaged, building it again")
    tokenizer = ChunkTokenizer(encoder, data)
    try:
        build_entry(entry, lambda folder: _build(folder, sources, tokenizer))
    except OSError as error:
        raise UserError(
            f"{entry.parent}: the data cache cannot be written ({error.strerror}) - make room and "
            "allow writing there, or name another directory in SHARDTUNE_CACHE"
        ) from error
    logger.info(f"Data: tokenized in {time.monotonic() - started:.1f} s, cached in {entry}")
    return entry


def open_prepared(entry: Path) -> PreparedData:
    """Map an entry that `prepare_data` returned; any number of processes may."""
    meta = json.loads((entry / "meta.json").read_text(encoding="utf-8"))
    summaries = {name: DataSummary(**summary) for name, summary in meta["summaries"].items()}
    return PreparedData(
        TokenDataset(entry, "train"),
        TokenDataset(entry, "eval") if "eval" in summaries else None,
        summaries["train"],
        summaries.get("eval"),
        meta["key"],
    )


class _SetWriter:
    """Appends the sequences of one set to its files and sums their counts."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self._files = {column: (folder / f"{name}.{column}").open("xb") for column in _COLUMNS}
        self._digests = {column: xxhash.xxh3_128() for column in ("tokens", "trained", "lengths")}
        self._counts: Counter[str] = Counter()
        self._notes: Counter[str] = Counter()
        self.unread_fields: Counter[str] = Counter()

    def add(self, chunk: ChunkSequences) -> None:
        if chunk.sequences:
            tokens, trained, record = zip(*chunk.sequences, strict=True)
            lengths = np.array([len(ids) for ids in tokens])
            columns = {
                "tokens": np.concatenate(tokens),
                "trained": np.concatenate(trained),
                "starts": self._counts["tokens"] + lengths.cumsum() - lengths,
                "lengths": lengths,
                "trained_counts": [flags.sum() for flags in trained],
                "record": record,
            }
            for column, dtype in _COLUMNS.items():
                values = np.asarray(columns[column], dtype).tobytes()
                self._files[column].write(values)
                if column in self._digests:
                    self._digests[column].update(values)
        self._counts += chunk.counts
        self._notes += chunk.notes

    def digest(self) -> str:
        return " ".join(digest.hexdigest() for digest in self._digests.values())

    def summary(self, tokenizer: ChunkTokenizer) -> DataSummary:
        template_name = tokenizer.encoder.template.name
        return DataSummary(
            name=f"data.{self.name}",
            max_length=tokenizer.data.max_length,
            overflow=tokenizer.data.overflow,
            notes={
                n.replace(template_name, "the chat template"): c for n, c in self._notes.items()
            },
            unread_fields=dict(self.unread_fields),
            **self._counts,
        )

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _build(folder: Path, sources: dict[str, Source], tokenizer: ChunkTokenizer) -> dict[str, Any]:
    """Write the columns of every set into `folder`; returns key and summaries.

    Raises:
        UserError: broken records, no record, nothing to train.
    """
    has_eval = "eval" in sources or tokenizer.data.eval_fraction
    names = ["train", "eval"] if has_eval else ["train"]
    writers = {name: _SetWriter(folder, name) for name in names}
    problems: list[str] = []
    try:
        with _Progress(sum(source.n_bytes for source in sources.values())) as progress:
            for name, source in sources.items():
                chunks = tokenize_chunks(tokenizer, source.chunks(name))
                with contextlib.closing(chunks):
                    problems += _write(name, source, progress.over(chunks), writers)
    finally:
        for writer in writers.values():
            writer.close()
    summaries = {name: writer.summary(tokenizer) for name, writer in writers.items()}
    if not problems:
        problems = [problem for summary in summaries.values() for problem in summary.problems()]
    if problems:
        raise UserError(*problems)
    digests = " ".join(writer.digest() for writer in writers.values())
    return {
        "key": xxhash.xxh3_128_hexdigest(digests.encode()),
        "summaries": {name: dataclasses.asdict(summary) for name, summary in summaries.items()},
    }


def _write(
    name: str, source: Source, chunks: Iterator[TokenizedChunk], writers: dict[str, _SetWriter]
) -> list[str]:
    """Write the chunks of one source; returns the problems of its records."""
    n_records = n_broken = 0
    problems: list[str] = []
    for chunk in chunks:
        n_records += chunk.n_records
        n_broken += len(chunk.problems)
        problems += chunk.problems[: _NAMED_PROBLEMS - len(problems)]
        writers[name].unread_fields += chunk.unread_fields
        for set_name, sequences in chunk.sets.items():
            writers[set_name].add(sequences)
    if n_broken:
        share = f"{n_broken} of {_count(n_records, 'record')}"
        problems.append(f"data.{name}: {share} broken - repair or remove them")
    elif not n_records:
        problems.append(f"{source.name}: no record in it - name data that has some")
    return problems


class _Progress:
    """A bar on a terminal, else a line in the log now and then."""

    def __init__(self, n_bytes: int) -> None:
        self._n_bytes, self._done_bytes, self._n_records = n_bytes, 0, 0
        self._logged_at = time.monotonic()

    def __enter__(self) -> _Progress:
        is_terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=self._n_bytes, desc="Data", unit="B", unit_scale=True, disable=not is_terminal
        )
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()

    def over(self, chunks: Iterator[TokenizedChunk]) -> Iterator[TokenizedChunk]:
        for chunk in chunks:
            self._done_bytes += chunk.n_bytes
            self._n_records += chunk.n_records
            self._bar.update(chunk.n_bytes)
            if self._bar.disable and time.monotonic() - self._logged_at >= _LOG_EVERY_S:
                self._logged_at = time.monotonic()
                percent = 100 * self._done_bytes // max(1, self._n_bytes)
                logger.info(f"Data: {self._n_records} records tokenized, {percent}% of the data")
            yield chunk


def _map(file: Path, dtype: type[np.generic]) -> npt.NDArray[Any]:
    if not file.stat().st_size:
        return np.empty(0, dtype)  # mmap rejects an empty file
    return np.memmap(file, dtype, mode="r").view(np.ndarray)


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
