"""The shape of a valid training record: messages, prompt and completion, or text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shardtune.data.messages import REASONING_KEYS
from shardtune.errors import first_few

READ_FIELDS = ("messages", "tools", "prompt", "completion", "text")
_FORMS = (("messages",), ("prompt", "completion"), ("text",))
_REMEDY = "write messages, prompt and completion, or text"
_KINDS = {
    str: "string",
    list: "list",
    dict: "object",
    bool: "boolean",
    int: "number",
    float: "number",
}


class RecordError(ValueError):
    """A record cannot be used: `<what> - <what to do>`. Whoever catches it adds file and line."""


def check_record(value: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the used fields of a record and the names of its other fields.

    The used fields are `messages`, or `prompt` and `completion`, or `text`; and `tools`, as a
    list, if there are messages. Fields that hold null count as absent.

    Raises:
        RecordError: the record is not valid.
    """
    if isinstance(value, RecordError):
        raise value
    if not isinstance(value, dict):
        raise RecordError(f"a record is a JSON object, this is {kind_of(value)} - {_REMEDY}")
    present = {name: field for name, field in value.items() if field is not None}
    forms = [form for form in _FORMS if present.keys() >= set(form)]
    if len(forms) > 1:
        names = " and ".join("+".join(form) for form in forms)
        raise RecordError(f"has {names} - keep one of them")
    if not forms:
        raise RecordError(f"has {_missing_fields(present)} - {_REMEDY}")
    record = {name: present[name] for name in forms[0]}
    has_messages = "messages" in record or (
        "prompt" in record and any(isinstance(field, list) for field in record.values())
    )
    for name, field in record.items():
        if has_messages:
            _check_messages(name, field)
        elif not isinstance(field, str):
            raise RecordError(f"{name} is {kind_of(field)} - write a string")
    if has_messages and "tools" in present:
        record["tools"] = _parse_tools(present["tools"])
    return record, [name for name in present if name not in record]


def kind_of(value: Any) -> str:
    """Return the JSON type of a value in words: "a string", "an empty list", "null"."""
    if value is None:
        return "null"
    kind = next((name for cls, name in _KINDS.items() if isinstance(value, cls)), None)
    if kind is None:
        return type(value).__name__  # only Arrow has others: bytes, datetime, Decimal
    if isinstance(value, (str, list, dict)) and not value:
        return f"an empty {kind}"
    return f"an {kind}" if kind == "object" else f"a {kind}"


def _check_messages(name: str, messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise RecordError(
            f"{name} is {kind_of(messages)} - write a list of messages, each with role and content"
        )
    for i, message in enumerate(messages):
        _check_message(f"{name}[{i}]", message)


def _check_message(where: str, message: Any) -> None:
    if not isinstance(message, dict):
        raise RecordError(f"{where} is {kind_of(message)} - write an object with role and content")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        what = "no role" if role is None else f"{kind_of(role)} as its role"
        raise RecordError(f"{where} has {what} - name its role (system, user, assistant, tool)")
    _check_calls(f"{where}.tool_calls", message.get("tool_calls"))
    _check_reasoning(where, message)
    if content is None:
        if not message.get("tool_calls"):
            raise RecordError(
                f"{where} ({role}) has neither content nor tool_calls - give it one of them"
            )
    elif isinstance(content, list):
        if any(not isinstance(p, dict) or not isinstance(p.get("text"), str) for p in content):
            raise RecordError(
                f"{where}.content has a part that is not text - "
                'write parts as {"type": "text", "text": "..."}'
            )
    elif not isinstance(content, str):
        raise RecordError(
            f"{where}.content is {kind_of(content)} - write a string or a list of text parts"
        )


def _check_calls(where: str, calls: Any) -> None:
    if calls is None:
        return
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise RecordError(f"{where} is {kind_of(calls)} - write a list of objects")
    for i, call in enumerate(calls):
        function = call.get("function", call)
        if not isinstance(function, dict):
            raise RecordError(
                f"{where}[{i}].function is {kind_of(function)} - "
                "write an object with name and arguments"
            )
        name, arguments = function.get("name"), function.get("arguments")
        if not isinstance(name, str) or not name:
            raise RecordError(
                f"{where}[{i}] has {kind_of(name)} as the function's name - write a string"
            )
        if arguments is not None and not isinstance(arguments, (dict, str)):
            raise RecordError(
                f"{where}[{i}] has {kind_of(arguments)} as its arguments - write an object"
            )


def _check_reasoning(where: str, message: dict[str, Any]) -> None:
    texts = {key: message[key] for key in REASONING_KEYS if message.get(key) is not None}
    for key, reasoning in texts.items():
        if not isinstance(reasoning, str):
            raise RecordError(f"{where}.{key} is {kind_of(reasoning)} - write a string")
    if len(set(texts.values())) > 1:
        raise RecordError(
            f"{where} has different texts as {' and '.join(texts)} - keep one of them"
        )


def _parse_tools(tools: Any) -> list[Any]:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise RecordError(
                f"tools is a string that is not JSON ({error}) - write a list of tools"
            ) from error
    if not isinstance(tools, list):
        raise RecordError(f"tools is {kind_of(tools)} - write a list of tools")
    return tools


def _missing_fields(present: Mapping[str, Any]) -> str:
    if "prompt" in present:
        return "a prompt and no completion"
    if "completion" in present:
        return "a completion and no prompt"
    if not present:
        return "no field"
    return f"none of {', '.join(READ_FIELDS)}, but {first_few(sorted(present), 10)}"
