"""Records into token sequences, on all cores of a node, in the order of the records."""

import itertools
import json
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import xxhash

from shardtune.config import DataConfig
from shardtune.data.chat_encoder import ChatEncoder, EncodedRecord
from shardtune.data.forms import names_in, read_record
from shardtune.data.overflow import cut_to_rows, encode_to_fit
from shardtune.data.record_files import RecordChunk
from shardtune.data.records import (
    BrokenRecord,
    Conversation,
    FirstRecord,
    Outcome,
    Record,
    RecordError,
    RecordSums,
    is_media,
)
from shardtune.distributed.signals import die_with_parent

_SINGLE_PROCESS_S = 5.0  # about as long as the workers take to start
_CHUNKS_PER_WORKER = 4

# The hash of a record's tokens, and its index in its set. In one of 300,000 datasets of 10 million
# records two hashes are equal by chance.
RecordHash = tuple[int, int]


def _hash_of(rows: Iterable[np.ndarray]) -> int:
    """Hash the tokens of the rows of a record."""
    digest = xxhash.xxh3_64()
    for tokens in rows:
        digest.update(len(tokens).to_bytes(8, "little") + tokens.tobytes())
    return digest.intdigest()


@dataclass
class SetChunk(RecordSums):
    """The records of one chunk that belong to one set."""

    # Of each its token ids uint32 [length], weights float32 [length] and the record's index.
    sequences: list[tuple[np.ndarray, np.ndarray, int]] = field(default_factory=list)
    hashes: list[RecordHash] = field(default_factory=list)

    def add(
        self, first: FirstRecord, encoded: EncodedRecord, data: DataConfig, bos_ids: list[int]
    ) -> None:
        """Add the sequences of a record, cut to `data.max_length`, and count its outcomes."""
        whole = encoded.too_long or encoded.sequences
        sums = RecordSums(1, longest=max((len(s.input_ids) for s in whole), default=0))
        rows: list[tuple[np.ndarray, np.ndarray]] = []
        for note in encoded.notes:
            sums.outcomes.add(*note)
        if any(any(s.trained[1:]) for s in whole):
            sums.outcomes.add(Outcome.END_APPENDED, records=int(encoded.appended_stop))
            if encoded.apart:
                sums.outcomes.add(encoded.apart, tokens_added=encoded.added_tokens)
            rows = cut_to_rows(encoded, data, sums.outcomes, bos_ids)  # which may refuse the record
            self.sequences += [(tokens, trained, first.record) for tokens, trained in rows]
        else:
            sums.outcomes.add(Outcome.UNTRAINED)
        if rows:
            self.hashes.append((_hash_of(tokens for tokens, _ in rows), first.record))
        sums.n_sequences = len(rows)
        sums.first_records = {key: first for key, count in sums.outcomes.items() if count}
        self.include(sums)


@dataclass
class TokenizedChunk:
    """The sequences of a chunk by the name of their set, and its broken records."""

    chunk: RecordChunk  # without its rows
    sets: dict[str, SetChunk] = field(default_factory=dict)
    broken: list[BrokenRecord] = field(default_factory=list)
    fields: set[str] = field(default_factory=set)  # with data.columns: those that any record has


@dataclass(frozen=True)
class ChunkTokenizer:
    """Tokenizes chunks of records; each worker process gets a copy."""

    encoder: ChatEncoder
    data: DataConfig

    def tokenize(self, chunk: RecordChunk) -> TokenizedChunk:
        """Tokenize a chunk; with `data.eval_fraction`, some records of `train` go to `eval`."""
        result = TokenizedChunk(replace(chunk, rows=()))
        own = result.sets[chunk.set_name] = SetChunk()
        columns = self.data.field_names
        result.fields.update(chunk.unread_columns if columns else ())
        for i, value in enumerate(chunk.parse()):
            result.fields |= names_in(value, columns)
            first = FirstRecord(chunk.first_record + i, chunk.place(i))
            try:
                self._add_record(result, chunk, value, first)
            except RecordError as error:
                broken = BrokenRecord(*first, str(error), error.ends_file, error.kind)
                result.broken.append(broken)
        for name in chunk.unread_columns:
            outcome = unread_outcome(name)
            own.outcomes.add(outcome, name, len(chunk.numbers))
            own.first_records[outcome, name, ""] = FirstRecord(chunk.first_record, chunk.place(0))
        return result

    def _add_record(
        self, result: TokenizedChunk, chunk: RecordChunk, value: Any, first: FirstRecord
    ) -> None:
        """Tokenize one record of a chunk; raises RecordError where it cannot be used."""
        columns, roles = self.data.field_names, self.data.roles
        record, unread, notes = read_record(value, columns, roles, chunk.unread_columns)
        # A role is there even if the record is dropped.
        said = {(*note, ""): 0 for note in notes if note[0] is Outcome.ROLE}
        result.sets[chunk.set_name].outcomes.update(said)
        options = record.options if isinstance(record, Conversation) else {}
        loss_on = chunk.loss_on or self.data.loss_on
        encoder = self.encoder.variant(loss_on, {**chunk.template_options, **options})
        encoded = encode_to_fit(encoder, record, self.data)
        template = encoder.template
        unread += template.unread_fields(record)
        notes += template.rendered_already(record)
        notes += [(Outcome.UNREAD_OPTION, option) for option in template.unread_of(options)]
        notes += [(unread_outcome(name), name) for name in unread]
        set_name = "eval" if self.is_held_out(record) else chunk.set_name
        own = result.sets.setdefault(set_name, SetChunk())
        encoded = replace(encoded, notes=(*notes, *encoded.notes))
        own.add(first, encoded, self.data, encoder.bos_ids)

    def is_held_out(self, record: Record) -> bool:
        """Whether a record of data.train goes to evaluation: a hash of its used fields decides."""
        if self.data.eval is not None or not self.data.eval_fraction:
            return False
        # Arrow has values that JSON has not, such as dates: these count as text.
        canonical = json.dumps(record.content, sort_keys=True, separators=(",", ":"), default=str)
        return xxhash.xxh3_64_intdigest(canonical.encode()) < self.data.eval_fraction * 2**64


def unread_outcome(field: str) -> Outcome:
    """Return the outcome by which an unread field is counted."""
    return Outcome.UNREAD_MEDIA if is_media(field) else Outcome.UNREAD_FIELD


def tokenize_chunks(
    tokenizer: ChunkTokenizer, chunks: Iterator[RecordChunk]
) -> Generator[TokenizedChunk]:
    """Yield the results in the order of the chunks; close the generator to leave it early."""
    # This process tokenizes for a few seconds, then one process a core does the rest, with a few
    # chunks a core in memory. They are spawned: a forked child of a process with threads may hang.
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
