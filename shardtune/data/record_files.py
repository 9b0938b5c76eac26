"""Files of records, of each kind and compression, as chunks of records.

A file in a form that cannot be read gives one FileError in place of its records.
"""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow
import pyarrow.parquet

from shardtune.data.forms import Columns, forms_of, has_turns, list_of_records, read_fields
from shardtune.data.records import FileError, RecordError, without_nulls
from shardtune.errors import UserError, first_line
from shardtune.hub import datasets_library
from shardtune.log import logger
from shardtune.paths import COMPRESSIONS, kind_of

if TYPE_CHECKING:
    import datasets

_RECORDS_PER_CHUNK = 512
_BYTES_PER_CHUNK = 4 << 20
_STRINGS = (pyarrow.types.is_string, pyarrow.types.is_large_string, pyarrow.types.is_string_view)
_LISTS = (pyarrow.types.is_list, pyarrow.types.is_large_list)
_COMPRESSED = {b"\x1f\x8b": "gz", b"\x28\xb5": "zst"}  # how such files begin
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_NOT_UTF8 = (
    "not UTF-8 text - if the whole file is in another encoding, write it as UTF-8: iconv -f LATIN1 "
    "-t UTF-8 OLD > NEW, with its own in place of LATIN1; else repair it here"
)

Text = tuple[int, bytes | RecordError]  # the number of a record and its JSON
Tables = Callable[[list[str]], Iterable[pyarrow.Table]]  # of these columns


@dataclass(frozen=True)
class RecordChunk:
    """Consecutive records of one file, unparsed: cheap to send to another process.

    `rows`: JSON texts, or an Arrow table of the read columns; one FileError if the file cannot be
    read from here on. `loss_on`, `template_options`: those of the source, if it has its own.
    """

    file: str
    numbers: Sequence[int]  # the line (`.jsonl`, `.csv`) or index of each row in the file
    rows: Sequence[bytes | RecordError] | pyarrow.Table
    n_bytes: int = 0  # of the file
    unread_columns: tuple[str, ...] = ()
    set_name: str = ""
    source: int = 0  # its index in the set
    first_record: int = 0  # the index of the first row in the set
    loss_on: str | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_table(self) -> bool:
        return isinstance(self.rows, pyarrow.Table)

    @property
    def text_bytes(self) -> int:
        """The bytes of the rows in memory: their file may be compressed."""
        if isinstance(self.rows, pyarrow.Table):
            return int(self.rows.nbytes)
        return sum(_n_bytes((0, row)) for row in self.rows)

    def first(self, n: int) -> RecordChunk:
        """Return the first `n` rows."""
        return replace(self, numbers=self.numbers[:n], rows=self.rows[:n])

    def place(self, i: int) -> str:
        """Return where row `i` stands: `file.jsonl:line`, or `file[index]`."""
        number = self.numbers[i]
        has_lines = kind_of(self.file) in (".jsonl", ".csv")
        return f"{self.file}:{number}" if has_lines else f"{self.file}[{number}]"

    def parse(self) -> Iterator[Any]:
        """Yield every row as a Python value; a RecordError for a row that cannot be parsed."""
        if isinstance(self.rows, pyarrow.Table):
            features = datasets_library().Features.from_arrow_schema(self.rows.schema)
            for row in self.rows.to_pylist():
                yield without_nulls(features.decode_example(row))
        else:
            for text in self.rows:
                yield text if isinstance(text, RecordError) else _parse_json(text)


def require_codec(name: str, file: Path) -> None:
    """Raise UserError where pyarrow cannot decompress this file of the source `name`."""
    codec = COMPRESSIONS.get(file.suffix)
    if codec and not pyarrow.Codec.is_available(codec):
        raise UserError(
            f"{name}: the installed pyarrow cannot read {codec}, as {file.name} needs - "
            f"pip install --force-reinstall --only-binary=:all: pyarrow=={pyarrow.__version__}"
        )


def file_chunks(file: Path, columns: Columns) -> Iterator[RecordChunk]:
    """Yield the records of a file in order; of a table only the columns that are read."""
    if kind_of(file.name) == ".parquet":
        yield from _parquet_chunks(file, columns)
        return
    following = 0 if kind_of(file.name) == ".json" else 1
    try:
        with file.open("rb") as raw, _decompressed(raw, file) as content:
            for chunk in _text_chunks(file, *_texts(file, raw, content, columns)):
                following = chunk.numbers[-1] + 1
                yield chunk
    except (OSError, pyarrow.ArrowException) as error:
        yield RecordChunk(str(file), [following], [_unreadable(error)])


def dataset_chunks(
    name: str, dataset: datasets.Dataset, n_bytes: int, columns: Columns
) -> Iterator[RecordChunk]:
    """Yield the records of a dataset of `n_bytes`, of the columns that are read."""

    def tables(names: list[str]) -> Iterator[pyarrow.Table]:
        return dataset.select_columns(names).with_format("arrow").iter(_RECORDS_PER_CHUNK)

    schema = dataset.features.arrow_schema
    yield from _table_chunks(name, schema, columns, tables, n_bytes / max(1, len(dataset)))


def _table_chunks(
    name: str, schema: pyarrow.Schema, columns: Columns, tables: Tables, bytes_per_row: float
) -> Iterator[RecordChunk]:
    """Yield a chunk for each of the consecutive `tables` of the columns that are read.

    A table without a form of ours is refused by its columns. Those that are not read may hold
    images, which need no decoding.
    """
    fields = read_fields(columns)
    read = [column for column in schema.names if column in fields]
    unread = tuple(column for column in schema.names if column not in fields)
    if problem := _form_problem(schema, columns):
        yield RecordChunk(name, [0], [problem], unread_columns=unread)
        return
    start = 0
    for table in tables(read):
        numbers = range(start, start + len(table))
        start = numbers.stop
        yield RecordChunk(name, numbers, table, round(len(numbers) * bytes_per_row), unread)


def _form_problem(schema: pyarrow.Schema, columns: Columns) -> FileError | None:
    """Return why a table with these columns has no form of records, or None."""
    ours = {name: field for field, name in columns.items() if name and "." not in field}
    ignored = {field for field, name in columns.items() if name is None}
    example = {ours.get(each.name, each.name): _example(each.type) for each in schema}
    example = {name: value for name, value in example.items() if name not in ignored}
    try:
        for form in forms_of(example):
            if form.refuse:  # a column that is refused spoils every record
                form.refuse(example, [*example])
    except RecordError as error:
        return FileError(str(error), kind=error.kind)
    return None


def _example(kind: pyarrow.DataType) -> Any:
    """Return an example of a column's type, with only the parts that tell forms apart."""
    if any(is_kind(kind) for is_kind in _STRINGS):
        return ""
    if any(is_kind(kind) for is_kind in _LISTS):
        return [_example(kind.value_type)]
    if pyarrow.types.is_struct(kind):
        return {field.name: _example(field.type) for field in kind}
    return None


def _parquet_chunks(file: Path, columns: Columns) -> Iterator[RecordChunk]:
    try:
        with pyarrow.parquet.ParquetFile(file) as parquet:

            def tables(names: list[str]) -> Iterator[pyarrow.Table]:
                batches = parquet.iter_batches(_RECORDS_PER_CHUNK, columns=names)
                return (pyarrow.Table.from_batches([batch]) for batch in batches)

            bytes_per_row = file.stat().st_size / max(1, parquet.metadata.num_rows)
            yield from _table_chunks(
                str(file), parquet.schema_arrow, columns, tables, bytes_per_row
            )
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        yield RecordChunk(str(file), [0], [_unreadable(error)])


def _unreadable(error: Exception) -> FileError:
    problem = f"cannot be read ({first_line(error)}) - write the file again"
    return FileError(problem, kind="cannot be read")


def _decompressed(raw: io.BufferedReader, file: Path) -> io.BufferedReader:
    codec = COMPRESSIONS.get(file.suffix)
    return io.BufferedReader(pyarrow.CompressedInputStream(raw, codec)) if codec else raw


def _texts(
    file: Path, raw: io.BufferedReader, content: io.BufferedReader, columns: Columns
) -> tuple[Iterable[Text], Callable[[int], float]]:
    """Return the texts in `content`, and a function from their read bytes to those of `raw`."""
    kind, size = kind_of(file.name), file.stat().st_size
    begin = content.peek(2)[:2]
    problem = None
    if begin in _COMPRESSED:
        remedy = f"name it {file.name}.{_COMPRESSED[begin]}"
        problem = FileError(f"a compressed file - {remedy}", kind="a compressed file")
    elif begin in _UTF16 or b"\0" in begin:
        problem = FileError("UTF-16 text - write it as UTF-8: iconv -f UTF-16 -t UTF-8 OLD > NEW")
    if problem:
        return [(0 if kind == ".json" else 1, problem)], lambda _: size
    if kind == ".json":
        texts = list(_json_values(content.read(), columns))
        total = max(1, sum(map(_n_bytes, texts)))
        return texts, lambda n_read: n_read * size / total
    rows = _csv_rows(file.name, content) if kind == ".csv" else _lines(content)
    return rows, lambda _: raw.tell()


def _n_bytes(text: Text) -> int:
    return 0 if isinstance(text[1], RecordError) else len(text[1]) + 1


def _text_chunks(
    file: Path, texts: Iterable[Text], file_bytes: Callable[[int], float]
) -> Iterator[RecordChunk]:
    texts, n_read, begin = iter(texts), 0, 0
    while part := [*_first_part(texts)]:
        n_read += sum(map(_n_bytes, part))
        end, (numbers, rows) = round(file_bytes(n_read)), zip(*part, strict=True)
        yield RecordChunk(str(file), numbers, rows, end - begin)
        begin = end


def _first_part(texts: Iterator[Text]) -> Iterator[Text]:
    n_bytes = 0
    for text in itertools.islice(texts, _RECORDS_PER_CHUNK):
        yield text
        if (n_bytes := n_bytes + _n_bytes(text)) >= _BYTES_PER_CHUNK:
            return


def _lines(content: Iterable[bytes]) -> Iterator[Text]:
    """Yield the lines that are not blank. Only `\\n` ends one: JSON strings may hold the rest."""
    is_first = True
    for number, line in enumerate(content, start=1):
        if not (line := line.strip()):
            continue
        if is_first and (problem := _whole_file_problem(line)):
            yield number, problem
            return
        is_first = False
        yield number, line


def _whole_file_problem(first: bytes) -> FileError | None:
    """Return why no line of a file is a record, judged by its first line; None if lines may be."""
    value = _parse_json(first)
    if isinstance(value, list) and not has_turns(value):
        return FileError("one JSON array holds the records - name the file .json")
    is_begun = first.endswith((b"{", b"[", b",")) and "Extra data" not in str(value)
    if isinstance(value, RecordError) and is_begun:
        form = "one JSON array" if first.removeprefix(codecs.BOM_UTF8)[:1] == b"[" else "JSON"
        remedy = "name the file .json" if form != "JSON" else "jq -c . OLD > NEW"
        return FileError(f"{form} over many lines, not a record on each - {remedy}")
    return None


def _csv_rows(file_name: str, content: io.BufferedReader) -> Iterator[Text]:
    """Yield an object of texts for each row below the header, with the line on which it begins."""
    csv.field_size_limit(sys.maxsize)
    encodings = itertools.chain(["utf-8-sig"], itertools.repeat("utf-8"))
    lines = map(bytes.decode, content, encodings)
    number = 1
    try:
        header = next(lines, "")
        # A header without a comma may be divided by another character, which divides all rows.
        others = (each for each in ";\t" if each in header and "," not in header)
        if (divider := next(others, ",")) != ",":
            logger.info(f"Data: {divider!r} divides the columns of {file_name}, by its first row")
        rows = csv.reader(itertools.chain([header], lines), delimiter=divider, strict=True)
        names = next(rows, [])
        if twice := next((name for i, name in enumerate(names) if name in names[:i]), None):
            yield 1, FileError(f"two columns have the name {twice} - rename one of them")
            return
        number = rows.line_num + 1
        for values in rows:
            if len(values) == len(names):
                yield number, json.dumps(dict(zip(names, values, strict=True))).encode()
            elif values:
                counts = f"{len(values)} values under a header of {len(names)} columns"
                remedy = f"quote values that hold {divider!r} or newlines"
                yield number, RecordError(f"{counts} - {remedy}")
            number = rows.line_num + 1
    except UnicodeDecodeError:
        yield number, FileError(_NOT_UTF8)
    except csv.Error as error:
        quotes = f"invalid CSV ({error}) - repair the quotes from here on"
        yield number, FileError(quotes, kind="invalid CSV")


def _json_values(content: bytes, columns: Columns) -> Iterator[Text]:
    """Yield the elements of the array that the file holds, or the value, or its lines' values."""
    value = _parse_json(content)
    if isinstance(value, list):
        yield from enumerate(json.dumps(record).encode() for record in value)
    elif content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        yield 0, FileError(str(value))
    elif isinstance(value, dict) and (name := list_of_records(value, columns)):
        path = f".{name}" if name.isidentifier() and name.isascii() else f".[{json.dumps(name)}]"
        jq = f"jq -c {shlex.quote(f'{path}[]')} OLD > NEW"
        yield 0, FileError(f"one JSON object around the records in {name} - {jq}")
    elif isinstance(value, dict):
        yield 0, content.strip()
    else:
        yield from enumerate(text for _, text in _lines(io.BytesIO(content)))


def _parse_json(text: bytes) -> Any:
    try:
        value = json.loads(text.decode("utf-8-sig"))
        if b"\\u" in text:  # half of a surrogate pair is not a character
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError:
        return RecordError(_NOT_UTF8)
    except (ValueError, RecursionError) as error:
        problem = str(error).replace("line 1 column", "column")
        return RecordError(f"invalid JSON ({problem}) - repair it", kind="invalid JSON")
    return value
