"""Raw training records: where they come from, in which order, and what a valid one looks like."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import xxhash

from shardtune.data.messages import REASONING_KEYS
from shardtune.errors import UserError

READ_FIELDS = ("messages", "tools", "prompt", "completion", "text")
_FORMS = "messages, prompt and completion, or text"
_FILE_KINDS = (".json", ".jsonl", ".parquet")
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(:[^:/]+){0,2}")
_JSON_SPACE = re.compile(r"[ \t\r\n]*")
_RECORDS_PER_CHUNK = 512
_BYTES_PER_CHUNK = 4 << 20
_DIGEST_BLOCK_BYTES = 8 << 20


class RecordError(ValueError):
    """A record that cannot be used: `<what> - <what to do>`."""


@dataclass(frozen=True)
class Chunk:
    """Consecutive records of one file, not parsed yet, so that they travel to another process cheaply.

    `rows` holds JSON texts, or is an Arrow table with the read columns; a row that could not even be cut out of its
    file is the RecordError that says why. `numbers` are their lines (`.jsonl`) or indices, one a row. `first_record`
    is the index of the first of them in the set `set_name`.
    """

    file: str
    numbers: Sequence[int]
    rows: Sequence[bytes | RecordError] | pyarrow.Table
    n_bytes: int = 0
    unread_columns: tuple[str, ...] = ()
    set_name: str = ""
    first_record: int = 0

    def place(self, i: int) -> str:
        """Where row `i` stands, as an editor or a user finds it."""
        number = self.numbers[i]
        return f"{self.file}:{number}" if self.file.endswith(".jsonl") else f"{self.file}[{number}]"

    def parsed(self) -> Iterator[Any]:
        """Every row as a Python value; a RecordError where it cannot be read."""
        if isinstance(self.rows, pyarrow.Table):
            features = datasets.Features.from_arrow_schema(self.rows.schema)
            for i in range(len(self.rows)):
                try:
                    yield _plain(features.decode_example(self.rows.slice(i, 1).to_pylist()[0]))
                except UnicodeDecodeError:
                    yield RecordError("holds text that is not UTF-8 - write its strings as UTF-8")
                except RecordError as error:
                    yield error
        else:
            for text in self.rows:
                yield text if isinstance(text, RecordError) else _parsed_json(text)


@dataclass(frozen=True)
class Source:
    """The files behind one `data.*` key in the order of their names, or one hub dataset."""

    files: tuple[Path, ...] = ()
    hub_name: str = ""
    hub: datasets.Dataset | None = None

    @property
    def n_bytes(self) -> int:
        return sum(file.stat().st_size for file in self._stored_files())

    def digest(self) -> str:
        """Of every byte the records are made from, in their order; the same for a renamed or moved copy.

        Raises:
            UserError: a file cannot be read.
        """
        total = xxhash.xxh3_128(
            f"{self.hub_name} {len(self.hub) if self.hub is not None else ''}".encode()
        )
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

    def chunks(self, set_name: str) -> Iterator[Chunk]:
        """All records in order, as those of the set `set_name`; blank lines are skipped."""
        first_record = 0
        for chunk in self._chunks():
            yield replace(chunk, set_name=set_name, first_record=first_record)
            first_record += len(chunk.numbers)

    def _chunks(self) -> Iterator[Chunk]:
        if self.hub is not None:
            yield from _hub_chunks(self.hub, self.hub_name, self.n_bytes)
        for file in self.files:
            if file.suffix == ".parquet":
                yield from _parquet_chunks(file)
            else:
                yield from _text_chunks(
                    str(file), _lines(file) if file.suffix == ".jsonl" else _json_values(file)
                )

    def _stored_files(self) -> list[Path]:
        if self.hub is not None:
            return [Path(entry["filename"]) for entry in self.hub.cache_files]
        return list(self.files)


def find_source(key: str, spec: str, say: Callable[[str], None]) -> Source:
    """What the value `spec` of the configuration key `key` names.

    Raises:
        UserError: nothing of that name, or nothing in it that holds records.
    """
    path = Path(spec)
    if path.is_file():
        if path.suffix not in _FILE_KINDS:
            raise UserError(
                f"{key}={spec}: a {path.suffix or 'nameless'} file - use one of {', '.join(_FILE_KINDS)}"
            )
        return Source(files=(path,))
    if path.is_dir():
        entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
        files = tuple(entry for entry in entries if entry.suffix in _FILE_KINDS and entry.is_file())
        others = [entry.name for entry in entries if entry not in files]
        if not files:
            raise UserError(
                f"{key}={spec}: no {', '.join(_FILE_KINDS)} file in this directory - put the records there"
            )
        if others:
            say(
                f"{key}: ignored in {spec}, being no {', '.join(_FILE_KINDS)} file: {_named(others)}"
            )
        return Source(files=files)
    if path.suffix in _FILE_KINDS or not _HUB_NAME.fullmatch(spec):
        raise UserError(f"{key}={spec}: no such file or directory - correct the path")
    return _hub_source(key, spec)


def check_record(value: Any) -> tuple[dict[str, Any], list[str]]:
    """The fields of a record that are used, without empty ones and with `tools` as a list, and the names of the rest.

    The result holds `messages` or `prompt` and `completion` or `text`, and perhaps `tools`.

    Raises:
        RecordError: no valid record.
    """
    if isinstance(value, RecordError):
        raise value
    if not isinstance(value, dict):
        raise RecordError(f"a record is a JSON object, this is {_kind(value)} - write {_FORMS}")
    present = {name: field for name, field in value.items() if field is not None}
    forms = [
        form
        for form in (("messages",), ("prompt", "completion"), ("text",))
        if present.keys() >= set(form)
    ]
    if len(forms) > 1:
        raise RecordError(
            f"has {' and '.join('+'.join(form) for form in forms)} - keep one of them"
        )
    if not forms:
        raise RecordError(f"has {_missing(present)} - write {_FORMS}")
    form = forms[0]
    record = {name: present[name] for name in form}
    if form == ("messages",):
        _check_messages("messages", record["messages"])
    elif form == ("text",):
        _check_text("text", record["text"])
    elif isinstance(record["prompt"], list) or isinstance(record["completion"], list):
        _check_messages("prompt", record["prompt"])
        _check_messages("completion", record["completion"])
    else:
        _check_text("prompt", record["prompt"])
        _check_text("completion", record["completion"])
    if "tools" in present and any(isinstance(field, list) for field in record.values()):
        record["tools"] = _checked_tools(present["tools"])
    return record, [
        name for name in value if name not in record and (present.get(name) is not None)
    ]


def _check_messages(name: str, messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise RecordError(
            f"{name} is {_kind(messages)} - write a list of messages, each with role and content"
        )
    for i, message in enumerate(messages):
        where = f"{name}[{i}]"
        if not isinstance(message, dict):
            raise RecordError(
                f"{where} is {_kind(message)} - write an object with role and content"
            )
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise RecordError(
                f"{where} has {'no role' if role is None else f'{_kind(role)} as its role'} - "
                "name its role (system, user, assistant, tool)"
            )
        _check_calls(f"{where}.tool_calls", message.get("tool_calls"))
        _check_reasoning(where, message)
        if content is None:
            if not message.get("tool_calls"):
                raise RecordError(
                    f"{where} ({role}) has neither content nor tool_calls - give it one of them"
                )
        elif isinstance(content, list):
            if not all(
                isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
            ):
                raise RecordError(
                    f'{where}.content has a part that is no text - write parts as {{"type": "text", "text": "..."}}'
                )
        elif not isinstance(content, str):
            raise RecordError(
                f"{where}.content is {_kind(content)} - write a string or a list of text parts"
            )


def _check_calls(where: str, calls: Any) -> None:
    if calls is not None and not (
        isinstance(calls, list) and all(isinstance(call, dict) for call in calls)
    ):
        raise RecordError(f"{where} is {_kind(calls)} - write a list of objects")
    for i, call in enumerate(calls or []):
        function = call.get("function", call)
        if not isinstance(function, dict):
            raise RecordError(
                f"{where}[{i}].function is {_kind(function)} - write an object with name and arguments"
            )
        name, arguments = function.get("name"), function.get("arguments")
        if not isinstance(name, str) or not name:
            raise RecordError(
                f"{where}[{i}] has {_kind(name)} as the function's name - write a string"
            )
        if arguments is not None and not isinstance(arguments, (dict, str)):
            raise RecordError(
                f"{where}[{i}] has {_kind(arguments)} as its arguments - write an object"
            )


def _check_reasoning(where: str, message: dict[str, Any]) -> None:
    given = {key: message[key] for key in REASONING_KEYS if message.get(key) is not None}
    for key, reasoning in given.items():
        if not isinstance(reasoning, str):
            raise RecordError(f"{where}.{key} is {_kind(reasoning)} - write a string")
    if len(set(given.values())) > 1:
        raise RecordError(
            f"{where} has different texts as {' and '.join(given)} - keep one of them"
        )


def _check_text(name: str, text: Any) -> None:
    if not isinstance(text, str):
        raise RecordError(f"{name} is {_kind(text)} - write a string")


def _checked_tools(tools: Any) -> list[Any]:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise RecordError(
                f"tools is a string that is no JSON ({error}) - write a list of tools"
            ) from error
    if not isinstance(tools, list):
        raise RecordError(f"tools is {_kind(tools)} - write a list of tools")
    return tools


def _missing(present: Mapping[str, Any]) -> str:
    if "prompt" in present:
        return "a prompt and no completion"
    if "completion" in present:
        return "a completion and no prompt"
    return (
        f"none of {', '.join(READ_FIELDS)}, but {_named(sorted(present))}"
        if present
        else "no field"
    )


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {
        str: "string",
        list: "list",
        dict: "object",
        bool: "boolean",
        int: "number",
        float: "number",
    }
    kind = next((name for cls, name in kinds.items() if isinstance(value, cls)), None)
    if kind is None:
        return type(value).__name__  # only Arrow has others: bytes, datetime, Decimal
    empty = isinstance(value, (str, list, dict)) and not value
    return f"an empty {kind}" if empty else f"an {kind}" if kind == "object" else f"a {kind}"


def _named(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def _parsed_json(text: bytes) -> Any:
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


def _plain(value: Any, name: str = "the record") -> Any:
    """`value`, of the key `name`, without the keys that hold None: Arrow gives every struct of a column all keys.

    Raises:
        RecordError: something in it is nothing that JSON can hold.
    """
    if isinstance(value, dict):
        return {key: _plain(item, key) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_plain(item, name) for item in value]
    if value is not None and not isinstance(value, (str, int, float)):
        raise RecordError(f"{name} is {_kind(value)} - write text or numbers")
    return value


def _lines(file: Path) -> Iterator[tuple[int, bytes | RecordError]]:
    """Numbered lines that are not blank. Only `\\n` ends one: JSON strings may hold every other separator."""
    try:
        with file.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if line := line.strip():
                    yield number, line
    except OSError as error:
        yield 0, RecordError(f"cannot be read ({error.strerror}) - make it readable")


def _json_values(file: Path) -> Iterator[tuple[int, bytes | RecordError]]:
    """Numbered elements of the array that the file holds, or its values one behind the other.

    The text of the whole file is in memory meanwhile, its values are not; `.jsonl` is read line by line.
    """
    number = 0
    try:
        text = file.read_text(encoding="utf-8-sig")
        at = _past_space(text, 0)
        in_array = text.startswith("[", at)
        at = _past_space(text, at + in_array)
        while at < len(text) and not text.startswith("]", at):
            end = json.JSONDecoder().raw_decode(text, at)[1]
            yield number, text[at:end].encode("utf-8")
            number += 1
            at = _past_space(text, end)
            if in_array and not text.startswith("]", at):
                if not text.startswith(",", at):
                    raise json.JSONDecodeError("Expecting ',' or ']'", text, at)
                at = _past_space(text, at + 1)
                if text.startswith("]", at):
                    raise json.JSONDecodeError(
                        "Illegal trailing comma before end of array", text, at
                    )
        if not text.startswith("]" * in_array, at) or _past_space(text, at + in_array) < len(text):
            raise json.JSONDecodeError("Expecting one array, or objects alone", text, at)
    except json.JSONDecodeError as error:
        yield (
            number,
            RecordError(
                f"invalid JSON at line {error.lineno}, column {error.colno}: {error.msg} - repair the file"
            ),
        )
    except (ValueError, RecursionError, OSError) as error:
        yield number, RecordError(f"cannot be read ({first_line(error)}) - write it as UTF-8 JSON")


def _past_space(text: str, at: int) -> int:
    match = _JSON_SPACE.match(text, at)
    return match.end() if match else at


def _text_chunks(name: str, rows: Iterable[tuple[int, bytes | RecordError]]) -> Iterator[Chunk]:
    numbers: list[int] = []
    texts: list[bytes | RecordError] = []
    n_bytes = 0
    for number, text in rows:
        numbers.append(number)
        texts.append(text)
        n_bytes += 0 if isinstance(text, RecordError) else len(text) + 1
        if len(texts) == _RECORDS_PER_CHUNK or n_bytes >= _BYTES_PER_CHUNK:
            yield Chunk(name, numbers, texts, n_bytes)
            numbers, texts, n_bytes = [], [], 0
    if texts:
        yield Chunk(name, numbers, texts, n_bytes)


def _parquet_chunks(file: Path) -> Iterator[Chunk]:
    start = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as parquet:
            read, unread = _columns(parquet.schema_arrow.names)
            datasets.Features.from_arrow_schema(
                pyarrow.schema([parquet.schema_arrow.field(name) for name in read])
            )
            bytes_per_row = file.stat().st_size / max(1, parquet.metadata.num_rows)
            for batch in parquet.iter_batches(_RECORDS_PER_CHUNK, columns=read):
                numbers = range(start, start + batch.num_rows)
                start = numbers.stop
                table = pyarrow.Table.from_batches([batch])
                yield Chunk(str(file), numbers, table, round(len(numbers) * bytes_per_row), unread)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        yield Chunk(
            str(file),
            [start],
            [RecordError(f"cannot be read ({first_line(error)}) - write the file again")],
        )


def _hub_source(key: str, spec: str) -> Source:
    name, config, split = (*spec.split(":"), "", "")[:3]
    remedy = "correct the name, connect to the hub, or name a local file or directory"
    try:
        dataset = datasets.load_dataset(name, config or None, split=split or "train")
    except (OSError, ValueError, datasets.exceptions.DatasetsError, RuntimeError) as error:
        raise UserError(
            f"{key}={spec}: neither a file or directory here nor a dataset of the hub that can be opened "
            f"({first_line(error)}) - {remedy}"
        ) from error
    return Source(hub_name=spec, hub=dataset)


def _hub_chunks(dataset: datasets.Dataset, name: str, n_bytes: int) -> Iterator[Chunk]:
    read, unread = _columns(dataset.column_names)
    start = 0
    for table in dataset.select_columns(read).with_format("arrow").iter(_RECORDS_PER_CHUNK):
        numbers = range(start, start + len(table))
        start = numbers.stop
        yield Chunk(name, numbers, table, n_bytes * len(numbers) // len(dataset), unread)


def _columns(names: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """The columns that are read, and the others: those may hold images, which nobody should decode."""
    return [name for name in names if name in READ_FIELDS], tuple(
        name for name in names if name not in READ_FIELDS
    )


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
