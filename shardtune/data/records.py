"""The shapes of a valid training record, and how each becomes messages, prompts or a text."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardtune.config import RECORD_FIELDS
from shardtune.data.messages import REASONING_KEYS, TRAIN_FLAGS
from shardtune.errors import first_few

# The fields that make a form, and the fields that may stand beside them.
_FORMS = {
    ("messages",): ("tools",),
    ("conversations",): ("tools", "system"),
    ("prompt", "completion"): ("tools",),
    ("instruction", "output"): ("input", "system"),
    ("text",): (),
}
_FOREIGN_FORMS = {
    ("conversations",): "ShareGPT: conversations of from and value",
    ("instruction", "output"): "Alpaca: instruction, input and output",
}
# What other data calls a question and its answer, and the fields that data.columns maps them to.
_QUESTIONS = ("question", "query", "problem", "instruction", "prompt", "input")
_ANSWERS = ("answer", "response", "solution", "completion", "output")
_TURN_NAMES = ({"role", "content"}, {"from", "value"})
_JSON_MESSAGES = "JSON text in messages"
_MEDIA = re.compile(r"(image|picture|video|audio)s?")
_MEDIA_TAG = re.compile(r"<(image|video|audio)>")
_SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
}


# Roles under other names are context that is never trained, so a misspelt one loses its turns.
_ROLES = ("user", "assistant", "system", "tool")
_MISNAMED_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant"}


class RecordError(ValueError):
    """A record cannot be used: `<what> - <what to do>`. Whoever catches it adds file and line.

    `written`: the record as the data has it, where the file's reader has refused it.
    """

    def __init__(self, problem: str, written: str = "") -> None:
        super().__init__(problem, written)
        self.problem, self.written = problem, written

    def __str__(self) -> str:
        return self.problem


class FileError(RecordError):
    """No further record of a file can be used, so that none of them is merely left out."""


def read_fields(columns: Mapping[str, str | None]) -> frozenset[str]:
    """Return the data's names of all fields that are read; `columns`: `data.columns`."""
    named = {field: columns.get(field, field) for field in RECORD_FIELDS}
    return frozenset(name for pair in named.items() if pair[1] for name in pair if name)


def rename_fields(value: Any, columns: Mapping[str, str | None]) -> Any:
    """Return a record with our names of its fields; one that `columns` maps to None is left out.

    A record without the named field keeps its own one of our name: sources may differ in form.

    Raises:
        RecordError: the record has both.
    """
    if not isinstance(value, dict):
        return value
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
    return kept | renamed


def check_record(value: Any) -> tuple[dict[str, Any], list[str], str]:
    """Return the used fields of a record, the names of its others, and its form if not ours.

    The used fields are `messages`, or `prompt` and `completion`, or `text`; and `tools`, as a
    list, if there are messages. ShareGPT's and Alpaca's records become messages. Fields that hold
    null count as absent.

    Raises:
        RecordError: the record is not valid.
    """
    if isinstance(value, RecordError):
        raise value
    if has_turns(value):
        field = "messages" if "role" in value[0] else "conversations"
        raise RecordError(f'is a list of messages - write {{"{field}": [...]}} around it')
    _require(isinstance(value, dict), "the record", value, "a JSON object")
    present = {name: field for name, field in value.items() if field is not None}
    forms = forms_of(present)
    if len(forms) > 1:
        names = " or as ".join(" and ".join(form) for form in forms)
        raise RecordError(
            f"can be read as {names} - say which of these fields not to read, "
            f"such as data.columns={{{forms[-1][-1]}: null}}"
        )
    (form,) = forms
    record = {name: present[name] for name in form}
    is_text = isinstance(record.get("messages"), str)
    for name in {"messages", "conversations"} & record.keys():
        record[name] = _parse_turns(name, record[name])
    has_messages = "messages" in record or isinstance(record.get("completion"), list)
    if "conversations" in record:
        record = {"messages": _from_sharegpt(record["conversations"], present.get("system"))}
    elif "instruction" in record:
        record = {"messages": _from_alpaca(present)}
    else:
        for name, field in record.items():
            if has_messages:
                _check_messages(name, field)
            else:
                _require(isinstance(field, str), name, field, "a string")
    used = {*form, *_FORMS[form]}
    if "tools" in present and (has_messages or "conversations" in form):
        if present["tools"] != "":  # as some tables write that there are none
            record["tools"] = _parse_tools(present["tools"])
    elif "tools" in used:
        used.remove("tools")
    unread = [name for name in present if name not in used]
    return record, unread, _JSON_MESSAGES if is_text else _FOREIGN_FORMS.get(form, "")


def forms_of(present: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the fields of each form in which a record with these fields can be read.

    Raises:
        RecordError: there is none.
    """
    if forms := [form for form in _FORMS if present.keys() >= set(form)]:
        return forms
    names = ", or ".join(" and ".join(form) for form in _FORMS)
    remedy = _columns_for(present) or f"write {names}, or name the data's fields in data.columns"
    has = first_few([shown_name(name) for name in sorted(present)], 10) or "no field"
    raise RecordError(f"has {has} - {remedy}")


def shown_name(field: str) -> str:
    """Return the name of a field as messages show it: in quotes where there is nothing to see."""
    return field if field.strip() else repr(field)


def is_media(field: str) -> bool:
    """Whether a field of a record has the name of images, videos or sounds."""
    return _MEDIA.fullmatch(field.lower()) is not None


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
    """Return the remedy for a record without a form of ours: how to read it, or an empty text."""
    turns = [name for name, value in present.items() if has_turns(value)]
    texts = [name for name, value in present.items() if isinstance(value, str)]
    if "chosen" in present and "rejected" in present:  # pairs of preferences
        is_answer = ("prompt" in texts) == ("chosen" in texts) and "prompt" in present
        kind = "completion" if is_answer else "text" if "chosen" in texts else "messages"
        return f'write "data.columns={{{kind}: chosen}}" to train the chosen one'
    if turns:
        kind = "messages" if "role" in present[turns[0]][0] else "conversations"
        return f'write "data.columns={{{kind}: {turns[0]}}}"'
    question = next((name for name in _QUESTIONS if name in texts), None)
    answer = next((name for name in _ANSWERS if name in texts), None)
    if not question or not answer:
        return ""
    context = {"input": "context"} if "context" in texts else {}
    chat = {"instruction": question, **context, "output": answer}
    loses_input = context or ("input" in texts and question != "input")
    pair = {"prompt": question, "completion": answer}
    as_chat, as_text = (
        ", ".join(f"{ours}: {name}" for ours, name in each.items() if ours != name)
        for each in (chat, pair)
    )
    remedy = f'write "data.columns={{{as_chat}}}" to read them as a chat'
    return remedy if loses_input else f'{remedy}, or "data.columns={{{as_text}}}" as plain texts'


def has_turns(value: Any) -> bool:
    """Whether this is a list of messages, ours or ShareGPT's."""
    is_list = isinstance(value, list) and value and isinstance(value[0], dict)
    return bool(is_list) and any(names <= value[0].keys() for names in _TURN_NAMES)


def _parse_turns(name: str, turns: Any) -> Any:
    """Return a list of turns that may be given as JSON text, as tables hold it."""
    if not isinstance(turns, str):
        return turns
    if turns.lstrip().startswith("[{'"):
        raise RecordError(f"{name} is a list as Python prints it - write it with json.dumps")
    try:
        return json.loads(turns)
    except (ValueError, RecursionError):
        return turns  # refused by whoever needs a list


def _from_sharegpt(turns: Any, system: Any) -> list[dict[str, Any]]:
    remedy = "a list of turns, each with from and value"
    _require(turns and isinstance(turns, list), "conversations", turns, remedy)
    messages = []
    for i, turn in enumerate(turns):
        where = f"conversations[{i}]"
        _require(isinstance(turn, dict), where, turn, "an object with from and value")
        fields = {name: field for name, field in turn.items() if field is not None}
        if not {"from", "value"} <= fields.keys() or {"role", "content"} & fields.keys():
            raise RecordError(
                f"{where} has {first_few(sorted(fields), 10) or 'no field'} - write from and value "
                "(of role and content: data.columns={messages: conversations})"
            )
        speaker, content = fields.pop("from"), fields.pop("value")
        role = _SHAREGPT_ROLES.get(speaker) if isinstance(speaker, str) else None
        _require(role, f"{where}.from", speaker, f"one of {', '.join(_SHAREGPT_ROLES)}")
        _require(isinstance(content, str), f"{where}.value", content, "a string")
        messages.append({"role": role, "content": content, **fields})
    _check_messages("conversations", messages)
    _require(system is None or isinstance(system, str), "system", system, "a string")
    if not (system and system.strip()):
        return messages
    if any(message["role"] == "system" for message in messages):
        raise RecordError(
            "has system and a system turn in conversations - keep one of them, or write "
            "data.columns={system: null} to read the turn alone"
        )
    return [{"role": "system", "content": system}, *messages]


def _from_alpaca(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    texts = {name: fields.get(name, "") for name in ("system", "instruction", "input", "output")}
    for name, text in texts.items():
        _require(isinstance(text, str), name, text, "a string")
    question = texts["instruction"] + (texts["input"] and f"\n{texts['input']}")
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": texts["output"]},
    ]
    return [{"role": "system", "content": texts["system"]}, *messages][not texts["system"] :]


class _ShortRepr(reprlib.Repr):
    """Shortens values as reprlib does, but shows null, true and false as the data writes them."""

    def repr1(self, x: Any, level: int) -> str:
        return json.dumps(x) if x is None or x is True or x is False else super().repr1(x, level)


def _require(condition: object, where: str, value: Any, remedy: str) -> None:
    if not condition:
        raise RecordError(f"{where} is {_ShortRepr().repr(value)} - write {remedy}")


def _check_messages(name: str, messages: Any) -> None:
    remedy = "a list of messages, each with role and content"
    _require(messages and isinstance(messages, list), name, messages, remedy)
    if has_turns(messages) and "from" in messages[0] and "role" not in messages[0]:
        columns = f'"data.columns={{conversations: {name}}}"'
        raise RecordError(f"{name} has turns of from and value - write {columns}")
    for i, message in enumerate(messages):
        where = f"{name}[{i}]"
        _require(isinstance(message, dict), where, message, "an object with role and content")
        _check_message(where, {k: v for k, v in message.items() if v is not None})


def _check_message(where: str, message: dict[str, Any]) -> None:
    role: Any = message.get("role")
    _require(role and isinstance(role, str), f"{where}.role", role, "user, assistant, ...")
    plain = role.strip().lower()
    meant = _MISNAMED_ROLES.get(plain, plain)
    _require(role == meant or meant not in _ROLES, f"{where}.role", role, meant)
    calls, content = message.get("tool_calls", []), message.get("content", "")
    _require(isinstance(calls, list), f"{where}.tool_calls", calls, "a list of objects")
    for i, call in enumerate(calls):
        _check_call(f"{where}.tool_calls[{i}]", call)
    texts = {key: message[key] for key in REASONING_KEYS if key in message}
    for key, text in texts.items():
        _require(isinstance(text, str), f"{where}.{key}", text, "a string")
    if len(set(texts.values())) > 1:
        raise RecordError(
            f"{where} has different texts as {' and '.join(texts)} - keep one of them"
        )
    if "content" not in message and not calls:
        raise RecordError(f"{where} ({role}) has neither content nor tool_calls - give it one")
    _check_flags(f"{where} ({role})", role == "assistant", message)
    for part in content if isinstance(content, list) else [{"text": content}]:
        is_text = isinstance(part, dict) and isinstance(part.get("text"), str)
        if isinstance(part, dict) and is_media(str(part.get("type", "")).partition("_")[0]):
            raise RecordError(
                f"{where}.content has a part of type {part['type']}, and only text is trained - "
                "leave such records out"
            )
        remedy = 'a string, or parts as {"type": "text", "text": "..."}'
        _require(is_text, f"{where}.content", content, remedy)


def _check_flags(where: str, is_assistant: bool, message: dict[str, Any]) -> None:
    flags = {name: message[name] for name in TRAIN_FLAGS if name in message}
    for name, flag in flags.items():
        is_flag = isinstance(flag, (bool, int, float)) and flag in (0, 1)
        _require(
            is_flag, f"{where}: {name}", flag, "true or 1 to train this turn, false or 0 not to"
        )
    if len(set(map(bool, flags.values()))) > 1:
        raise RecordError(f"{where}: train and weight contradict each other - write one of them")
    if any(flags.values()) and not is_assistant:
        raise RecordError(
            f"{where} is to be trained, by its {' and '.join(flags)} - remove that: only assistant "
            "turns are generated"
        )


def _check_call(where: str, call: Any) -> None:
    _require(isinstance(call, dict), where, call, "an object")
    function = call.get("function", call)
    remedy = "an object with name and arguments"
    _require(isinstance(function, dict), f"{where}.function", function, remedy)
    name, arguments = function.get("name"), function.get("arguments") or {}
    _require(name and isinstance(name, str), f"{where}: the name", name, "a string")
    _require(isinstance(arguments, (dict, str)), f"{where}: arguments", arguments, "an object")


def _parse_tools(tools: Any) -> list[Any]:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise RecordError(
                f"tools is a string that is not JSON ({error}) - write a list of tools"
            ) from error
    _require(isinstance(tools, list), "tools", tools, "a list of tools")
    for i, tool in enumerate(tools):
        is_tool = isinstance(tool, dict) and isinstance(tool.get("function", {}), dict)
        _require(is_tool, f"tools[{i}]", tool, "an object")
    return list(tools)
