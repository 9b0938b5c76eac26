"""Where records come from, and in which order: files, directories of files, hub datasets."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import xxhash

from shardtune.data.hub import hub_problem
from shardtune.data.records import READ_FIELDS, RecordError, kind_of
from shardtune.errors import UserError, first_line

_FILE_KINDS = (".json", ".jsonl", ".parquet")
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(:[^:/]+){0,2}")
_JSON_SPACE = re.compile(r"[ \t\r\n]*")
_RECORDS_PER_CHUNK = 512
_BYTES_PER_CHUNK = 4 << 20
_DIGEST_BLOCK_BYTES = 8 << 20

NumberedText = tuple[int, bytes | RecordError]


@dataclass(frozen=True)
class RecordChunk:
    """Consecutive records of one file, unparsed: cheap to send to another process.

    `rows`: JSON texts, or an Arrow table of the read columns. A row that cannot be cut out of its
    file is a RecordError instead. `numbers`: the line (`.jsonl`) or index of each row in the file.
    `first_record`: the index of the first row in the set `set_name`.
    """

    file: str
    numbers: Sequence[int]
    rows: Sequence[bytes | RecordError] | pyarrow.Table
    n_bytes: int = 0
    unread_columns: tuple[str, ...] = ()
    set_name: str = ""
    first_record: int = 0

    def place(self, i: int) -> str:
        """Return where row `i` stands: `file.jsonl:line`, or `file[index]`."""
        number = self.numbers[i]
        return f"{self.file}:{number}" if self.file.endswith(".jsonl") else f"{self.file}[{number}]"

    def parse(self) -> Iterator[Any]:
        """Yield every row as a Python value; a RecordError for a row that cannot be parsed."""
        if not isinstance(self.rows, pyarrow.Table):
            for text in self.rows:
                yield text if isinstance(text, RecordError) else _parse_json(text)
            return
        features = datasets.Features.from_arrow_schema(self.rows.schema)
        for i in range(len(self.rows)):
            try:
                row = features.decode_example(self.rows.slice(i, 1).to_pylist()[0])
                yield _without_nulls(row, "the record")
            except UnicodeDecodeError:
                yield RecordError("holds text that is not UTF-8 - write its strings as UTF-8")
            except RecordError as error:
                yield error


@dataclass(frozen=True)
class Source:
    """The files or the hub dataset behind one `data.*` key.

    `name`: the key and its value, `data.train=PATH`. `files`: sorted by name. `ignored`: names in
    the directory that do not hold records.
    """

    name: str
    files: tuple[Path, ...] = ()
    ignored: tuple[str, ...] = ()
    hub_name: str = ""
    hub: datasets.Dataset | None = None

    @property
    def n_bytes(self) -> int:
        return sum(file.stat().st_size for file in self._stored_files())

    def digest(self) -> str:
        """Hash every stored byte in order; a renamed or moved copy has the same digest.

        Raises:
            UserError: a file cannot be read.
        """
        n_records = len(self.hub) if self.hub is not None else ""
        total = xxhash.xxh3_128(f"{self.hub_name} {n_records}".encode())
        for file in self._stored_files():
            digest = xxhash.xxh3_128()
            try:
                with file.open("rb") as stream:
                    while block := stream.read(_DIGEST_BLOCK_BYTES):
                        digest.update(block)
            except OSError as error:
                raise UserError(
                    f"{file}: cannot be read ({error.strerror}) - make it readable"
                ) from error
            total.update(f"{file.suffix} {digest.hexdigest()} ".encode())
        return total.hexdigest()

    def chunks(self, set_name: str) -> Iterator[RecordChunk]:
        """Yield all records in order, as those of the set `set_name`. Blank lines are skipped."""
        first_record = 0
        for chunk in self._chunks():
            yield replace(chunk, set_name=set_name, first_record=first_record)
            first_record += len(chunk.numbers)

    def _chunks(self) -> Iterator[RecordChunk]:
        if self.hub is not None:
            yield from _hub_chunks(self.hub, self.hub_name, self.n_bytes)
        for file in self.files:
            if file.suffix == ".parquet":
                yield from _parquet_chunks(file)
            else:
                texts = _lines(file) if file.suffix == ".jsonl" else _json_values(file)
                yield from _text_chunks(str(file), texts)

    def _stored_files(self) -> list[Path]:
        if self.hub is not None:
            return [Path(entry["filename"]) for entry in self.hub.cache_files]
        return list(self.files)


def find_source(key: str, spec: str) -> Source:
    """Return the source that the value `spec` of the configuration key `key` names.

    Raises:
        UserError: nothing has that name, or it does not hold records.
    """
    name, path, kinds = f"{key}={spec}", Path(spec), ", ".join(_FILE_KINDS)
    if path.is_file():
        if path.suffix not in _FILE_KINDS:
            raise UserError(f"{name}: a {path.suffix or 'nameless'} file - use one of {kinds}")
        return Source(name, files=(path,))
    if path.is_dir():
        entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
        files = tuple(entry for entry in entries if entry.suffix in _FILE_KINDS and entry.is_file())
        if not files:
            raise UserError(f"{name}: no {kinds} file in this directory - put the records there")
        return Source(name, files, tuple(entry.name for entry in entries if entry not in files))
    if path.suffix in _FILE_KINDS or not _HUB_NAME.fullmatch(spec):
        raise UserError(f"{name}: no such file or directory - correct the path")
    return _hub_source(name, spec)


def _parse_json(text: bytes) -> Any:
    try:
        value = json.loads(text.decode("utf-8"))
        if b"\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        return RecordError(f"invalid JSON at column {error.colno}: {error.msg} - repair this line")
    except UnicodeDecodeError as error:
        return RecordError(
            f"byte {error.start + 1} of the line is not UTF-8 - write the file as UTF-8"
        )
    except UnicodeEncodeError:
        return RecordError(
            "holds half of a surrogate pair (\\ud800 to \\udfff) - repair the escape"
        )
    except (ValueError, RecursionError) as error:
        return RecordError(f"JSON that cannot be read ({error}) - repair this line")
    return value


def _without_nulls(value: Any, name: str) -> Any:
    """Drop the keys that hold None: Arrow gives every struct of a column the keys of all.

    Raises:
        RecordError: `value`, which stands under the key `name`, holds what JSON cannot.
    """
    if isinstance(value, dict):
        return {key: _without_nulls(item, key) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item, name) for item in value]
    if value is not None and not isinstance(value, (str, int, float)):
        raise RecordError(f"{name} is {kind_of(value)} - write text or numbers")
    return value


def _lines(file: Path) -> Iterator[NumberedText]:
    """Yield the lines that are not blank. Only `\\n` ends one: JSON strings may hold the rest."""
    try:
        with file.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if line := line.strip():
                    yield number, line
    except OSError as error:
        yield 0, RecordError(f"cannot be read ({error.strerror}) - make it readable")


def _json_values(file: Path) -> Iterator[NumberedText]:
    """Yield the elements of the array that the file holds, or its values one after the other.

    The text of the whole file is in memory meanwhile, its values are not.
    """
    number = 0
    try:
        text = file.read_text(encoding="utf-8-sig")
        at = _skip_space(text, 0)
        in_array = text.startswith("[", at)
        at = _skip_space(text, at + in_array)
        while at < len(text) and not text.startswith("]", at):
            end = json.JSONDecoder().raw_decode(text, at)[1]
            yield number, text[at:end].encode("utf-8")
            number += 1
            at = _skip_space(text, end)
            if in_array and not text.startswith("]", at):
                if not text.startswith(",", at):
                    raise json.JSONDecodeError("Expecting ',' or ']'", text, at)
                at = _skip_space(text, at + 1)
                if text.startswith("]", at):
                    what = "Illegal trailing comma before end of array"
                    raise json.JSONDecodeError(what, text, at)
        if not text.startswith("]" * in_array, at) or _skip_space(text, at + in_array) < len(text):
            raise json.JSONDecodeError("Expecting one array, or objects alone", text, at)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        yield number, RecordError(f"invalid JSON at {where}: {error.msg} - repair the file")
    except (ValueError, RecursionError, OSError) as error:
        yield number, RecordError(f"cannot be read ({first_line(error)}) - write it as UTF-8 JSON")


def _skip_space(text: str, at: int) -> int:
    match = _JSON_SPACE.match(text, at)
    return match.end() if match else at


def _text_chunks(name: str, texts: Iterable[NumberedText]) -> Iterator[RecordChunk]:
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


def _parquet_chunks(file: Path) -> Iterator[RecordChunk]:
    start = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as parquet:
            schema = parquet.schema_arrow
            read, unread = _split_columns(schema.names)
            datasets.Features.from_arrow_schema(
                pyarrow.schema([schema.field(name) for name in read])
            )
            bytes_per_row = file.stat().st_size / max(1, parquet.metadata.num_rows)
            for batch in parquet.iter_batches(_RECORDS_PER_CHUNK, columns=read):
                numbers = range(start, start + batch.num_rows)
                start = numbers.stop
                table = pyarrow.Table.from_batches([batch])
                n_bytes = round(len(numbers) * bytes_per_row)
                yield RecordChunk(str(file), numbers, table, n_bytes, unread)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        problem = RecordError(f"cannot be read ({first_line(error)}) - write the file again")
        yield RecordChunk(str(file), [start], [problem])


def _hub_source(name: str, spec: str) -> Source:
    dataset_name, config, split = (*spec.split(":"), "", "")[:3]
    unreachable = hub_problem()
    try:
        dataset = datasets.load_dataset(dataset_name, config or None, split=split or "train")
    except (OSError, ValueError, datasets.exceptions.DatasetsError, RuntimeError) as error:
        reason = f"the hub cannot be reached: {unreachable}" if unreachable else first_line(error)
        raise UserError(
            f"{name}: neither a file or directory here nor a dataset of the hub that can be opened "
            f"({reason}) - correct the name, connect to the hub, or name a local file or directory"
        ) from error
    return Source(name, hub_name=spec, hub=dataset)


def _hub_chunks(dataset: datasets.Dataset, name: str, n_bytes: int) -> Iterator[RecordChunk]:
    read, unread = _split_columns(dataset.column_names)
    start = 0
    for table in dataset.select_columns(read).with_format("arrow").iter(_RECORDS_PER_CHUNK):
        numbers = range(start, start + len(table))
        start = numbers.stop
        yield RecordChunk(name, numbers, table, n_bytes * len(numbers) // len(dataset), unread)


def _split_columns(names: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Separate the columns that are read. Others may hold images, which need no decoding."""
    return [n for n in names if n in READ_FIELDS], tuple(n for n in names if n not in READ_FIELDS)
