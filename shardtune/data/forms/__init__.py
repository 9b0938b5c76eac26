"""The forms of records: a module for each, and the row of `_FORMS` that makes it one.

`data.columns` has the data's names of our fields; a form that is unknown gets a proposal for it.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from shardtune.config import RECORD_FIELDS
from shardtune.data.forms import (
    alpaca,
    messages,
    plain_text,
    prompt_completion,
    sharegpt,
    token_rows,
)
from shardtune.data.forms.turns import (
    BESIDE_TURNS,
    has_turns,
    with_what_stands_beside,
)
from shardtune.data.records import (
    Conversation,
    Fields,
    FileError,
    Note,
    Outcome,
    Record,
    RecordError,
    is_media,
    parsed,
    require,
    shown_name,
)
from shardtune.errors import first_few

Columns = Mapping[str, str | None]
# Names of questions and answers in other data.
_QUESTIONS = ("question", "query", "problem", "instruction", "prompt", "input")
_ANSWERS = ("answer", "response", "solution", "completion", "output")
_SPEAKERS = {"role", "from", "sender", "author", "speaker"}  # fields of turns, not of records
_TURNS = "messages."  # before the names of fields of turns


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
    Form(messages.FIELDS, messages.read),
    Form(sharegpt.FIELDS, sharegpt.read, name=sharegpt.NAME),
    Form(prompt_completion.FIELDS, prompt_completion.read, as_chat=prompt_completion.AS_CHAT),
    Form(alpaca.FIELDS, alpaca.read, alpaca.BESIDE, alpaca.NAME),
    Form(plain_text.FIELDS, plain_text.read, has_answers=False),
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


def read_fields(columns: Columns) -> frozenset[str]:
    """Return the data's names of all fields that are read; `columns`: `data.columns`."""
    named = {field: columns.get(field, field) for field in RECORD_FIELDS if "." not in field}
    return frozenset(name for pair in named.items() if pair[1] for name in pair if name)


def rename_fields(value: Mapping[str, Any], columns: Columns) -> dict[str, Any]:
    """Return the fields that are not null by our names; one that is mapped to None is left out."""
    # A record without the named field keeps its own one of our name: sources may differ in form.
    present = {name: field for name, field in value.items() if field is not None}
    if not columns:
        return present
    in_turns = {ours.removeprefix(_TURNS): name for ours, name in columns.items() if _TURNS in ours}
    columns = {ours: name for ours, name in columns.items() if _TURNS not in ours}
    renamed = {ours: present[name] for ours, name in columns.items() if name in present}
    read = {*columns.values(), *(ours for ours, name in columns.items() if name is None)}
    kept = {name: field for name, field in present.items() if name not in read}
    for ours in kept.keys() & renamed.keys():
        what = f"has {ours} and {columns[ours]}, which data.columns reads as {ours}"
        raise RecordError(f"{what} - rename one in the data, or leave data.columns without it")
    fields = kept | renamed
    if in_turns and isinstance(turns := parsed("messages", fields.get("messages")), list):
        fields["messages"] = [
            rename_fields(turn, in_turns) if isinstance(turn, dict) else turn for turn in turns
        ]
    return fields


def names_in(value: Any, columns: Columns) -> set[str]:
    """Return the names of a record's fields, with those of turns if `columns` reach there."""
    if not columns or not isinstance(value, dict):
        return set()
    names, turns = {name for name in value if value[name] is not None}, None
    if any(_TURNS in ours for ours in columns):
        turns = value.get(columns.get("messages") or "messages")
    turns = turns if isinstance(turns, list) else []
    return names.union(*(turn for turn in turns if isinstance(turn, dict)))


def proposed(fields: Mapping[str, Any]) -> str:
    """Return how `data.columns` could read a record of an unknown form, or an empty text."""
    turns = [name for name, value in fields.items() if has_turns(value)]
    texts = [name for name, value in fields.items() if isinstance(value, str)]
    if {"chosen", "rejected"} <= fields.keys():  # pairs of preferences
        is_answer = ("prompt" in texts) == ("chosen" in texts) and "prompt" in fields
        kind = "completion" if is_answer else "text" if "chosen" in texts else "messages"
        return f"write {_entry({kind: 'chosen'})} to train the chosen one"
    answer = _first(_ANSWERS, texts)
    if answer and (question := _first(_QUESTIONS, turns)):
        return f"write {_entry({'prompt': question, 'completion': answer})}"
    if turns:
        kind = "messages" if "role" in fields[turns[0]][0] else "conversations"
        return f"write {_entry({kind: turns[0]})}"
    question = _first(_QUESTIONS, texts)
    if not (question and answer):
        if len(texts) != 2:
            return ""
        question, answer = texts  # a table writes the question first
    context = {"input": "context"} if "context" in texts else {}
    chat = _entry({"instruction": question, **context, "output": answer})
    remedy = f"write {chat} to read them as a chat"
    if context or ("input" in texts and question != "input"):  # plain texts would lose it
        return remedy
    return f"{remedy}, or {_entry({'prompt': question, 'completion': answer})} as plain texts"


def _first(names: Iterable[str], among: Iterable[str]) -> str:
    return next((name for name in names if name in among), "")


def _entry(columns: Mapping[str, str]) -> str:
    named = (f"{ours}: {_in_yaml(name)}" for ours, name in columns.items() if ours != name)
    return f'"data.columns={{{", ".join(named)}}}"'


def _in_yaml(name: str) -> str:
    """Return a name as YAML reads it within braces."""
    is_word = name.lower() in ("null", "true", "false")
    is_plain = re.fullmatch(r"[^\W\d]([\w .-]*\w)?", name) and not is_word
    return name if is_plain else "'{}'".format(name.replace("'", "''"))


def list_of_records(value: Mapping[str, Any], columns: Columns) -> str:
    """Return the field of an object that wraps the records; "" if it has none."""
    if value.keys() & read_fields(columns):
        return ""
    for name, field in value.items():
        if field and isinstance(field, list) and all(isinstance(each, dict) for each in field):
            return name if not any(each.keys() & _SPEAKERS for each in field) else ""
    return ""
