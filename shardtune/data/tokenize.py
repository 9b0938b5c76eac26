"""Records into token sequences, on all cores of a node, in the order of the records."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
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
from shardtune.data.records import RecordError, check_record, rename_fields
from shardtune.data.sources import RecordChunk
from shardtune.distributed.signals import die_with_parent
from shardtune.errors import UserError

_SINGLE_PROCESS_S = 5.0  # starting the workers takes about as long
_CHUNKS_PER_WORKER = 4
EFFECT = " | "  # stands between a cause and each of its effects
# What becomes of a record that is too long, by data.overflow.
_OVERFLOWS = {
    "turns": "cut behind the last turn that fits",
    "truncate": "truncated",
    "split": "split into rows",
    "drop": "partly dropped",  # those of its turns that do not fit
}


@dataclass
class SetChunk:
    """The sequences of one chunk that belong to one set.

    `sequences`: token ids uint32 [length], trained flags bool [length] and the index of the record
    of each. `counts`: how often each kind of thing happened, in the words that the log has for it.
    """

    sequences: list[tuple[np.ndarray, np.ndarray, int]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, record: int, encoded: EncodedRecord, data: DataConfig) -> None:
        """Add the sequences of the record with index `record`, cut to `data.max_length`."""
        counts = self.counts
        counts["records"] += 1
        counts.update(encoded.notes)
        whole = encoded.too_long or encoded.sequences
        if not any(any(sequence.trained[1:]) for sequence in whole):
            counts["WARNING: records without a token to train, dropped"] += 1
            return
        counts["records to which the end token was appended"] += encoded.appended_stop
        if len(encoded.sequences) > 1:
            self._count(
                "records whose earlier turns the template rewrites: a sequence per turn",
                tokens_added=encoded.added_tokens,
            )
        n_rows = n_kept = n_trained = n_repeated = n_turns = n_cut = 0
        for sequence in encoded.sequences:
            tokens = np.asarray(sequence.input_ids, np.uint32)
            kept = np.zeros(len(tokens), np.bool_)
            for piece, trained in fit_to_length(sequence.trained, data.max_length, data.overflow):
                self.sequences.append((tokens[piece], trained, record))
                n_rows += 1
                counts["tokens"] += len(trained)
                n_trained += int(trained.sum())
                n_repeated += int(kept[piece].sum())
                kept[piece] = True
            n_kept += int(kept.sum())
            for turn in sequence.turns:
                in_row = kept[turn.begin : turn.end]
                n_turns += bool(in_row.any())
                n_cut += bool(in_row.any() and not in_row[-1])
        counts["trained tokens"] += n_trained
        counts["sequences"] += n_rows
        if any(len(sequence.input_ids) > data.max_length for sequence in whole):
            overflow = "turns" if encoded.too_long else data.overflow.replace("turns", "split")
            outcome = _OVERFLOWS[overflow] if n_rows else "dropped"
            self._count(
                f"records longer than data.max_length={data.max_length}, {outcome}",
                answers_trained_without_their_end=n_cut,
                trained_turns_lost=sum(len(sequence.turns) for sequence in whole) - n_turns,
                tokens_lost=sum(len(sequence.input_ids) for sequence in whole) - n_kept,
                trained_tokens_lost=sum(sum(s.trained[1:]) for s in whole) - n_trained,
                tokens_repeated_as_context=n_repeated,
            )

    def _count(self, cause: str, **effects: int) -> None:
        """Count a record with this cause, and its effects, in one line of the log."""
        self.counts[cause] += 1
        for effect, count in effects.items():
            self.counts[f"{cause}{EFFECT}{effect.replace('_', ' ')}"] += count


@dataclass
class TokenizedChunk:
    """The sequences of a chunk by the name of their set, and a problem for each broken record.

    `fields`: with `data.columns`, the names of the fields that any record has.
    """

    set_name: str
    source: int
    n_records: int
    n_bytes: int
    sets: dict[str, SetChunk] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    fields: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class ChunkTokenizer:
    """Tokenizes chunks of records; each worker process gets a copy."""

    encoder: ChatEncoder
    data: DataConfig

    def tokenize(self, chunk: RecordChunk) -> TokenizedChunk:
        """Tokenize a chunk; with `data.eval_fraction`, some records of `train` go to `eval`."""
        result = TokenizedChunk(chunk.set_name, chunk.source, len(chunk.numbers), chunk.n_bytes)
        result.sets[chunk.set_name] = SetChunk()
        encoder = self.encoder.with_loss_on(chunk.loss_on or self.data.loss_on)
        columns = self.data.field_names
        max_length = self.data.max_length if self.data.overflow == "turns" else None
        unread: Counter[str] = Counter(dict.fromkeys(chunk.unread_columns, len(chunk.numbers)))
        if columns:
            result.fields.update(chunk.unread_columns)
        for i, value in enumerate(chunk.parse()):
            try:
                if columns and isinstance(value, dict):
                    result.fields |= {name for name in value if value[name] is not None}
                record, unread_names, form = check_record(rename_fields(value, columns))
                set_name = "eval" if self.is_held_out(record) else chunk.set_name
                sequences = result.sets.setdefault(set_name, SetChunk())
                encoded = encode_record(encoder, record, max_length)
                if form:
                    sequences.counts[f"records in the form of {form}"] += 1
                sequences.add(chunk.first_record + i, encoded, self.data)
                unread.update([*unread_names, *self.encoder.template.unread_fields(record)])
            except RecordError as error:
                result.problems.append(f"{chunk.place(i)}: {error}")
        for name, n_records in unread.items():
            counts = result.sets[chunk.set_name].counts
            counts[f"records with the field {name}, which nothing reads"] = n_records
        return result

    def is_held_out(self, record: dict[str, Any]) -> bool:
        """Whether a record of data.train goes to evaluation: a hash of its used fields decides."""
        if self.data.eval is not None or not self.data.eval_fraction:
            return False
        canonical = json.dumps(record, sort_keys=True, separators=(",", ":")).encode()
        return xxhash.xxh3_64_intdigest(canonical) < self.data.eval_fraction * 2**64


def encode_record(
    encoder: ChatEncoder, record: dict[str, Any], max_length: int | None = None
) -> EncodedRecord:
    """Encode the used fields of a record, as `check_record` returns them.

    Where `max_length` is given, a conversation keeps the leading turns that fit, and a prompt with
    its completion has no sequence unless both fit.

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
        return encoder.encode_messages(record["messages"], tools, max_length=max_length)
    encoded = encoder.encode_prompt_completion(record["prompt"], record["completion"], tools)
    if max_length is not None and not encoded.fits(max_length):
        encoded = EncodedRecord([], notes=encoded.notes, too_long=encoded.sequences)
    return encoded


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
                # Any submit may start a worker, which never gets SIGINT: this process ends it.
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
