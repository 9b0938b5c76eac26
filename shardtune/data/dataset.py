"""The token sequences of a run: tokenized once a node, cached, and memory-mapped by all ranks."""

import contextlib
import datetime
import hashlib
import importlib.metadata
import json
import os
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from transformers import AutoTokenizer

from shardtune.config import DataConfig, ModelConfig
from shardtune.data.chat_encoder import ChatEncoder, stop_token_ids
from shardtune.data.records import NEXT_TEXT, TOO_LONG, Outcome, RecordSums
from shardtune.data.refusal import RecordHashes, SourceSums, describe_leaks, problems_of
from shardtune.data.sources import Source, find_source, read_records
from shardtune.data.tokenize import ChunkTokenizer, SetChunk, tokenize_chunks
from shardtune.errors import UserError, all_of, first_few, first_line
from shardtune.hub import hub_problem, read_config_json
from shardtune.log import logger, node_logger
from shardtune.new_tokens import add_new_tokens
from shardtune.run_files import cache_folder

# One file for each column of a set; tokens and trained flags stand end to end. Of the last two one
# says which tokens have a weight between 0 and 1, the other has these weights.
_COLUMNS: dict[str, type[np.generic]] = {
    "tokens": np.uint32,
    "trained": np.bool_,
    "starts": np.int64,
    "lengths": np.int32,
    "trained_counts": np.int32,
    "trained_weights": np.float64,
    "record": np.int64,
    "source": np.uint16,
    "weighted": np.int64,
    "weights": np.float32,
}
_DIGESTED = ("tokens", "trained", "lengths")
# An entry that differs from these digests is made anew. `xxhsum -c` reads the file, too.
_DIGESTS = "digests.xxh128"
_LOG_EVERY_S = 10.0
_MOST_WEIGHTS = 1000  # that are counted one by one


class TokenDataset:
    """The sequences of one set, memory-mapped."""

    def __init__(self, folder: Path, name: str) -> None:
        columns = (
            np.memmap(file, dtype, mode="r").view(np.ndarray)
            if (file := folder / f"{name}.{column}").stat().st_size
            else np.empty(0, dtype)
            for column, dtype in _COLUMNS.items()
        )
        self._tokens, self._trained, self._starts, *of_sequences, weighted, weights = columns
        self._weighted, self._weights = weighted, weights
        # Of each sequence: its tokens, its trained tokens and the sum of their weights, and the
        # indices of its record and of its source in the set, both ascending.
        self.lengths, self.trained_counts, self.trained_weights, *indices = of_sequences
        self.record, self.source = indices

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def begins_record(self) -> np.ndarray:
        """Whether each sequence is the first of its record, bool [sequences]."""
        return np.diff(self.record, prepend=-1) != 0

    def present(self, ids: Sequence[int]) -> list[int]:
        """Return those of `ids` that any token has, ascending."""
        starts = range(0, len(self._tokens), 1 << 24) if ids else ()
        parts = (self._tokens[i : i + (1 << 24)] for i in starts)
        return sorted({int(i) for part in parts for i in np.unique(part[np.isin(part, ids)])})

    def __getitem__(self, i: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Return copies of token ids int64 [length] and their weights float32 [length].

        An untrained token has the weight 0.
        """
        start = self._starts[i]
        stop = start + self.lengths[i]
        weights = self._trained[start:stop].astype(np.float32)
        between = slice(*np.searchsorted(self._weighted, (start, stop)))
        weights[self._weighted[between] - start] = self._weights[between]
        return self._tokens[start:stop].astype(np.int64), weights


@dataclass(frozen=True)
class PreparedData:
    """The sets of a run by name: `train`, and perhaps `eval` or several `eval.NAME`."""

    sets: dict[str, TokenDataset]
    lines: list[str]  # sentences for the user
    key: str  # a digest of the tokens and trained flags, and nothing else
    examples: dict[str, int]  # of lines about records of data.train, the first such record

    @property
    def train(self) -> TokenDataset:
        return self.sets["train"]

    @property
    def eval(self) -> dict[str, TokenDataset]:
        """The evaluation sets by name; the name of a single one is ""."""
        return {
            name.partition(".")[2]: dataset
            for name, dataset in self.sets.items()
            if name != "train"
        }

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence of any set."""
        return max(int(tokens.lengths.max()) for tokens in self.sets.values())

    def require_vocabulary(self, tokenizer: Any, vocabulary: int) -> None:
        """Raise UserError when a token is not among the `vocabulary` ids that the model knows."""
        unknown = [i for i in tokenizer.get_vocab().values() if i >= vocabulary]
        if found := [i for tokens in self.sets.values() for i in tokens.present(unknown)]:
            raise UserError(
                f"the data has the token {found[0]} ({tokenizer.convert_ids_to_tokens(found[0])!r})"
                f" and the model a vocabulary of {vocabulary} - use the model's own tokenizer"
            )


def added_tokens(tokenizer: Any) -> list[int]:
    """Return the tokens behind the tokenizer's vocabulary that its own template never writes."""
    met = f"{tokenizer.init_kwargs.get('chat_template')} {tokenizer.special_tokens_map}"
    added = tokenizer.get_added_vocab().items()
    return [i for token, i in added if i >= tokenizer.vocab_size and token not in met]


def build_encoder(model: ModelConfig, data: DataConfig, date: datetime.date) -> ChatEncoder:
    """Return the encoder of a model's tokenizer; templates that print today's date get `date`.

    Raises UserError where it has no tokenizer or no stop token, or options are not the user's.
    """
    model_path = model.path
    if not Path(model_path).is_dir():
        hub_problem()  # where the hub cannot be reached, its cache is read without retries
    taken: list[str] = []
    try:
        model_config = read_config_json(model_path)
        tokenizer = AutoTokenizer.from_pretrained(model_path, config=model_config)
        add_new_tokens(tokenizer, model)
        stops = stop_token_ids(tokenizer, model_path, model_config)
        name = f"the chat template of {model_path}"
        if data.chat_template:
            name = f"the chat template {data.chat_template}"
            tokenizer.chat_template = read_chat_template(data.chat_template)
        stops += _new_stops(tokenizer, model, data.template_options, stops)
        encoder = ChatEncoder(tokenizer, stops, data.loss_on, date, name, data.template_options)
        given = {"data": data.template_options}
        given |= {key: source.template_options for key, source in data.train_sources.items()}
        for key, options in given.items():
            taken += encoder.template.taken(f"{key}.template_options", options)
    except UserError:
        raise
    except Exception as error:  # tokenizers raises nothing more specific
        files = "tokenizer.json, tokenizer_config.json and config.json"
        what = f"no tokenizer and configuration that transformers can read ({first_line(error)})"
        remedy = f"name a hub id or a directory with {files}"
        if "trust_remote_code" in str(error):
            what = "its tokenizer is code of its own, and no such code is run"
            remedy = f"use a copy with {files} of a class that transformers has"
        raise UserError(f"model.path={model_path}: {what} - {remedy}") from error
    if taken:
        raise UserError(*taken)
    return encoder


def _new_stops(
    tokenizer: Any, model: ModelConfig, options: Mapping[str, Any], stops: Sequence[int]
) -> list[int]:
    """Return the special new token with which the template ends answers, if no stop does."""
    given = model.new_tokens
    special = given.get("special", ()) if isinstance(given, Mapping) else ()
    behind = ""
    with contextlib.suppress(Exception):  # the template is refused where it is read
        chat = [{"role": role, "content": NEXT_TEXT} for role in ("user", "assistant")]
        text = tokenizer.apply_chat_template(chat, tokenize=False, **options) if special else ""
        behind = text.rpartition(NEXT_TEXT)[2]
    if any(tokenizer.decode([i]) in behind for i in stops):
        return []
    return [tokenizer.convert_tokens_to_ids(each) for each in special if behind.startswith(each)]


def read_chat_template(path: str) -> str:
    """Return the text of `data.chat_template`. Raises UserError where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = f"data.chat_template={path} cannot be read ({error})"
        raise UserError(f"{what} - name a file with the template") from error


def find_sources(data: DataConfig) -> dict[str, list[Source]]:
    """Return the sources of each set that `data` names.

    Raises UserError with a problem for each source that is not there.
    """
    found = all_of(*(partial(find_source, key, spec) for key, spec in data.paths.items()))
    own = {"loss_on", "max_records", "template_options"}
    train = [
        replace(source, **options.model_dump(include=own))
        for source, options in zip(found, data.train_sources.values(), strict=False)
    ]
    evaluated = {source.key.removeprefix("data."): [source] for source in found[len(train) :]}
    return {
        name: [replace(source, columns=data.field_names) for source in sources]
        for name, sources in ({"train": train} | evaluated).items()
    }


def prepare_data(data: DataConfig, encoder: ChatEncoder) -> Path:
    """Tokenize `data` unless the cache has it intact; returns the entry for `open_prepared`.

    One process per node calls this. Raises UserError for sources, broken records, nothing to train,
    or a cache that cannot be written.
    """
    # Large data starts worker processes, which import the main module anew.
    started = time.monotonic()
    sets = find_sources(data)
    entry = cache_folder("data") / _cache_key(sets, data, encoder)
    if entry.exists():
        if not (damaged := _damaged_files(entry)):
            logger.info(f"Data: cached in {entry}")
            return entry
        # Other nodes may have an intact entry, so that this node says it.
        remedy = "the data is tokenized anew; if this happens again, check the disk"
        node_logger.warning(f"{entry}: damaged ({first_few(damaged, 10)}) - {remedy}")
    try:
        with _new_entry(entry) as folder:
            _build(folder, sets, ChunkTokenizer(encoder, data))
    except OSError as error:
        what = f"{entry.parent}: the data cache cannot be written ({error.strerror})"
        remedy = "make room and allow writing there, or name another in SHARDTUNE_CACHE"
        raise UserError(f"{what} - {remedy}") from error
    logger.info(f"Data: tokenized in {time.monotonic() - started:.1f} s, cached in {entry}")
    return entry


def _cache_key(sets: dict[str, list[Source]], data: DataConfig, encoder: ChatEncoder) -> str:
    """Return a digest of everything that an entry depends on; UserError for an unreadable file."""
    tokenizer = encoder.tokenizer
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    backend.update(truncation=None, padding=None)  # calls set these two; ours use neither
    code = sorted(Path(__file__).parent.rglob("*.py"))
    facts = encoder.template.facts
    parts = [
        {name: [source.digest() for source in sources] for name, sources in sets.items()},
        [data.columns, data.roles, data.template_options],
        [data.loss_on, data.max_length, data.overflow, data.on_broken],
        [0.0 if data.eval else data.eval_fraction],
        [backend, tokenizer.special_tokens_map, tokenizer.chat_template, encoder.stop_token_ids],
        [asdict(facts), str(encoder.template.date) if facts.adds_date else ""],
        [file.read_text("utf-8") for file in code],
        [importlib.metadata.version(name) for name in ("transformers", "tokenizers", "jinja2")],
    ]
    return xxhash.xxh3_128_hexdigest(json.dumps(parts, sort_keys=True, default=str).encode())


def _damaged_files(entry: Path) -> list[str]:
    """Return the names of the files that are missing or differ from their digests."""
    try:
        recorded = (entry / _DIGESTS).read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return [_DIGESTS]
    return sorted(
        {line.partition("  ")[2] or _DIGESTS for line in {*recorded} ^ {*_digests(entry)}}
    )


def _digests(folder: Path) -> list[str]:
    """Return a line with digest and name for each readable file, except the file of digests."""
    lines = []
    # NFS keeps the bytes of a replaced file that a run maps under a hidden name.
    for file in sorted(each for each in folder.glob("[!.]*") if each.name != _DIGESTS):
        with contextlib.suppress(OSError), file.open("rb") as stream:
            digest = hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()
            lines.append(f"{digest}  {file.name}")
    return lines


@contextlib.contextmanager
def _new_entry(entry: Path) -> Iterator[Path]:
    """Yield a hidden directory to fill. It becomes `entry` when the block ends without error."""
    # The new files replace those of an existing entry. These are equal, since the key decides every
    # byte, or damaged. A process that maps an old file keeps it.
    folder = entry.with_name(f".{entry.name}-{uuid.uuid4().hex}")
    try:
        folder.mkdir(parents=True)
        yield folder
        (folder / _DIGESTS).write_text("".join(f"{line}\n" for line in _digests(folder)), "utf-8")
        for file in folder.iterdir():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        try:
            folder.rename(entry)
        except OSError:
            if not entry.exists():
                raise
            for file in entry.glob("[!.]*"):  # else a strange file would look damaged again
                if file.is_dir():
                    shutil.rmtree(file)
                elif not (folder / file.name).exists():
                    file.unlink()
            for file in folder.iterdir():
                file.replace(entry / file.name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def open_prepared(entry: Path) -> PreparedData:
    """Map an entry that `prepare_data` returned; any number of processes may."""
    meta = json.loads((entry / "meta.json").read_text(encoding="utf-8"))
    sets = {name: TokenDataset(entry, name) for name in meta.pop("sets")}
    return PreparedData(sets, **meta)


class _SetWriter:
    """Appends the sequences of one set to its files and sums their counts."""

    def __init__(self, folder: Path, name: str, n_sources: int) -> None:
        self._files = {column: folder / f"{name}.{column}" for column in _COLUMNS}
        self._digests = {column: xxhash.xxh3_128() for column in _DIGESTED}
        if n_sources > 1:
            self._digests["source"] = xxhash.xxh3_128()
        self.sums, self.hashes = RecordSums(), RecordHashes()
        self.n_tokens = self.n_trained = 0
        self._n_by_weight: Counter[float] = Counter()  # trained tokens whose weight is not 1
        self._n_between = 0

    def add(self, chunk: SetChunk, source: int) -> None:
        self.sums.include(chunk)
        self.hashes.add(chunk.hashes)
        if not chunk.sequences:
            return
        tokens, of_sequences, record = zip(*chunk.sequences, strict=True)
        lengths, weights = np.array([len(ids) for ids in tokens]), np.concatenate(of_sequences)
        between = np.flatnonzero((weights > 0) & (weights < 1))
        columns = {
            "tokens": np.concatenate(tokens),
            "trained": weights > 0,
            "starts": self.n_tokens + lengths.cumsum() - lengths,
            "lengths": lengths,
            "trained_counts": [np.count_nonzero(each) for each in of_sequences],
            "trained_weights": [each.sum(dtype=np.float64) for each in of_sequences],
            "record": record,
            "source": np.full(len(lengths), source),
            "weighted": self.n_tokens + between,
            "weights": weights[between],
        }
        self._n_between += len(between)
        if len(between):
            if len(self._n_by_weight) < _MOST_WEIGHTS:  # else each token may have its own
                self._n_by_weight.update(weights[between].tolist())
            for column in ("weighted", "weights"):
                self._digests.setdefault(column, xxhash.xxh3_128())
        for column, dtype in _COLUMNS.items():
            values = np.asarray(columns[column], dtype).tobytes()
            with self._files[column].open("ab") as file:
                file.write(values)
            # The key tells whether a checkpoint or another node has the same tokens. It leaves out
            # names of sources and numbers of records.
            if column in self._digests:
                self._digests[column].update(values)
        self.n_tokens += int(lengths.sum())
        self.n_trained += int(sum(columns["trained_counts"]))

    def digest(self) -> str:
        return " ".join(digest.hexdigest() for digest in self._digests.values())

    def lines(self) -> dict[str, int | None]:
        """Return a line of totals, and one for each outcome with the index of its first record."""
        sums = self.sums
        totals = f"{sums.n_records} records in {sums.n_sequences} sequences, {self.n_tokens} tokens"
        lines: dict[str, int | None] = {f"{totals}, {self.n_trained} of them trained": None}
        if self._n_between:
            counts = {str(np.float32(w)): n for w, n in sorted(self._n_by_weight.items())}
            counts["others"] = self._n_between - self._n_by_weight.total()
            counts["1"] = self.n_trained - self._n_between
            said = first_few([f"{weight}: {n}" for weight, n in counts.items() if n], 10)
            lines[f"trained tokens by weight | {said}"] = None
        for (outcome, detail), line in sums.outcomes.lines().items():
            first = sums.first_records[outcome, detail, ""]
            if outcome in TOO_LONG:
                line += f" | data.max_length={sums.longest} holds all"
            if outcome in (Outcome.EMPTY_QUESTION, Outcome.EMPTY_ANSWER):
                line += f" | first: {first.place} - write it, or leave such records out"
            # Most tokens are context that is repeated.
            if 2 * sums.outcomes[outcome, detail, "tokens added"] > self.n_tokens:
                line = f"WARNING: {line} - data.loss_on=last trains the last one alone"
            lines[line] = first.record
        return lines


def _build(folder: Path, sets: dict[str, list[Source]], tokenizer: ChunkTokenizer) -> None:
    """Write the columns of every set, and `meta.json` for `open_prepared`, into `folder`."""
    data = tokenizer.data
    names = [*sets, "eval"] if data.eval is None and data.eval_fraction else list(sets)
    writers = {name: _SetWriter(folder, name, len(sets.get(name, ()))) for name in names}
    sources = {
        (name, i): source for name, of_set in sets.items() for i, source in enumerate(of_set)
    }
    n_bytes = max(1, sum(source.n_bytes for source in sources.values()))
    logged_at = time.monotonic()
    sums = {key: SourceSums(source.key, source.spec) for key, source in sources.items()}
    with contextlib.closing(tokenize_chunks(tokenizer, read_records(sets))) as chunks:
        for tokenized in chunks:
            chunk = tokenized.chunk
            for name, sequences in tokenized.sets.items():
                writers[name].add(sequences, chunk.source)
            sums[chunk.set_name, chunk.source].add(tokenized)
            if time.monotonic() - logged_at >= _LOG_EVERY_S:
                logged_at = time.monotonic()
                n_read = sum(each.n_read for each in sums.values())
                done = sum(each.n_bytes for each in sums.values()) / n_bytes
                logger.info(f"Data: {n_read:,} records read, {done:.0%} of the files")
    of_sets = {name: writer.sums for name, writer in writers.items()}
    if problems := problems_of(data, sums, of_sets):
        raise UserError(*problems)
    # Each line, and if it is about records of data.train, the index of the first of these.
    said: dict[str, int | None] = dict.fromkeys(_unread_options(tokenizer, sets["train"]))
    for name, writer in writers.items():
        for line, record in writer.lines().items():
            said[f"data.{name}: {line}"] = record if name == "train" else None
    for key, source in sources.items():
        said |= dict.fromkeys(source.lines(sums[key].n_read, sums[key].files))
    said |= describe_leaks({name: writer.hashes for name, writer in writers.items()})
    for key, source in sources.items():
        for line, record in sums[key].dropped_lines().items():
            said[f"{source.key}: {line}"] = record if key[0] == "train" else None
    digests = " ".join(writer.digest() for writer in writers.values())
    meta = {
        "sets": names,
        "lines": [*said],
        "examples": {line: record for line, record in said.items() if record is not None},
        "key": xxhash.xxh3_128_hexdigest(digests.encode()),
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1), "utf-8")


def _unread_options(tokenizer: ChunkTokenizer, sources: Iterable[Source]) -> Iterator[str]:
    """Yield a sentence for each option that the template does not read."""
    template = tokenizer.encoder.template
    warning = "data.template_options: WARNING: the chat template does not read"
    for option in template.unread_of(tokenizer.data.template_options):
        yield f"{warning} {option}"
    for source in sources:
        for option in template.unread_of(source.template_options):
            yield f"{warning} {option} of {source.key}"
