"""The shapes of a valid training record, and how each becomes messages, prompts or a text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from shardtune.config import RECORD_FIELDS, DataConfig
from shardtune.data.messages import Message, from_json, is_media, without_nulls
from shardtune.data.outcomes import Note, Outcome, shown_name
from shardtune.data.record_error import FileError, RecordError, require
from shardtune.data.token_rows import BESIDE_TOKENS, TRAINED_TOKENS, read_token_row
from shardtune.data.turns import read_turns
from shardtune.errors import first_few

_SYSTEM = ("system", "system_prompt")  # the same under two names
_BESIDE_TURNS = ("tools", "functions", "chat_template_kwargs", *_SYSTEM)
# The fields that make a form, and the fields that may stand beside them.
_FORMS = {
    ("messages",): _BESIDE_TURNS,
    ("conversations",): _BESIDE_TURNS,
    ("prompt", "completion"): _BESIDE_TURNS,  # if a prompt or a completion has messages
    ("instruction", "output"): ("input", "history", *_BESIDE_TURNS),
    ("text",): (),
    ("input_ids",): BESIDE_TOKENS,
}
# Other names of loss_mask.
_TOKEN_MASKS = ("assistant_masks", "assistant_mask", "completion_mask", "response_mask")
# Marks of good answers in data that also has bad ones (KTO).
_LABELS = ("label", "kto_tag")
_GOOD = ("true", "1", "1.0")
_FOREIGN_FORMS = {
    ("conversations",): "ShareGPT: conversations of from and value",
    ("instruction", "output"): "Alpaca: instruction, input and output",
}
# Names of questions and answers in other data: a refusal proposes data.columns for them.
_QUESTIONS = ("question", "query", "problem", "instruction", "prompt", "input")
_ANSWERS = ("answer", "response", "solution", "completion", "output")
_SPEAKERS = {"role", "from", "sender", "author", "speaker"}  # fields of turns, not of records
_TURNS = "messages."  # before the names of fields of turns, in data.columns
_TURN_NAMES = ({"role", "content"}, {"from", "value"})
_JSON_MESSAGES = "JSON text in messages"
_MEDIA_TAG = re.compile(r"<(image|video|audio)>")


class CheckedRecord(NamedTuple):
    """The used fields of a record, the names of its others, and what is unusual about it.

    The used fields are `messages`, or `prompt` and `completion`, or `text`, or `input_ids` and
    perhaps `loss_mask`; and `tools`, as a list, if there are messages.
    """

    record: dict[str, Any]
    unread: list[str]
    notes: list[Note]


def read_fields(columns: Mapping[str, str | None]) -> frozenset[str]:
    """Return the data's names of all fields that are read; `columns`: `data.columns`."""
    named = {field: columns.get(field, field) for field in RECORD_FIELDS if "." not in field}
    return frozenset(name for pair in named.items() if pair[1] for name in pair if name)


def rename_fields(value: Any, columns: Mapping[str, str | None]) -> Any:
    """Return a record with our names of its fields; one that `columns` maps to None is left out.

    A record without the named field keeps its own one of our name: sources may differ in form.

    Raises:
        RecordError: the record has both.
    """
    if not isinstance(value, dict):
        return value
    in_turns = {ours.removeprefix(_TURNS): name for ours, name in columns.items() if _TURNS in ours}
    columns = {ours: name for ours, name in columns.items() if _TURNS not in ours}
    present = {name: field for name, field in value.items() if field is not None}
    renamed = {ours: present[name] for ours, name in columns.items() if name in present}
    read = {*columns.values(), *(ours for ours, name in columns.items() if name is None)}
    kept = {name: field for name, field in present.items() if name not in read}
    for ours in kept:
        if ours in renamed:
            raise RecordError(
                f"has {ours} and {columns[ours]}, which data.columns reads as {ours} - rename one "
                "of them in the data, or leave data.columns without it"
            )
    fields = kept | renamed
    if in_turns and isinstance(turns := _parse_turns("messages", fields.get("messages")), list):
        fields["messages"] = [rename_fields(turn, in_turns) for turn in turns]
    return fields


def fields_of_turns(value: Mapping[str, Any], columns: Mapping[str, str | None]) -> set[str]:
    """Return the names of fields that turns have, where `columns` reaches into turns."""
    turns = value.get(columns.get("messages") or "messages")
    if not any(_TURNS in ours for ours in columns) or not isinstance(turns, list):
        return set()
    return {name for turn in turns if isinstance(turn, dict) for name in turn}


def read_record(value: Any, data: DataConfig) -> CheckedRecord:
    """Read a record by `data.columns` and `data.roles`, as `check_record`, with its errors."""
    return check_record(rename_fields(value, data.field_names), data.roles)


def check_record(value: Any, roles: Mapping[str, str] = MappingProxyType({})) -> CheckedRecord:
    """Read a record of any form. ShareGPT's and Alpaca's records become messages.

    Fields that hold null count as absent. `roles`: `data.roles`.

    Raises:
        RecordError: the record is not valid.
        FileError: it says that the file has answers which are not to be trained.
    """
    if isinstance(value, RecordError):
        raise value
    if has_turns(value):
        field = "messages" if "role" in value[0] else "conversations"
        raise RecordError(f'is a list of messages - write {{"{field}": [...]}} around it')
    require(isinstance(value, dict), "the record", value, "a JSON object")
    present = {name: field for name, field in value.items() if field is not None}
    forms = forms_of(present)
    if len(forms) > 1:
        names = " or as ".join(" and ".join(form) for form in forms)
        other = forms[0][0] if "input_ids" in forms[-1] else forms[-1][-1]
        raise RecordError(
            f"can be read as {names} - say which of these fields not to read, "
            f"such as data.columns={{{other}: null}}"
        )
    (form,) = forms
    notes = [(Outcome.FOREIGN_FORM, foreign)] if (foreign := _FOREIGN_FORMS.get(form)) else []
    if isinstance(present.get("messages"), str):
        notes.append((Outcome.FOREIGN_FORM, _JSON_MESSAGES))
    if isinstance(present.get("prompt"), str) and has_turns(from_json(present["prompt"])):
        for name in ("prompt", "completion"):  # an answer may be such a text beside a real list
            turns = from_json(present[name])
            present[name] = turns if has_turns(turns) else present[name]
        notes.append((Outcome.FOREIGN_FORM, "JSON text in prompt"))
    record = _read_form(form, present, roles, notes)
    has_messages = any(isinstance(field, list) for field in record.values())
    used = {*form, *(_FORMS[form] if has_messages or "prompt" not in form else ())}
    if "text" not in form and "input_ids" not in form:
        _require_good(present)
        used.update(name for name in _LABELS if str(present.get(name)).lower() in _GOOD)
    if has_messages:
        if system := _system(present):
            first = record.get("messages") or record["prompt"]
            _put_before(system, first, "conversations" if "conversations" in form else "messages")
        # `functions`: OpenAI's older name. Tables write in several ways that there are none.
        given = {n: present[n] for n in ("tools", "functions") if present.get(n)}
        lists = {n: v for n, v in given.items() if str(v).strip() not in ("", "null", "[]")}
        if len(lists) > 1:
            raise RecordError("has tools and functions - keep one of them")
        for tools in lists.values() or [v for v in given.values() if v == "[]"]:
            record["tools"] = _parse_tools(kept := without_nulls(tools, "default"))
            notes += [(Outcome.NULLS, "tools")] * (kept != tools)
        if options := without_nulls(from_json(present.get("chat_template_kwargs"))):
            require(isinstance(options, dict), "chat_template_kwargs", options, "an object")
            record["chat_template_kwargs"] = options
    if "input_ids" not in form:  # `input_ids` are the whole record: no field can be lost
        _refuse_unread(form, present, used)
    return CheckedRecord(record, [name for name in present if name not in used], notes)


def _read_form(
    form: Sequence[str], present: Mapping[str, Any], roles: Mapping[str, str], notes: list[Note]
) -> dict[str, Any]:
    """Return the used fields of a form, with conversations as `messages`."""
    if "instruction" in form:
        return {"messages": _from_alpaca(present)}
    if "input_ids" in form:
        read = ("input_ids", *BESIDE_TOKENS)
        row, more = read_token_row({n: _parse_turns(n, present[n]) for n in read if n in present})
        notes += more
        return row
    texts_or_turns = {name: present[name] for name in form}
    if isinstance(present.get("prompt"), list) and isinstance(present.get("completion"), str):
        texts_or_turns["completion"] = [{"role": "assistant", "content": present["completion"]}]
    record: dict[str, Any] = {}
    has_turns = isinstance(texts_or_turns.get("completion"), list)
    for name, field in texts_or_turns.items():
        if has_turns or name in ("messages", "conversations"):
            messages, more = read_turns(name, _parse_turns(name, field), roles)
            record["messages" if name == "conversations" else name] = messages
            notes += more
        else:
            require(isinstance(field, str), name, field, "a string")
            record[name] = field
    return record


def _require_good(present: Mapping[str, Any]) -> None:
    """Raise FileError where a record says that its answer is a bad one."""
    for name in _LABELS:
        if str(present.get(name)).lower() in ("false", "0", "0.0"):  # tables hold it as text
            label = json.dumps(present[name], default=str)
            keep = f"""jq -c 'select(.{name} | IN(false, 0, "false", "0") | not)' OLD > NEW"""
            columns = f'"data.columns={{{name}: null}}"'
            raise FileError(
                f"has {name}: {label}, which marks a bad answer (KTO) - leave those out, in a "
                f".jsonl with {keep}, or write {columns} to train all answers"
            )


def _system(present: Mapping[str, Any]) -> str:
    """Return the system text beside the turns, or an empty one."""
    texts = {}
    for name in _SYSTEM:
        value = present.get(name, "")
        parts = value if isinstance(value, list) else [{"text": value}]
        is_text = all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in parts)
        require(is_text, name, value, "a string")
        text = "".join(part["text"] for part in parts)
        if text.strip():
            texts[name] = text
    if len(set(texts.values())) > 1:
        raise RecordError(
            f"has different texts as {' and '.join(texts)} - keep one of them, or write "
            "data.columns={system_prompt: null} to read system alone"
        )
    return next(iter(texts.values()), "")


def _put_before(system: str, messages: list[Message], name: str) -> None:
    turns = [message.get("content") for message in messages if message["role"] == "system"]
    if turns == [system]:
        return
    if turns:
        raise RecordError(
            f"has system and a system turn in {name} - keep one of them, or write "
            "data.columns={system: null} (or system_prompt) to read the turn alone"
        )
    messages.insert(0, {"role": "system", "content": system})


def _refuse_unread(form: Sequence[str], present: Mapping[str, Any], used: set[str]) -> None:
    """Raise RecordError for a field that other tools read and this one does not."""
    read_elsewhere = ("history", "tools", "functions", "loss_mask", *_SYSTEM)
    lost = [
        name
        for name in read_elsewhere
        if name not in used and present.get(name) and present[name] != "[]"
    ]
    if lost:
        chat = "data.columns={instruction: prompt, output: completion}"
        as_chat = (
            f'"{chat}" to read it in a chat, or '
            if "prompt" in form and lost[0] != "loss_mask"
            else ""
        )
        fields = " and ".join(form)
        raise RecordError(
            f"has {lost[0]} beside {fields}, which do not use it - write {as_chat}"
            f'"data.columns={{{lost[0]}: null}}" to leave it out'
        )
    if "role" in present and "text" in form:
        raise RecordError(
            "has role beside text, so it is one message of a conversation - join those of each "
            'conversation into a record with messages, or write "data.columns={role: null}" to '
            "train each as a text"
        )


def forms_of(present: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the fields of each form in which a record with these fields can be read.

    Raises:
        RecordError: there is none.
    """
    forms = [form for form in _FORMS if present.keys() >= set(form)]
    is_marked = any(name in present for name in TRAINED_TOKENS)
    if len(forms) > 1 and not is_marked:  # tokens that libraries keep beside their text
        forms = [form for form in forms if form != ("input_ids",)]
    mask = next((name for name in _TOKEN_MASKS if name in present), "")
    if mask and forms == [("input_ids",)] and not is_marked:
        columns = f'"data.columns={{loss_mask: {mask}}}"'
        raise RecordError(f"has {mask} beside input_ids - write {columns} to train by it")
    if forms:
        return forms
    names = ", or ".join(" and ".join(form) for form in _FORMS)
    remedy = _columns_for(present) or f"write {names}, or name the data's fields in data.columns"
    has = first_few([shown_name(name) for name in sorted(present)], 10) or "no field"
    raise RecordError(f"has {has} - {remedy}", kind=remedy)


def media_tag(record: Mapping[str, Any], unread: Sequence[str]) -> str:
    """Return the first tag, such as <image>, in the texts of a used record; "" if none has one.

    `unread`: the names of its other fields.

    Raises:
        RecordError: the tag stands for something in one of these fields.
    """
    texts = (text for text in _texts(record) if "<" in text)
    tag = next((found[0] for text in texts if (found := _MEDIA_TAG.search(text))), "")
    if tag and (media := [name for name in unread if is_media(name)]):
        raise RecordError(
            f"has {tag} in its text, for its field {media[0]}, and only text is trained - "
            "leave such records out"
        )
    return tag


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in a JSON value, the names of fields left out."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def _columns_for(present: Mapping[str, Any]) -> str:
    """Return how data.columns could read a record of an unknown form, or an empty text."""
    turns = [name for name, value in present.items() if has_turns(value)]
    texts = [name for name, value in present.items() if isinstance(value, str)]
    if "chosen" in present and "rejected" in present:  # pairs of preferences
        is_answer = ("prompt" in texts) == ("chosen" in texts) and "prompt" in present
        kind = "completion" if is_answer else "text" if "chosen" in texts else "messages"
        return f'write "data.columns={{{kind}: chosen}}" to train the chosen one'
    question = next((name for name in _QUESTIONS if name in turns), None)
    answer = next((name for name in _ANSWERS if name in texts), None)
    if question and answer:
        return f'write "data.columns={{prompt: {question}, completion: {answer}}}"'
    if turns:
        kind = "messages" if "role" in present[turns[0]][0] else "conversations"
        return f'write "data.columns={{{kind}: {turns[0]}}}"'
    question = next((name for name in _QUESTIONS if name in texts), None)
    answer = next((name for name in _ANSWERS if name in texts), None)
    if (not question or not answer) and len(texts) == 2:  # a table writes the question first
        question, answer = texts
    if not question or not answer:
        return ""
    context = {"input": "context"} if "context" in texts else {}
    chat = {"instruction": question, **context, "output": answer}
    loses_input = context or ("input" in texts and question != "input")
    pair = {"prompt": question, "completion": answer}
    as_chat, as_text = (
        ", ".join(f"{ours}: {_in_yaml(name)}" for ours, name in each.items() if ours != name)
        for each in (chat, pair)
    )
    remedy = f'write "data.columns={{{as_chat}}}" to read them as a chat'
    return remedy if loses_input else f'{remedy}, or "data.columns={{{as_text}}}" as plain texts'


def _in_yaml(name: str) -> str:
    """Return a name as YAML reads it within braces."""
    is_word = name.lower() in ("null", "true", "false")
    is_plain = re.fullmatch(r"[^\W\d]([\w .-]*\w)?", name) and not is_word
    return name if is_plain else "'{}'".format(name.replace("'", "''"))


def has_turns(value: Any) -> bool:
    """Whether this is a list of messages, ours or ShareGPT's."""
    is_list = isinstance(value, list) and value and isinstance(value[0], dict)
    return bool(is_list) and any(names <= value[0].keys() for names in _TURN_NAMES)


def list_of_records(value: Mapping[str, Any], columns: Mapping[str, str | None]) -> str:
    """Return the field of an object that wraps the records; "" if it has none."""
    if value.keys() & read_fields(columns):
        return ""
    for name, field in value.items():
        if field and isinstance(field, list) and all(isinstance(each, dict) for each in field):
            return name if not any(each.keys() & _SPEAKERS for each in field) else ""
    return ""


def _parse_turns(name: str, turns: Any) -> Any:
    """Return a list of turns that may be given as JSON text, as tables hold it."""
    if isinstance(turns, str) and turns.lstrip().startswith("[{'"):
        raise RecordError(f"{name} is a list as Python prints it - write it with json.dumps")
    return from_json(turns)


def _from_alpaca(fields: Mapping[str, Any]) -> list[Message]:
    texts = {name: fields.get(name, "") for name in ("instruction", "input", "output")}
    for name, text in texts.items():
        require(isinstance(text, str), name, text, "a string")
    question = texts["instruction"] + (texts["input"] and f"\n{texts['input']}")
    history = fields.get("history", "")
    pairs = _parse_turns("history", history) or []
    are_pairs = isinstance(pairs, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
        for pair in pairs
    )
    require(are_pairs, "history", history, "a list of pairs, each a question and its answer")
    return [
        {"role": role, "content": text}
        for pair in [*pairs, (question, texts["output"])]
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def _parse_tools(tools: Any) -> list[Any]:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise RecordError(
                f"tools is a string that is not JSON ({error}) - write a list of tools",
                kind="tools is not JSON",
            ) from error
    require(isinstance(tools, list), "tools", tools, "a list of tools")
    for i, tool in enumerate(tools):
        is_tool = isinstance(tool, dict) and isinstance(tool.get("function", {}), dict)
        require(is_tool, f"tools[{i}]", tool, "an object")
    return list(tools)
