"""The texts that a message holds, and whether a rendered conversation still holds them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

Message = dict[str, Any]

MARK = "Qq0Mark0qQ"  # letters and digits only: no filter of a template changes them
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")  # in the order of transformers
TRAIN_FLAGS = ("train", "weight")  # on a message: whether its turn is trained
_TEXT_KEYS = {"content", "text", "tool_calls", "function", "arguments", *REASONING_KEYS}
# A template may change these when it writes a value: whitespace, quotes, and the escapes of JSON.
_NOT_COMPARED = re.compile(r"""\\u[0-9a-f]{4}|\\[bfnrt]|[\\"'\s\x00-\x1f]""")


def tool_function(call: dict[str, Any]) -> dict[str, Any]:
    """Return the {name, arguments} of a tool call or tool, which may stand under `function`."""
    function: dict[str, Any] = call.get("function", call)
    return function


def train_flag(message: Message) -> bool | None:
    """Return whether a message asks to be trained or not; None if it says neither."""
    return next((bool(message[key]) for key in TRAIN_FLAGS if message.get(key) is not None), None)


def without_flags(message: Message) -> Message:
    """Return the message as the template gets it."""
    return {key: value for key, value in message.items() if key not in TRAIN_FLAGS}


def message_texts(message: Message) -> Iterator[tuple[str, str]]:
    """Yield (description, text) of each text and number that the message holds."""
    content = message.get("content")
    for part in content if isinstance(content, list) else [content or ""]:
        yield "text", part if isinstance(part, str) else part["text"]
    yield "reasoning", next((message[key] for key in REASONING_KEYS if message.get(key)), "")
    for call in message.get("tool_calls") or []:
        name = tool_function(call)["name"]
        yield "name of a tool call", name
        for value in _keys_and_values(tool_function(call).get("arguments")):
            yield f"arguments of tool call {name!r}", value


def _keys_and_values(value: Any) -> list[str]:
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        return [leaf for inner in value for leaf in _keys_and_values(inner)]
    is_written_alike = isinstance(value, (str, int, float)) and not isinstance(value, bool)
    return [str(value)] if is_written_alike else []


def normalize(text: str) -> str:
    """Remove what a template may change when it writes a text."""
    return _NOT_COMPARED.sub("", text)


def first_missing(message: Message, normalized: str) -> str | None:
    """Return the description of the first text of a message that a normalized text lacks.

    A text that stands in another text of the message too (the name of a call, in the content) must
    be there for each of them.
    """
    texts = [(description, normalize(text)) for description, text in message_texts(message)]
    for description, text in texts:
        if normalized.count(text) < sum(other.count(text) for _, other in texts if text):
            return description
    return None


def with_marks(value: Any, everything: bool = False) -> Any:
    """Copy a message with a mark at the end of each text.

    Roles, names and types stay as they are, unless `everything` is marked.
    """
    if isinstance(value, dict):
        return {
            key: with_marks(inner, everything or key == "arguments")
            if everything or key in _TEXT_KEYS
            else inner
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [with_marks(inner, everything) for inner in value]
    if not isinstance(value, str) or not value.strip():
        return value  # templates often write nothing for an empty text
    body = value.rstrip()  # a template that trims still trims
    return body + MARK + value[len(body) :]
