"""`data.columns`: the data's names of our fields, and which entries would read an unknown form."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from shardtune.config import RECORD_FIELDS
from shardtune.data.forms.turns import has_turns, parsed
from shardtune.data.records import RecordError

Columns = Mapping[str, str | None]
# Names of questions and answers in other data.
_QUESTIONS = ("question", "query", "problem", "instruction", "prompt", "input")
_ANSWERS = ("answer", "response", "solution", "completion", "output")
_SPEAKERS = {"role", "from", "sender", "author", "speaker"}  # fields of turns, not of records
_TURNS = "messages."  # before the names of fields of turns


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
