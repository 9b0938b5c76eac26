"""The shape of a valid training record: messages, prompt and completion, or text."""

from __future__ import annotations

import json
import reprlib
from typing import Any

from shardtune.data.messages import REASONING_KEYS
from shardtune.errors import first_few

READ_FIELDS = ("messages", "tools", "prompt", "completion", "text")
_FORMS = (("messages",), ("prompt", "completion"), ("text",))


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
    _require(isinstance(value, dict), "the record", value, "a JSON object")
    present = {name: field for name, field in value.items() if field is not None}
    forms = [form for form in _FORMS if present.keys() >= set(form)]
    if len(forms) != 1:
        raise RecordError(
            f"has {first_few(sorted(present), 10) or 'no field'} - "
            "write either messages, or prompt and completion, or text"
        )
    record = {name: present[name] for name in forms[0]}
    has_messages = "messages" in record or isinstance(record.get("completion"), list)
    for name, field in record.items():
        if has_messages:
            _check_messages(name, field)
        else:
            _require(isinstance(field, str), name, field, "a string")
    if has_messages and "tools" in present:
        record["tools"] = _parse_tools(present["tools"])
    return record, [name for name in present if name not in record]


def _require(condition: object, where: str, value: Any, remedy: str) -> None:
    if not condition:
        raise RecordError(f"{where} is {reprlib.repr(value)} - write {remedy}")


def _check_messages(name: str, messages: Any) -> None:
    remedy = "a list of messages, each with role and content"
    _require(messages and isinstance(messages, list), name, messages, remedy)
    for i, message in enumerate(messages):
        where = f"{name}[{i}]"
        _require(isinstance(message, dict), where, message, "an object with role and content")
        _check_message(where, {k: v for k, v in message.items() if v is not None})


def _check_message(where: str, message: dict[str, Any]) -> None:
    role = message.get("role")
    _require(role and isinstance(role, str), f"{where}.role", role, "user, assistant, ...")
    calls, content = message.get("tool_calls", []), message.get("content", "")
    _require(isinstance(calls, list), f"{where}.tool_calls", calls, "a list of objects")
    for i, call in enumerate(calls):
        _check_call(f"{where}.tool_calls[{i}]", call)
    for key in REASONING_KEYS:
        text = message.get(key, "")
        _require(isinstance(text, str), f"{where}.{key}", text, "a string")
    if "content" not in message and not calls:
        raise RecordError(f"{where} ({role}) has neither content nor tool_calls - give it one")
    for part in content if isinstance(content, list) else [{"text": content}]:
        is_text = isinstance(part, dict) and isinstance(part.get("text"), str)
        remedy = 'a string, or parts as {"type": "text", "text": "..."}'
        _require(is_text, f"{where}.content", content, remedy)


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
