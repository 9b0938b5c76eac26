"""Records into token sequences, on all cores of a node, in the order of the records."""

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
import xxhash

from shardtune.config import DataConfig
from shardtune.data.chat_encoder import ChatEncoder, EncodedRecord
from shardtune.data.overflow import fit_to_length
from shardtune.data.records import RecordError, check_record
from shardtune.data.sources import RecordChunk
from shardtune.errors import UserError

_SINGLE_PROCESS_S = 5.0  # starting the workers takes about as long
_CHUNKS_PER_WORKER = 4
_QUIET_TRACKER = "ignore::UserWarning:multiprocessing.resource_tracker"


@dataclass
class ChunkSequences:
    """The sequences of one chunk that belong to one set.

    `sequences`: token ids uint32 [length], trained flags bool [length] and the index of the record
    of each. `counts`: fields of DataSummary. `notes`: sentences, each with the number of records
    that it is true of.
    """

    sequences: list[tuple[np.ndarray, np.ndarray, int]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)

    def add(self, record: int, encoded: EncodedRecord, data: DataConfig) -> None:
        """Add the sequences of the record with index `record`, cut to `data.max_length`."""
        self.counts["records"] += 1
        self.notes.update(dict.fromkeys(encoded.notes, 1))
        if not any(any(sequence.trained[1:]) for sequence in encoded.sequences):
            self.counts["untrained_records"] += 1
            return
        self.counts["appended_stops"] += encoded.appended_stop
        self.counts["added_tokens"] += encoded.added_tokens
        self.counts["rewritten_records"] += len(encoded.sequences) > 1
        sequences_before = len(self.sequences)
        for sequence in encoded.sequences:
            tokens = np.asarray(sequence.input_ids, np.uint32)
            trained = np.asarray(sequence.trained, np.bool_)
            kept = np.zeros(len(tokens), np.bool_)
            for piece, piece_trained in fit_to_length(trained, data.max_length, data.overflow):
                self.sequences.append((tokens[piece], piece_trained, record))
                self.counts["tokens"] += len(piece_trained)
                self.counts["trained_tokens"] += int(piece_trained.sum())
                self.counts["repeated_tokens"] += int(kept[piece].sum())
                kept[piece] = True
            self.counts["long_sequences"] += len(tokens) > data.max_length
            self.counts["lost_tokens"] += int((~kept).sum())
            self.counts["lost_trained_tokens"] += int(trained[1:][~kept[1:]].sum())
        n_sequences = len(self.sequences) - sequences_before
        self.counts["sequences"] += n_sequences
        self.counts["lost_records"] += n_sequences == 0


@dataclass
class TokenizedChunk:
    """The sequences of a chunk by the name of their set, and a problem for each broken record."""

    n_records: int
    n_bytes: int
    sets: dict[str, ChunkSequences] = field(default_factory=dict)
    unread_fields: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ChunkTokenizer:
    """Tokenizes chunks of records; each worker process gets a copy."""

    encoder: ChatEncoder
    data: DataConfig

    def tokenize(self, chunk: RecordChunk) -> TokenizedChunk:
        """Tokenize a chunk; with `data.eval_fraction`, some records of `train` go to `eval`."""
        result = TokenizedChunk(len(chunk.numbers), chunk.n_bytes)
        result.unread_fields.update(dict.fromkeys(chunk.unread_columns, len(chunk.numbers)))
        for i, value in enumerate(chunk.parse()):
            try:
                record, unread = check_record(value)
                set_name = "eval" if self.is_held_out(record) else chunk.set_name
                sequences = result.sets.setdefault(set_name, ChunkSequences())
                encoded = encode_record(self.encoder, record)
                sequences.add(chunk.first_record + i, encoded, self.data)
                result.unread_fields.update([*unread, *self.encoder.template.unread_fields(record)])
            except RecordError as error:
                result.problems.append(f"{chunk.place(i)}: {error}")
        return result

    def is_held_out(self, record: dict[str, Any]) -> bool:
        """Whether a record of data.train goes to evaluation: a hash of its used fields decides."""
        if self.data.eval is not None or not self.data.eval_fraction:
            return False
        canonical = json.dumps(record, sort_keys=True, separators=(",", ":")).encode()
        return xxhash.xxh3_64_intdigest(canonical) < self.data.eval_fraction * 2**64


def encode_record(encoder: ChatEncoder, record: dict[str, Any]) -> EncodedRecord:
    """Encode the used fields of a record, as `check_record` returns them.

    Raises:
        RecordError: the record cannot be encoded exactly.
        UserError: it has messages and the tokenizer has no chat template.
    """
    if "text" in record:
        return encoder.encode_text(record["text"])
    has_messages = any(isinstance(value, list) for value in record.values())
    if has_messages and not encoder.tokenizer.chat_template:
        raise UserError(
            f"the data has messages, and the tokenizer of {encoder.tokenizer.name_or_path} has no "
            "chat template - use an instruction-tuned model's tokenizer, put a chat_template.jinja "
            "beside it, or write records with prompt and completion, or text"
        )
    tools = record.get("tools")
    if "messages" in record:
        return encoder.encode_messages(record["messages"], tools)
    return encoder.encode_prompt_completion(record["prompt"], record["completion"], tools)


def tokenize_chunks(
    tokenizer: ChunkTokenizer, chunks: Iterator[RecordChunk]
) -> Generator[TokenizedChunk]:
    """Yield the results in the order of the chunks; close the generator to leave it early.

    This process tokenizes for a few seconds, then one process a core does the rest. At most a few
    chunks a core are in memory. The processes are spawned: a forked child of a process with
    threads, such as torch's, may hang.
    """
    n_workers = len(os.sched_getaffinity(0))
    started = time.monotonic()
    for chunk in chunks:
        if n_workers > 1 and time.monotonic() - started >= _SINGLE_PROCESS_S:
            break
        yield tokenizer.tokenize(chunk)
    else:
        return
    # If this process is killed, the tracker of the pool's semaphores must not print a warning
    # after the last line of the run.
    os.environ["PYTHONWARNINGS"] = ",".join(
        filter(None, [os.environ.get("PYTHONWARNINGS"), _QUIET_TRACKER])
    )
    spawn = multiprocessing.get_context("spawn")
    pending: deque[Future[TokenizedChunk]] = deque()
    with ProcessPoolExecutor(n_workers, spawn, _start_worker, (tokenizer,)) as pool:
        try:
            for following in itertools.chain([chunk], chunks):
                with _keyboard_interrupt_delayed():  # any submit may start a worker
                    pending.append(pool.submit(_tokenize_in_worker, following))
                if len(pending) >= _CHUNKS_PER_WORKER * n_workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BaseException:
            # Nobody needs the pending results. Waiting for them may provoke a second signal,
            # which leaves the pool's semaphores behind.
            for worker in multiprocessing.active_children():
                worker.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _keyboard_interrupt_delayed() -> Iterator[None]:
    """Delay SIGINT to the end of the block. Processes started in it never get it: this one ends
    them."""
    received: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # child processes inherit the mask
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, handler)
    if received:
        signal.raise_signal(signal.SIGINT)


_worker_tokenizer: ChunkTokenizer


def _start_worker(tokenizer: ChunkTokenizer) -> None:
    global _worker_tokenizer
    _worker_tokenizer = tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker when its parent is killed; it would wait for its next chunk forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _tokenize_in_worker(chunk: RecordChunk) -> TokenizedChunk:
    return _worker_tokenizer.tokenize(chunk)
