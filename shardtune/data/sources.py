"""Where records come from, and in which order: files, directories of files, hub datasets."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import xxhash

from shardtune.data.hub import hub_problem
from shardtune.data.records import RecordError, read_fields
from shardtune.errors import UserError, first_line, missing_directory

_FILE_KINDS = (".json", ".jsonl", ".parquet")
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(:[^:/]+){0,2}")
_RECORDS_PER_CHUNK = 512
_BYTES_PER_CHUNK = 4 << 20


@dataclass(frozen=True)
class RecordChunk:
    """Consecutive records of one file, unparsed: cheap to send to another process.

    `rows`: JSON texts, or an Arrow table of the read columns; one RecordError if the file cannot be
    read from here on. `numbers`: the line (`.jsonl`) or index of each row in the file.
    `first_record`: the index of the first row in the set `set_name`, of whose sources `source` is
    the index. `loss_on`: that of the source, if it has its own.
    """

    file: str
    numbers: Sequence[int]
    rows: Sequence[bytes | RecordError] | pyarrow.Table
    n_bytes: int = 0
    unread_columns: tuple[str, ...] = ()
    set_name: str = ""
    source: int = 0
    first_record: int = 0
    loss_on: str | None = None

    def first(self, n: int) -> RecordChunk:
        """Return the first `n` rows."""
        return replace(self, numbers=self.numbers[:n], rows=self.rows[:n])

    def place(self, i: int) -> str:
        """Return where row `i` stands: `file.jsonl:line`, or `file[index]`."""
        number = self.numbers[i]
        return f"{self.file}:{number}" if self.file.endswith(".jsonl") else f"{self.file}[{number}]"

    def parse(self) -> Iterator[Any]:
        """Yield every row as a Python value; a RecordError for a row that cannot be parsed."""
        if isinstance(self.rows, pyarrow.Table):
            features = datasets.Features.from_arrow_schema(self.rows.schema)
            for row in self.rows.to_pylist():
                yield _without_nulls(features.decode_example(row))
        else:
            for text in self.rows:
                yield text if isinstance(text, RecordError) else _parse_json(text)


@dataclass(frozen=True)
class Source:
    """The files that `spec`, the value of `key`, names: here, or in the cache of the hub.

    `files`: sorted by name. `ignored`: names in the directory that do not hold records. `loss_on`:
    in place of `data.loss_on`. `max_records`: only so many are read. `fields`: only these are read.
    """

    key: str
    spec: str
    files: tuple[Path, ...] = ()
    ignored: tuple[str, ...] = ()
    hub: datasets.Dataset | None = None
    loss_on: str | None = None
    max_records: int | None = None
    fields: frozenset[str] = read_fields({})

    @property
    def name(self) -> str:
        return f"{self.key}={self.spec}"

    @property
    def n_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    def digest(self) -> str:
        """Hash every stored byte in order, and the options; a moved copy has the same digest.

        Raises:
            UserError: a file cannot be read.
        """
        hub = f"{self.spec} {len(self.hub)}" if self.hub is not None else ""
        total = xxhash.xxh3_128(f"{hub} {self.loss_on} {self.max_records}".encode())
        for file in self.files:
            try:
                with file.open("rb") as stream:
                    digest = hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()
            except OSError as error:
                raise UserError(f"{self.name}: {error} - make the file readable") from error
            total.update(f"{file.suffix} {digest} ".encode())
        return total.hexdigest()

    def chunks(self) -> Iterator[RecordChunk]:
        """Yield the records in order, at most `max_records`. Blank lines are skipped."""
        left = sys.maxsize if self.max_records is None else self.max_records
        for chunk in self._chunks():
            yield chunk.first(left)
            left -= len(chunk.numbers)
            if left <= 0:
                return

    def _chunks(self) -> Iterator[RecordChunk]:
        if self.hub is not None:
            read, unread = _split_columns(self.hub.column_names, self.fields)
            tables = self.hub.select_columns(read).with_format("arrow").iter(_RECORDS_PER_CHUNK)
            bytes_per_row = self.n_bytes / max(1, len(self.hub))
            yield from _table_chunks(self.spec, tables, bytes_per_row, unread)
            return
        for file in self.files:
            if file.suffix == ".parquet":
                yield from _parquet_chunks(file, self.fields)
            else:
                texts = _lines(file) if file.suffix == ".jsonl" else _json_values(file)
                yield from _text_chunks(str(file), texts)


def find_source(key: str, spec: str) -> Source:
    """Return the source that the value `spec` of the configuration key `key` names.

    Raises:
        UserError: nothing has that name, or it does not hold records.
    """
    name, path, kinds = f"{key}={spec}", Path(spec), ", ".join(_FILE_KINDS)
    if path.is_file():
        if path.suffix not in _FILE_KINDS:
            raise UserError(f"{name}: a {path.suffix or 'nameless'} file - use one of {kinds}")
        return Source(key, spec, files=(path,))
    if path.is_dir():
        entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
        files = tuple(entry for entry in entries if entry.suffix in _FILE_KINDS and entry.is_file())
        if not files:
            raise UserError(f"{name}: no {kinds} file in this directory - put the records there")
        ignored = tuple(entry.name for entry in entries if entry not in files)
        return Source(key, spec, files, ignored)
    if path.suffix in _FILE_KINDS or not _HUB_NAME.fullmatch(spec):
        raise UserError(
            f"{name}: no such file or directory{missing_directory(spec)} - correct the path"
        )
    return _hub_source(key, spec)


def _hub_source(key: str, spec: str) -> Source:
    dataset_name, config, split = (*spec.split(":"), "", "")[:3]
    unreachable = hub_problem()
    try:
        dataset = datasets.load_dataset(dataset_name, config or None, split=split or "train")
    except (OSError, ValueError, datasets.exceptions.DatasetsError, RuntimeError) as error:
        reason = f"the hub cannot be reached: {unreachable}" if unreachable else first_line(error)
        raise UserError(
            f"{key}={spec}: neither a file or directory here nor a dataset of the hub that can be "
            f"opened ({reason}) - correct the name, connect to the hub, or name a local file or "
            "directory"
        ) from error
    files = tuple(Path(entry["filename"]) for entry in dataset.cache_files)
    return Source(key, spec, files, hub=dataset)


def read_records(sets: Mapping[str, Sequence[Source]]) -> Iterator[RecordChunk]:
    """Yield the records of every set, numbered through its sources."""
    for set_name, sources in sets.items():
        first_record = 0
        for i, source in enumerate(sources):
            for chunk in source.chunks():
                yield replace(
                    chunk,
                    set_name=set_name,
                    source=i,
                    first_record=first_record,
                    loss_on=source.loss_on,
                )
                first_record += len(chunk.numbers)


def _parse_json(text: bytes) -> Any:
    try:
        value = json.loads(text.decode("utf-8-sig"))
        if b"\\u" in text:  # half of a surrogate pair is not a character
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        problem = str(error).replace("line 1 column", "column")
        return RecordError(f"invalid JSON ({problem}) - repair it")
    return value


def _without_nulls(value: Any) -> Any:
    """Drop the keys that hold None: Arrow gives every struct of a column the keys of all."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank. Only `\\n` ends one: JSON strings may hold the rest."""
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if line := line.strip():
                yield number, line


def _json_values(file: Path) -> Iterator[tuple[int, bytes | RecordError]]:
    """Yield the elements of the array that the file holds, or else its lines, one value each."""
    content = file.read_bytes()
    value = _parse_json(content)
    if isinstance(value, list):
        yield from enumerate(json.dumps(record).encode() for record in value)
    elif content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        yield 0, value
    else:
        yield from enumerate(line for _, line in _lines(file))


def _text_chunks(
    name: str, texts: Iterable[tuple[int, bytes | RecordError]]
) -> Iterator[RecordChunk]:
    numbers: list[int] = []
    rows: list[bytes | RecordError] = []
    n_bytes = 0
    for number, text in texts:
        numbers.append(number)
        rows.append(text)
        n_bytes += 0 if isinstance(text, RecordError) else len(text) + 1
        if len(rows) == _RECORDS_PER_CHUNK or n_bytes >= _BYTES_PER_CHUNK:
            yield RecordChunk(name, numbers, rows, n_bytes)
            numbers, rows, n_bytes = [], [], 0
    if rows:
        yield RecordChunk(name, numbers, rows, n_bytes)


def _table_chunks(
    name: str, tables: Iterable[pyarrow.Table], bytes_per_row: float, unread: tuple[str, ...]
) -> Iterator[RecordChunk]:
    start = 0
    for table in tables:
        numbers = range(start, start + len(table))
        start = numbers.stop
        yield RecordChunk(name, numbers, table, round(len(numbers) * bytes_per_row), unread)


def _parquet_chunks(file: Path, fields: Set[str]) -> Iterator[RecordChunk]:
    try:
        with pyarrow.parquet.ParquetFile(file) as parquet:
            read, unread = _split_columns(parquet.schema_arrow.names, fields)
            batches = parquet.iter_batches(_RECORDS_PER_CHUNK, columns=read)
            tables = (pyarrow.Table.from_batches([batch]) for batch in batches)
            bytes_per_row = file.stat().st_size / max(1, parquet.metadata.num_rows)
            yield from _table_chunks(str(file), tables, bytes_per_row, unread)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        problem = RecordError(f"cannot be read ({first_line(error)}) - write the file again")
        yield RecordChunk(str(file), [0], [problem])


def _split_columns(names: Sequence[str], fields: Set[str]) -> tuple[list[str], tuple[str, ...]]:
    """Separate the columns that are read. Others may hold images, which need no decoding."""
    return [n for n in names if n in fields], tuple(n for n in names if n not in fields)
