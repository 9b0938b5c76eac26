"""The forms of records: a row of `_FORMS` for each, with the function that reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from shardtune.data.forms import readers, token_rows
from shardtune.data.forms.columns import Columns, proposed, rename_fields
from shardtune.data.forms.turns import BESIDE_TURNS, Fields, has_turns, with_what_stands_beside
from shardtune.data.records import (
    Conversation,
    FileError,
    Note,
    Outcome,
    Record,
    RecordError,
    is_media,
    require,
    shown_name,
)
from shardtune.errors import first_few


class Form(NamedTuple):
    """A form of records."""

    fields: tuple[str, ...]  # that make it
    read: Callable[[Fields], Record]  # which may raise RecordError
    beside: tuple[str, ...] = ()  # fields that it reads, too
    name: str = ""  # in the log, of a form of other tools
    has_answers: bool = True  # good or bad ones, by their label
    as_chat: str = ""  # how to read the record where a field that it loses is read
    # Refuses fields beside it that nothing reads: those of all forms, where it is None.
    refuse: Callable[[Mapping[str, Any], Sequence[str]], None] | None = None
    marks: tuple[str, ...] = ()  # only with one of these it is meant beside another form


_FORMS = (
    Form(("messages",), readers.read_messages),
    Form(
        ("conversations",),
        readers.read_sharegpt,
        name="ShareGPT: conversations of from and value",
    ),
    Form(
        ("prompt", "completion"),
        readers.read_completion,
        as_chat='"data.columns={instruction: prompt, output: completion}" to read it in a chat',
    ),
    Form(
        ("instruction", "output"),
        readers.read_alpaca,
        ("input", "history"),
        name="Alpaca: instruction, input and output",
    ),
    Form(("text",), readers.read_text, has_answers=False),
    Form(
        token_rows.FIELDS,
        token_rows.read,
        token_rows.BESIDE,
        has_answers=False,
        refuse=token_rows.refuse,
        marks=token_rows.TRAINED_TOKENS,
    ),
)
# Marks of good answers in data that also has bad ones (KTO). Tables hold them as text.
_LABELS = ("label", "kto_tag")
_GOOD, _BAD = ("true", "1", "1.0"), ("false", "0", "0.0")
_MASKS = {"loss_mask", "loss_weights"}
_READ_ELSEWHERE = {"history", *_MASKS, *BESIDE_TURNS} - {"chat_template_kwargs"}
_MEDIA_TAG = re.compile(r"<(image|video|audio)>")


class ReadRecord(NamedTuple):
    """A record, the names of its fields that nothing reads, and what is unusual about it."""

    record: Record
    unread: list[str]
    notes: list[Note]


def read_record(
    value: Any,
    columns: Columns = MappingProxyType({}),
    roles: Mapping[str, str] = MappingProxyType({}),
    columns_beside: Sequence[str] = (),
) -> ReadRecord:
    """Read a record of any form, by `data.columns` and `data.roles`. Nulls count as absent.

    `columns_beside`: other columns of its table. Raises RecordError where the record is not valid,
    FileError where its file has answers which are not to be trained.
    """
    if isinstance(value, RecordError):
        raise value
    if has_turns(value):
        field = "messages" if "role" in value[0] else "conversations"
        raise RecordError(f'is a list of messages - write {{"{field}": [...]}} around it')
    require(isinstance(value, dict), "the record", value, "a JSON object")
    fields = rename_fields(value, columns)
    form = _form_of(fields)
    notes = [(Outcome.FOREIGN_FORM, form.name)] if form.name else []
    record = form.read(Fields(fields, roles, notes))
    used = {*form.fields, *form.beside}
    if form.has_answers:
        used.update(_good_labels(fields))
    if isinstance(record, Conversation):
        record = with_what_stands_beside(record, fields, notes)
        used.update(BESIDE_TURNS)
    unread = [name for name in fields if name not in used]
    beside = [*unread, *columns_beside]
    form.refuse(fields, beside) if form.refuse else _refuse_lost(form, fields, beside)
    notes += _media_tags(record, beside)
    return ReadRecord(record, unread, notes)


def forms_of(fields: Mapping[str, Any]) -> list[Form]:
    """Return each form in which a record with these fields can be read, or raise RecordError."""
    forms = [form for form in _FORMS if fields.keys() >= {*form.fields}]
    if len(forms) > 1:
        forms = [form for form in forms if not form.marks or fields.keys() & {*form.marks}]
    if forms:
        return forms
    names = ", or ".join(" and ".join(form.fields) for form in _FORMS)
    remedy = proposed(fields) or f"write {names}, or name the data's fields in data.columns"
    has = first_few([shown_name(name) for name in sorted(fields)], 10) or "no field"
    raise RecordError(f"has {has} - {remedy}", kind=remedy)


def _form_of(fields: Mapping[str, Any]) -> Form:
    forms = forms_of(fields)
    if len(forms) > 1:
        names = " or as ".join(" and ".join(form.fields) for form in forms)
        other = forms[0].fields[0] if forms[-1].marks else forms[-1].fields[-1]
        remedy = f"say which field not to read, such as data.columns={{{other}: null}}"
        raise RecordError(f"can be read as {names} - {remedy}")
    return forms[0]


def _good_labels(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield the labels of a good answer; FileError where one says that it is bad."""
    for name in _LABELS:
        label = str(fields.get(name)).lower()
        if label in _BAD:
            keep = f"""jq -c 'select(.{name} | IN(false, 0, "false", "0") | not)' OLD > NEW"""
            what = f"has {name}: {json.dumps(fields[name], default=str)}, a bad answer (KTO)"
            remedy = f"leave those out, in a .jsonl with {keep}, or write {_leaving_out(name)}"
            raise FileError(f"{what} - {remedy} to train all")
        if label in _GOOD:
            yield name


def _refuse_lost(form: Form, fields: Mapping[str, Any], unread: Iterable[str]) -> None:
    """Raise RecordError for a field that other tools read and this form does not."""
    for name in unread:
        if name in _READ_ELSEWHERE and (value := fields.get(name)) and value != "[]":
            what = f"has {name} beside {' and '.join(form.fields)}, which do not use it"
            as_chat = f"{form.as_chat}, or " if form.as_chat and name not in _MASKS else ""
            raise RecordError(f"{what} - write {as_chat}{_leaving_out(name)} to leave it out")
        if name == "role" and not form.has_answers:
            what = "has role beside text, so it is one message of a conversation"
            remedy = f"write records with messages, or {_leaving_out('role')} to train each"
            raise RecordError(f"{what} - {remedy}")


def _leaving_out(name: str) -> str:
    return f'"data.columns={{{name}: null}}"'


def _media_tags(record: Record, unread: Iterable[str]) -> list[Note]:
    """Note a tag such as <image> in a text; refuse one that stands for an unread field."""
    texts = (text for text in _texts(record.content) if "<" in text)
    tag = next((found[0] for text in texts if (found := _MEDIA_TAG.search(text))), "")
    if tag and (media := next(filter(is_media, unread), "")):
        what = f"has {tag} in its text, for its field {media}, and only text is trained"
        raise RecordError(f"{what} - leave such records out")
    return [(Outcome.MEDIA_TAG, tag)] if tag else []


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in a JSON value, the names of fields left out."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)
