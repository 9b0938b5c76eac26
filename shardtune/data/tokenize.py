"""Records into columns of token sequences, by all cores of a node, in the order of the records."""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from shardtune.config import DataConfig
from shardtune.data.chat_encoder import ChatEncoder, ChatError, EncodedRecord
from shardtune.data.records import Chunk, RecordError, check_record
from shardtune.errors import UserError

COLUMNS: dict[str, type[np.generic]] = {
    "tokens": np.uint32,
    "trained": np.bool_,
    "lengths": np.int32,
    "trained_counts": np.int32,
    "record": np.int64,
}
_ALONE_S = 5.0  # about what starting the workers takes
_CHUNKS_PER_WORKER = 4
_QUIET_TRACKER = "ignore::UserWarning:multiprocessing.resource_tracker"


def encode_record(
    encoder: ChatEncoder, record: dict[str, Any], with_roles: bool = False
) -> EncodedRecord:
    """Encode what `check_record` returned.

    Raises:
        ChatError: it cannot be encoded exactly.
        UserError: it has messages and the tokenizer has no chat template.
    """
    if "text" in record:
        return encoder.encode_text(record["text"], with_roles=with_roles)
    if (
        any(isinstance(value, list) for value in record.values())
        and not encoder.tokenizer.chat_template
    ):
        raise UserError(
            f"the data has messages, and the tokenizer of {encoder.tokenizer.name_or_path} has no chat template"
            " - use an instruction-tuned model's tokenizer, put a chat_template.jinja beside it, or write records"
            " with prompt and completion, or text"
        )
    tools = record.get("tools")
    if "messages" in record:
        return encoder.encode_messages(record["messages"], tools, with_roles=with_roles)
    return encoder.encode_prompt_completion(
        record["prompt"], record["completion"], tools, with_roles=with_roles
    )


def kept_pieces(
    trained: npt.ArrayLike, max_length: int, overflow: str
) -> list[tuple[slice, npt.NDArray[np.bool_]]]:
    """What of a sequence, given its trained flags, becomes sequences of at most `max_length` tokens: (where, trained).

    Pieces of a split overlap by one token, which is context only in the later one, so each trained token is in exactly
    one piece. The first token of a piece has no predecessor and is not trained; pieces without a trained token are left
    out.

    Raises:
        RecordError: too long, and `overflow` is `error`.
    """
    flags = np.asarray(trained, np.bool_)
    n_tokens = len(flags)
    starts = [0]
    if n_tokens > max_length:
        if overflow == "error":
            raise RecordError(
                f"has {n_tokens} tokens, more than data.max_length={max_length} - shorten it, raise data.max_length, or"
                " choose data.overflow=truncate, split or drop"
            )
        starts = {
            "truncate": [0],
            "drop": [],
            "split": list(range(0, n_tokens - 1, max_length - 1)),
        }[overflow]
    pieces = []
    for start in starts:
        piece = slice(start, min(start + max_length, n_tokens))
        piece_trained = flags[piece].copy()
        piece_trained[:1] = False
        if piece_trained.any():
            pieces.append((piece, piece_trained))
    return pieces


@dataclass
class Part:
    """What one chunk adds to one set.

    `columns`: the arrays of COLUMNS, a row a sequence, `tokens` and `trained` end to end. `counts`: fields of
    DataSummary. `notes`: sentences, with the number of records that they hold for.
    """

    columns: dict[str, Any] = field(default_factory=lambda: {column: [] for column in COLUMNS})
    counts: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)

    def add(self, record: int, encoded: EncodedRecord, max_length: int, overflow: str) -> None:
        self.counts["records"] += 1
        self.notes.update(dict.fromkeys(encoded.notes, 1))
        if not any(any(sequence.trained[1:]) for sequence in encoded.sequences):
            self.counts["untrained_records"] += 1
            return
        self.counts["appended_stops"] += encoded.appended_stop
        self.counts["added_tokens"] += encoded.added_tokens
        self.counts["rewritten_records"] += len(encoded.sequences) > 1
        sequences_before = self.counts["sequences"]
        for sequence in encoded.sequences:
            tokens, trained = (
                np.asarray(sequence.input_ids, np.uint32),
                np.asarray(sequence.trained, np.bool_),
            )
            self.counts["long_sequences"] += len(tokens) > max_length
            kept = np.zeros(len(tokens), np.bool_)
            for piece, piece_trained in kept_pieces(trained, max_length, overflow):
                self.counts["repeated_tokens"] += int(kept[piece].sum())
                kept[piece] = True
                self._add_row(tokens[piece], piece_trained, record)
            self.counts["lost_tokens"] += int((~kept).sum())
            self.counts["lost_trained_tokens"] += int(trained[1:][~kept[1:]].sum())
        self.counts["lost_records"] += self.counts["sequences"] == sequences_before

    def _add_row(
        self, tokens: npt.NDArray[np.uint32], trained: npt.NDArray[np.bool_], record: int
    ) -> None:
        trained_count = int(trained.sum())
        row = (tokens, trained, len(tokens), trained_count, record)
        for column, value in zip(COLUMNS, row, strict=True):
            self.columns[column].append(value)
        self.counts.update(sequences=1, tokens=len(tokens), trained_tokens=trained_count)

    def finish(self) -> None:
        """Turn the columns into arrays."""
        for column, dtype in COLUMNS.items():
            rows = self.columns[column]
            if column in ("tokens", "trained") and rows:
                rows = np.concatenate(rows)
            self.columns[column] = np.asarray(rows, dtype)


@dataclass
class EncodedChunk:
    """What became of a chunk: the parts by the name of their set, and a problem for each broken record."""

    n_records: int
    n_bytes: int
    parts: dict[str, Part] = field(default_factory=dict)
    unread_fields: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Tokeniser:
    """Everything that encoding a chunk needs; each worker process gets a copy."""

    encoder: ChatEncoder
    data: DataConfig

    def encode(self, chunk: Chunk) -> EncodedChunk:
        """Encode the records of a chunk; with `data.eval_fraction`, some of `train` go to `eval`."""
        result = EncodedChunk(len(chunk.numbers), chunk.n_bytes)
        result.unread_fields.update(dict.fromkeys(chunk.unread_columns, len(chunk.numbers)))
        for i, value in enumerate(chunk.parsed()):
            try:
                record, unread = check_record(value)
                part = result.parts.setdefault(
                    "eval" if self.is_held_out(record) else chunk.set_name, Part()
                )
                encoded = encode_record(self.encoder, record)
                part.add(chunk.first_record + i, encoded, self.data.max_length, self.data.overflow)
                result.unread_fields.update([*unread, *self.encoder.template.unread_fields(record)])
            except (RecordError, ChatError) as error:
                result.problems.append(f"{chunk.place(i)}: {error}")
        for part in result.parts.values():
            part.finish()
        return result

    def is_held_out(self, record: dict[str, Any]) -> bool:
        """Whether a record of data.train goes to evaluation: by its used fields alone, wherever it stands."""
        if self.data.eval is not None or not self.data.eval_fraction:
            return False
        canonical = json.dumps(record, sort_keys=True, separators=(",", ":")).encode()
        return xxhash.xxh3_64_intdigest(canonical) < self.data.eval_fraction * 2**64


def encode_chunks(tokeniser: Tokeniser, chunks: Iterator[Chunk]) -> Generator[EncodedChunk]:
    """The results in the order of the chunks, of which only a few a core are in memory; to be closed where left early.

    What takes a few seconds is encoded here, the rest by one process a core. These are spawned: a forked child of a
    process with threads, such as those of torch, may hang.
    """
    n_workers = len(os.sched_getaffinity(0))
    started = time.monotonic()
    for chunk in chunks:
        if n_workers > 1 and time.monotonic() - started >= _ALONE_S:
            break
        yield tokeniser.encode(chunk)
    else:
        return
    # If this process is killed, what removes the pool's semaphores must not speak behind the last word of the run.
    os.environ["PYTHONWARNINGS"] = ",".join(
        filter(None, [os.environ.get("PYTHONWARNINGS"), _QUIET_TRACKER])
    )
    spawn = multiprocessing.get_context("spawn")
    pending: deque[Future[EncodedChunk]] = deque()
    with ProcessPoolExecutor(n_workers, spawn, _start_worker, (tokeniser,)) as pool:
        try:
            for following in itertools.chain([chunk], chunks):
                with _keyboard_interrupt_delayed():  # whichever of these may start a worker
                    pending.append(pool.submit(_encode_in_worker, following))
                if len(pending) >= _CHUNKS_PER_WORKER * n_workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BaseException:
            # Nobody wants what they are doing. Waiting for it would outlast the patience of who interrupted this, and
            # a second signal leaves the pool's semaphores behind.
            for worker in multiprocessing.active_children():
                worker.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _keyboard_interrupt_delayed() -> Iterator[None]:
    """Until this is over. Processes that start meanwhile never get it from the terminal: this one ends them."""
    received: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which they inherit
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, handler)
    if received:
        signal.raise_signal(signal.SIGINT)


_worker_tokeniser: Tokeniser


def _start_worker(tokeniser: Tokeniser) -> None:
    global _worker_tokeniser
    _worker_tokeniser = tokeniser
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for its next chunk forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode_in_worker(chunk: Chunk) -> EncodedChunk:
    return _worker_tokeniser.encode(chunk)
