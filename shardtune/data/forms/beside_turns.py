"""What may stand beside the turns of every form: system texts, tools, options of the template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardtune.data.records import (
    Conversation,
    Message,
    Note,
    Outcome,
    RecordError,
    from_json,
    require,
    without_nulls,
)

_SYSTEM = ("system", "system_prompt")  # the same under two names
_TOOLS = ("tools", "functions")  # the second is OpenAI's older name
BESIDE_TURNS = (*_TOOLS, "chat_template_kwargs", *_SYSTEM)


def with_what_stands_beside(
    conversation: Conversation, fields: Mapping[str, Any], notes: list[Note]
) -> Conversation:
    """Return a conversation with the system text, the tools and the options of its record."""
    messages, first = conversation.messages, conversation.first
    if (system := _system(fields)) and _is_missing(system, messages[: first or None]):
        messages = [{"role": "system", "content": system}, *messages]
        first += bool(first)
    options = without_nulls(from_json(fields.get("chat_template_kwargs"))) or {}
    require(isinstance(options, dict), "chat_template_kwargs", options, "an object")
    tools = _tools(fields, notes)
    return replace(conversation, messages=messages, tools=tools, options=options, first=first)


def _system(fields: Mapping[str, Any]) -> str:
    """Return the system text beside the turns, or an empty one."""
    texts = {}
    for name in _SYSTEM:
        value = fields.get(name, "")
        parts = value if isinstance(value, list) else [{"text": value}]
        is_text = all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in parts)
        require(is_text, name, value, "a string")
        if (text := "".join(part["text"] for part in parts)).strip():
            texts[name] = text
    if len(set(texts.values())) > 1:
        what = "has different texts as system and system_prompt"
        raise RecordError(f"{what} - keep one, or write data.columns={{system_prompt: null}}")
    return next(iter(texts.values()), "")


def _is_missing(system: str, messages: list[Message]) -> bool:
    """Whether no turn has the system text; RecordError where one has another."""
    turns = [message.get("content") for message in messages if message["role"] == "system"]
    if turns and turns != [system]:
        what = "has system and a system turn with another text"
        remedy = "data.columns={system: null, system_prompt: null} to read the turn"
        raise RecordError(f"{what} - keep one, or write {remedy}")
    return not turns


def _tools(fields: Mapping[str, Any], notes: list[Note]) -> list[Any] | None:
    """Return the list of tools, None where there is none; it may be JSON text."""
    given = [fields[name] for name in _TOOLS if fields.get(name)]
    # Tables write in several ways that there are none.
    lists = [value for value in given if str(value).strip() not in ("", "null", "[]")]
    if len(lists) > 1:
        raise RecordError("has tools and functions - keep one of them")
    if not lists:
        return [] if "[]" in given else None
    tools = without_nulls(lists[0], "default")
    notes += [(Outcome.NULLS, "tools")] * (tools != lists[0])
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            what = f"tools is a string that is not JSON ({error}) - write a list of tools"
            raise RecordError(what, kind="tools is not JSON") from error
    require(isinstance(tools, list), "tools", tools, "a list of tools")
    for i, tool in enumerate(tools):
        is_tool = isinstance(tool, dict) and isinstance(tool.get("function", {}), dict)
        require(is_tool, f"tools[{i}]", tool, "an object")
    return list(tools)
