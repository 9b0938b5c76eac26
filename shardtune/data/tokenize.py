"""Records into token sequences, on all cores of a node, in the order of the records."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from shardtune.config import DataConfig
from shardtune.data.chat_encoder import ChatEncoder, EncodedRecord
from shardtune.data.duplicates import RecordHash, hash_of
from shardtune.data.messages import is_media
from shardtune.data.outcomes import BrokenRecord, FirstRecord, Outcome, OutcomeCounts
from shardtune.data.overflow import cut_to_rows, encode_to_fit
from shardtune.data.record_error import FileError, RecordError
from shardtune.data.record_files import RecordChunk
from shardtune.data.records import fields_of_turns, media_tag, read_record
from shardtune.data.token_rows import require_one_document
from shardtune.distributed.signals import die_with_parent

_SINGLE_PROCESS_S = 5.0  # about as long as the workers take to start
_CHUNKS_PER_WORKER = 4


@dataclass
class SetChunk:
    """The sequences of one chunk that belong to one set.

    `sequences`: token ids uint32 [length], trained flags bool [length] and the index of the record
    of each. `n_records`: the number of their records, with untrained and dropped ones.
    `first_records`: the first record of each of `outcomes`. `longest`: tokens of the longest
    sequence before it is cut. `hashes`: those of the records that have a sequence.
    """

    sequences: list[tuple[np.ndarray, np.ndarray, int]] = field(default_factory=list)
    n_records: int = 0
    outcomes: OutcomeCounts = field(default_factory=OutcomeCounts)
    first_records: dict[tuple[Outcome, str, str], FirstRecord] = field(default_factory=dict)
    longest: int = 0
    hashes: list[RecordHash] = field(default_factory=list)

    def add(
        self, record: int, encoded: EncodedRecord, data: DataConfig, bos_ids: list[int]
    ) -> None:
        """Add the sequences of the record with index `record`, cut to `data.max_length`."""
        self.n_records += 1
        for note in encoded.notes:
            self.outcomes.add(*note)
        whole = encoded.too_long or encoded.sequences
        self.longest = max([self.longest, *(len(s.input_ids) for s in whole)])
        if not any(any(s.trained[1:]) for s in whole):
            self.outcomes.add(Outcome.UNTRAINED)
            return
        self.outcomes.add(Outcome.END_APPENDED, records=int(encoded.appended_stop))
        if encoded.apart:
            self.outcomes.add(encoded.apart, tokens_added=encoded.added_tokens)
        rows = cut_to_rows(encoded, data, self.outcomes, bos_ids)
        self.sequences += [(tokens, trained, record) for tokens, trained in rows]
        if rows:
            self.hashes.append(hash_of(record, (tokens for tokens, _ in rows)))


@dataclass
class TokenizedChunk:
    """The sequences of a chunk by the name of their set, and its broken records.

    `fields`: with `data.columns`, the names of the fields that any record has.
    """

    set_name: str
    source: int
    file: str
    n_records: int
    n_bytes: int
    sets: dict[str, SetChunk] = field(default_factory=dict)
    broken: list[BrokenRecord] = field(default_factory=list)
    fields: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class ChunkTokenizer:
    """Tokenizes chunks of records; each worker process gets a copy."""

    encoder: ChatEncoder
    data: DataConfig

    def tokenize(self, chunk: RecordChunk) -> TokenizedChunk:
        """Tokenize a chunk; with `data.eval_fraction`, some records of `train` go to `eval`."""
        result = TokenizedChunk(
            chunk.set_name, chunk.source, chunk.file, len(chunk.numbers), chunk.n_bytes
        )
        result.sets[chunk.set_name] = SetChunk()
        columns = self.data.field_names
        if columns:
            result.fields.update(chunk.unread_columns)
        for i, value in enumerate(chunk.parse()):
            try:
                if columns and isinstance(value, dict):
                    result.fields |= {name for name in value if value[name] is not None}
                    result.fields |= fields_of_turns(value, columns)
                record, unread_names, notes = read_record(value, self.data)
                if "input_ids" in record:
                    require_one_document((*unread_names, *chunk.unread_columns))
                tag = media_tag(record, [*unread_names, *chunk.unread_columns])
                set_name = "eval" if self.is_held_out(record) else chunk.set_name
                sequences = result.sets.setdefault(set_name, SetChunk())
                encoder = self.encoder_of(chunk, record)
                encoded = encode_to_fit(encoder, record, self.data)
                for outcome, detail in notes:
                    sequences.outcomes.add(outcome, detail)
                if tag:
                    sequences.outcomes.add(Outcome.MEDIA_TAG, tag)
                for note in encoder.template.rendered_already(record):
                    sequences.outcomes.add(*note)
                sequences.add(chunk.first_record + i, encoded, self.data, encoder.bos_ids)
                for option in encoder.template.unread_of(record.get("chat_template_kwargs", {})):
                    sequences.outcomes.add(Outcome.UNREAD_OPTION, option)
                for name in (*unread_names, *encoder.template.unread_fields(record)):
                    sequences.outcomes.add(unread_outcome(name), name)
                for key in sequences.outcomes.keys() - sequences.first_records.keys():
                    if sequences.outcomes[key]:
                        first = FirstRecord(chunk.first_record + i, chunk.place(i))
                        sequences.first_records[key] = first
            except RecordError as error:
                ends_file = isinstance(error, FileError)
                index, place = chunk.first_record + i, chunk.place(i)
                result.broken.append(BrokenRecord(index, place, str(error), ends_file, error.kind))
        for name in chunk.unread_columns:
            own = result.sets[chunk.set_name]
            own.outcomes.add(unread_outcome(name), name, len(chunk.numbers))
            first = FirstRecord(chunk.first_record, chunk.place(0))
            own.first_records[unread_outcome(name), name, ""] = first
        return result

    def encoder_of(self, chunk: RecordChunk, record: dict[str, Any]) -> ChatEncoder:
        """Return the encoder by the settings of the record's source and its own options."""
        options = {**chunk.template_options, **record.get("chat_template_kwargs", {})}
        return self.encoder.variant(chunk.loss_on or self.data.loss_on, options)

    def is_held_out(self, record: dict[str, Any]) -> bool:
        """Whether a record of data.train goes to evaluation: a hash of its used fields decides."""
        if self.data.eval is not None or not self.data.eval_fraction:
            return False
        texts = {name: value for name, value in record.items() if name != "chat_template_kwargs"}
        canonical = json.dumps(texts, sort_keys=True, separators=(",", ":")).encode()
        return xxhash.xxh3_64_intdigest(canonical) < self.data.eval_fraction * 2**64


def unread_outcome(field: str) -> Outcome:
    """Return the outcome by which an unread field is counted."""
    return Outcome.UNREAD_MEDIA if is_media(field) else Outcome.UNREAD_FIELD


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
    spawn = multiprocessing.get_context("spawn")
    pending: deque[Future[TokenizedChunk]] = deque()
    with ProcessPoolExecutor(n_workers, spawn, _start_worker, (tokenizer, os.getpid())) as pool:
        try:
            for following in itertools.chain([chunk], chunks):
                # Any submit may start a worker. It must ignore SIGINT, since this process ends it.
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
                pending.append(pool.submit(_tokenize_in_worker, following))
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
                if len(pending) >= _CHUNKS_PER_WORKER * n_workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BaseException:
            # Nobody needs the pending results, and waiting for them may provoke a second signal.
            for worker in multiprocessing.active_children():
                worker.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


_worker_tokenizer: ChunkTokenizer


def _start_worker(tokenizer: ChunkTokenizer, parent: int) -> None:
    global _worker_tokenizer
    die_with_parent(parent)  # a worker whose parent was killed waits for its next chunk forever
    _worker_tokenizer = tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _tokenize_in_worker(chunk: RecordChunk) -> TokenizedChunk:
    return _worker_tokenizer.tokenize(chunk)
