"""The token sequences of a run: made once per node from the records, cached by content, memory-mapped by everyone.

A cache entry is a directory of flat arrays, one file for each column of a set, and a `meta.json` with their sizes and
the summary. It is built under a hidden name beside its place and published by one rename, so that it is either whole
or absent, whoever else builds it at the same time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import importlib.metadata
import json
import os
import shutil
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from tqdm import tqdm
from transformers import AutoTokenizer

from shardtune.config import DataConfig
from shardtune.data import chat_encoder as chat
from shardtune.data import chat_template as conversation
from shardtune.data import messages as message
from shardtune.data import records
from shardtune.data import tokenize as tokenise
from shardtune.data.chat_encoder import ChatEncoder, stop_token_ids
from shardtune.data.records import Source, find_source, first_line
from shardtune.data.tokenize import COLUMNS, EncodedChunk, Part, Tokeniser, encode_chunks
from shardtune.errors import UserError

_FILES: dict[str, type[np.generic]] = {**COLUMNS, "starts": np.int64}
_NAMED_PROBLEMS = 10
_SAY_EVERY_S = 10.0
_ABANDONED_AFTER_S = 24 * 3600.0


@dataclass(frozen=True)
class DataSummary:
    """What became of the records of one set; tokens are those before packing.

    `lost_tokens`, `lost_trained_tokens`: in sequences longer than `max_length`, kept in no piece of them;
    `repeated_tokens`: context at the start of a piece. `added_tokens`: by the sequences that rewritten history needs.
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
        """Sentences for people, one for each kind of thing that happened."""
        said = [
            f"{_many(self.records, 'record')}, {_many(self.sequences, 'sequence')}, "
            f"{_many(self.tokens, 'token')}, {self.trained_tokens} of them trained"
        ]
        if self.untrained_records:
            said.append(
                f"WARNING: {_many(self.untrained_records, 'record')} without a token to train, dropped"
            )
        if self.long_sequences:
            done = {"truncate": "truncated", "split": "split", "drop": "dropped"}[self.overflow]
            said.append(
                f"{_many(self.long_sequences, 'sequence')} longer than data.max_length={self.max_length}, "
                f"{done} (data.overflow={self.overflow}): {_many(self.lost_tokens, 'token')} lost, "
                f"{self.lost_trained_tokens} of them trained; {_many(self.lost_records, 'record')} lost whole"
                + f"; {self.repeated_tokens} repeated as context"
                * (self.overflow == "split")
            )
        if self.rewritten_records:
            said.append(
                f"the template rewrites earlier turns of {_many(self.rewritten_records, 'record')}: one sequence "
                f"for each of their trained turns, {_many(self.added_tokens, 'token')} more"
            )
        if self.appended_stops:
            said.append(
                f"end token appended to {_many(self.appended_stops, 'record')} whose text has none"
            )
        said += [f"{note} ({_many(count, 'record')})" for note, count in self.notes.items()]
        if self.unread_fields:
            named = ", ".join(
                f"{name} ({_many(count, 'record')})" for name, count in self.unread_fields.items()
            )
            said.append(f"fields that nothing reads: {named}")
        return [f"{self.name}: {sentence}" for sentence in said]


class TokenDataset:
    """The sequences of one set, memory-mapped.

    `lengths`, `trained_counts`: int32 [sequences], tokens and trained tokens of each. `record`: int64 [sequences], the
    index of its record in the source, not decreasing.
    """

    def __init__(self, folder: Path, name: str) -> None:
        columns = {
            column: _mapped(folder / f"{name}.{column}", dtype) for column, dtype in _FILES.items()
        }
        self._tokens, self._trained, self._starts = (
            columns["tokens"],
            columns["trained"],
            columns["starts"],
        )
        self.lengths, self.trained_counts = columns["lengths"], columns["trained_counts"]
        self.record = columns["record"]

    def __len__(self) -> int:
        return len(self.lengths)

    def largest_token(self) -> int:
        return int(self._tokens.max())

    def __getitem__(self, i: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Token ids int64 [length] and trained flags bool [length] of sequence `i`, copies both.

        Raises:
            IndexError: no such sequence.
        """
        start = self._starts[i]
        stop = start + self.lengths[i]
        return self._tokens[start:stop].astype(np.int64), self._trained[start:stop].copy()


@dataclass(frozen=True)
class PreparedData:
    """`key`: digest of the tokens of all sets and of which are trained, whatever they were made from."""

    train: TokenDataset
    eval: TokenDataset | None
    train_summary: DataSummary
    eval_summary: DataSummary | None
    key: str

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence of any set."""
        return max(
            int(tokens.lengths.max()) for tokens in (self.train, self.eval) if tokens is not None
        )

    def require_vocabulary(self, tokenizer: Any, vocabulary: int) -> None:
        """Raises Refused when a token is not among the `vocabulary` ids that the model knows."""
        if max(tokenizer.get_vocab().values()) < vocabulary:
            return
        largest = max(
            tokens.largest_token() for tokens in (self.train, self.eval) if tokens is not None
        )
        if largest >= vocabulary:
            raise UserError(
                f"the data has the token {largest} ({tokenizer.convert_ids_to_tokens(largest)!r}) and the model a "
                f"vocabulary of {vocabulary} - use the tokenizer that belongs to the model"
            )

    def lines(self) -> list[str]:
        return self.train_summary.lines() + (self.eval_summary.lines() if self.eval_summary else [])


def build_encoder(model_path: str, data: DataConfig, date: datetime.date) -> ChatEncoder:
    """The encoder of a model's tokenizer; `date` is what templates that print today's date get.

    Raises:
        UserError: no tokenizer there, or one whose stop tokens are unknown.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path)
        stops = stop_token_ids(tokenizer, model_path)
    except UserError:
        raise
    except Exception as error:  # tokenizers raises nothing else
        raise UserError(
            f"model.path={model_path}: no tokenizer and configuration that transformers can read "
            f"({first_line(error)}) - name a hub id or a directory with tokenizer.json, "
            "tokenizer_config.json and config.json"
        ) from error
    return ChatEncoder(
        tokenizer, stops, data.loss_on, date, template_name=f"the chat template of {model_path}"
    )


def require_sources(data: DataConfig) -> None:
    """Raises Refused when a file or directory that `data` names is not there."""
    _find_sources(data, lambda line: None)


def prepare_data(data: DataConfig, encoder: ChatEncoder, say: Callable[[str], None]) -> Path:
    """Tokenise `data` unless the cache has it; returns the entry for `open_prepared`. One process per node calls this.

    The cache is `$SHARDTUNE_CACHE`, else `~/.cache/shardtune`. Large data starts worker processes, which import the
    main module anew.

    Raises:
        UserError: no such source, broken records (the first ten and their number), nothing to train, unwritable cache.
    """
    started = time.monotonic()
    sources = _find_sources(data, say)
    root = Path(os.environ.get("SHARDTUNE_CACHE") or "~/.cache/shardtune").expanduser() / "data"
    entry = root / _cache_key(sources, data, encoder)
    if _is_intact(entry):
        say(f"Data: cached in {entry}")
        return entry
    if entry.exists():
        say(f"Data: {entry} is damaged, building it again")
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(root)
        folder = _hidden_sibling(entry)
        folder.mkdir()
        try:
            _build(folder, sources, Tokeniser(encoder, data), say)
            _publish(folder, entry)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"{root}: the data cache cannot be written ({error.strerror}) - make room and allow writing "
            "there, or name another directory in SHARDTUNE_CACHE"
        ) from error
    say(f"Data: tokenised in {time.monotonic() - started:.1f} s, cached in {entry}")
    return entry


def open_prepared(path: Path) -> PreparedData:
    """Map an entry that `prepare_data` returned; any number of processes may."""
    meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
    summaries = {name: DataSummary(**summary) for name, summary in meta["summaries"].items()}
    return PreparedData(
        TokenDataset(path, "train"),
        TokenDataset(path, "eval") if "eval" in summaries else None,
        summaries["train"],
        summaries.get("eval"),
        meta["key"],
    )


class _Writer:
    """Appends the parts of one set to its files, one for each column, and sums their counts."""

    def __init__(self, folder: Path, name: str) -> None:
        self._files = {column: (folder / f"{name}.{column}").open("xb") for column in _FILES}
        self._digests = {column: xxhash.xxh3_128() for column in ("tokens", "trained", "lengths")}
        self.counts: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self.unread_fields: Counter[str] = Counter()

    def add(self, part: Part) -> None:
        lengths = part.columns["lengths"].astype(np.int64)
        starts = self.counts["tokens"] + lengths.cumsum() - lengths
        for column, file in self._files.items():
            values = memoryview(starts if column == "starts" else part.columns[column])
            file.write(values)
            if column in self._digests:
                self._digests[column].update(values)
        self.counts += part.counts
        self.notes += part.notes

    def digest(self) -> str:
        return " ".join(digest.hexdigest() for digest in self._digests.values())

    def close(self) -> None:
        """Everything is on the disk when this returns: only then may the entry be published."""
        for file in self._files.values():
            with file:
                file.flush()
                os.fsync(file.fileno())


def _find_sources(data: DataConfig, say: Callable[[str], None]) -> dict[str, Source]:
    sources, problems = {}, []
    for name, spec in {"train": data.train, "eval": data.eval}.items():
        if spec is not None:
            try:
                sources[name] = find_source(f"data.{name}", spec, say)
            except UserError as refused:
                problems += refused.problems
    if problems:
        raise UserError(*problems)
    return sources


def _cache_key(sources: dict[str, Source], data: DataConfig, encoder: ChatEncoder) -> str:
    """Digest of everything that an entry depends on: 32 hexadecimal digits.

    Raises:
        UserError: a data file cannot be read.
    """
    tokenizer = encoder.tokenizer
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    # Calls set these two; ours ask for neither.
    backend.update(truncation=None, padding=None)
    parts = {
        "sources": {name: source.digest() for name, source in sources.items()},
        "data": [
            data.loss_on,
            data.max_length,
            data.overflow,
            0.0 if data.eval else data.eval_fraction,
        ],
        "tokenizer": [
            backend,
            tokenizer.special_tokens_map,
            tokenizer.chat_template,
            encoder.stop_token_ids,
        ],
        "date": str(encoder.template.date) if encoder.template.uses_date else "",
        "code": [
            Path(str(module.__file__)).read_text(encoding="utf-8")
            for module in (chat, conversation, message, records, tokenise)
        ]
        + [Path(__file__).read_text(encoding="utf-8")],
        "versions": [
            importlib.metadata.version(name) for name in ("transformers", "tokenizers", "jinja2")
        ],
    }
    return xxhash.xxh3_128_hexdigest(json.dumps(parts, sort_keys=True, default=str).encode())


def _build(
    folder: Path, sources: dict[str, Source], tokeniser: Tokeniser, say: Callable[[str], None]
) -> None:
    """Fill `folder` with the columns of every set and `meta.json`.

    Raises:
        UserError: broken records, no record, nothing to train.
    """
    data = tokeniser.data
    names = ["train", "eval"] if "eval" in sources or data.eval_fraction else ["train"]
    writers = {name: _Writer(folder, name) for name in names}
    problems: list[str] = []
    try:
        with _Progress(sum(source.n_bytes for source in sources.values()), say) as progress:
            for name, source in sources.items():
                with contextlib.closing(encode_chunks(tokeniser, source.chunks(name))) as chunks:
                    problems += _write(name, map(progress.note, chunks), writers)
    finally:
        for writer in writers.values():
            writer.close()
    summaries = {
        name: DataSummary(
            name=f"data.{name}",
            max_length=data.max_length,
            overflow=data.overflow,
            notes={
                note.replace(tokeniser.encoder.template.name, "the chat template"): n
                for note, n in w.notes.items()
            },
            unread_fields=dict(w.unread_fields),
            **w.counts,
        )
        for name, w in writers.items()
    }
    problems = problems or [
        problem for summary in summaries.values() for problem in _nothing_to_train(summary)
    ]
    if problems:
        raise UserError(*problems)
    files = {file.name: file.stat().st_size for file in folder.iterdir()}
    key = xxhash.xxh3_128_hexdigest(
        " ".join(writer.digest() for writer in writers.values()).encode()
    )
    meta = {
        "key": key,
        "files": files,
        "summaries": {n: dataclasses.asdict(s) for n, s in summaries.items()},
    }
    with (folder / "meta.json").open("x", encoding="utf-8") as file:
        json.dump(meta, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _write(name: str, results: Iterator[EncodedChunk], writers: dict[str, _Writer]) -> list[str]:
    """Write the results of the source `name`; returns what is wrong with its records."""
    n_records = n_broken = 0
    problems: list[str] = []
    for result in results:
        n_records += result.n_records
        n_broken += len(result.problems)
        problems += result.problems[: _NAMED_PROBLEMS - len(problems)]
        writers[name].unread_fields += result.unread_fields
        for set_name, part in result.parts.items():
            writers[set_name].add(part)
    if n_broken:
        problems.append(
            f"data.{name}: {n_broken} of {_many(n_records, 'record')} broken - repair or remove them"
        )
    elif not n_records:
        problems.append(f"data.{name}: no record in it - name data that has some")
    return problems


def _nothing_to_train(summary: DataSummary) -> list[str]:
    if summary.sequences:
        return []
    if not summary.records:
        return [
            f"{summary.name}: data.eval_fraction leaves no record to it - change the fraction or name data.eval"
        ]
    return [
        f"{summary.name}: no token to train in {_many(summary.records, 'record')} ({summary.untrained_records} have"
        f" none, {summary.lost_records} lost all of them to data.max_length={summary.max_length} with"
        f" data.overflow={summary.overflow}) - write records with assistant turns, or raise data.max_length"
    ]


class _Progress:
    """A bar on a terminal, else a line now and then."""

    def __init__(self, n_bytes: int, say: Callable[[str], None]) -> None:
        self._n_bytes, self._say = n_bytes, say
        self._done_bytes = self._records = 0
        self._said_at = time.monotonic()

    def __enter__(self) -> _Progress:
        on_terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=self._n_bytes, desc="Data", unit="B", unit_scale=True, disable=not on_terminal
        )
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()

    def note(self, chunk: EncodedChunk) -> EncodedChunk:
        self._done_bytes += chunk.n_bytes
        self._records += chunk.n_records
        self._bar.update(chunk.n_bytes)
        if self._bar.disable and time.monotonic() - self._said_at >= _SAY_EVERY_S:
            self._said_at = time.monotonic()
            percent = 100 * self._done_bytes // max(1, self._n_bytes)
            self._say(f"Data: {self._records} records tokenised, {percent}% of the data")
        return chunk


def _is_intact(entry: Path) -> bool:
    """Whether every file of a cache entry has the size it was written with."""
    try:
        files = json.loads((entry / "meta.json").read_text(encoding="utf-8"))["files"]
        return all((entry / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _publish(folder: Path, entry: Path) -> None:
    """Rename `folder` to `entry`, unless another process has put an intact one there meanwhile."""
    with (entry.parent / "lock").open("a") as lock:
        fcntl.lockf(
            lock, fcntl.LOCK_EX
        )  # nobody may see an intact entry go: it may be in use already
        if not _is_intact(entry):
            if entry.exists():
                shutil.rmtree(entry)
            folder.rename(entry)
            _sync_directory(entry.parent)


def _hidden_sibling(entry: Path) -> Path:
    return entry.with_name(f".{entry.name}-{uuid.uuid4().hex}")


def _sync_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_abandoned(root: Path) -> None:
    """Remove what interrupted builds left, known by files that nobody has written to for long."""
    for folder in root.glob(".*"):
        with contextlib.suppress(FileNotFoundError):  # another process removes or publishes it
            written = max(path.stat().st_mtime for path in [folder, *folder.iterdir()])
            if time.time() - written > _ABANDONED_AFTER_S:
                shutil.rmtree(folder)


def _mapped(file: Path, dtype: type[np.generic]) -> npt.NDArray[Any]:
    if not file.stat().st_size:
        return np.empty(0, dtype)  # nothing cannot be mapped
    return np.memmap(file, dtype, mode="r").view(np.ndarray)


def _many(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
