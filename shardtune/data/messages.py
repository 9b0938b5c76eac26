"""What one message says, and whether a text still says it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

Message = dict[str, Any]

MARK = "Qq0Mark0qQ"  # letters and digits only: no filter of a template changes them
REASONING_KEYS = (
    "reasoning_content",
    "thinking",
    "reasoning",
)  # the names that transformers reads, in its order
_TEXT_KEYS = {"content", "text", "tool_calls", "function", "arguments", *REASONING_KEYS}


def function_of(call: Any) -> dict[str, Any]:
    """The {name, arguments} of a tool call (or tool), which stand under `function` or for themselves."""
    inner = call.get("function", call) if isinstance(call, dict) else None
    return inner if isinstance(inner, dict) else {}


def texts_of(message: Message) -> Iterator[tuple[str, Any]]:
    """(what it is, value) of everything that a message says; values in tool-call arguments may be numbers."""
    content = message.get("content")
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str):
            yield "text", text
    reasoning = next((message[key] for key in REASONING_KEYS if message.get(key) is not None), None)
    if isinstance(reasoning, str):
        yield "reasoning", reasoning
    for call in message.get("tool_calls") or []:
        name = function_of(call).get("name")
        yield "name of a tool call", name
        for value in _leaves(function_of(call).get("arguments")):
            yield f"arguments of tool call {name!r}", value


def _leaves(value: Any) -> list[Any]:
    """The keys and values in tool-call arguments."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    return (
        [leaf for inner in value for leaf in _leaves(inner)] if isinstance(value, list) else [value]
    )


def squeeze(text: str) -> str:
    """`text` without what a template may change when it writes a value: whitespace, quotes and escapes."""
    return "".join(text.split()).replace("\\", "").replace('"', "").replace("'", "")


def holds(squeezed: str, value: Any, times: int = 1) -> bool:
    """Whether a squeezed text holds a value so many times, as it is or in one of the ways to write it as JSON."""
    if value is None or squeezed.count(squeeze(str(value))) >= times:
        return True
    forms = (squeeze(json.dumps(value, ensure_ascii=ascii_only)) for ascii_only in (False, True))
    return any(squeezed.count(form) >= times for form in forms)


def lost_from(message: Message, squeezed: str) -> str | None:
    """What the first thing of a message is that a squeezed text does not hold."""
    seen: Counter[tuple[type, Any]] = Counter()  # two calls alike must be there twice
    for what, value in texts_of(message):
        seen[type(value), value] += 1
        if not holds(squeezed, value, seen[type(value), value]):
            return what
    return None


def with_marks(value: Any, mark: str = MARK, everything: bool = False) -> Any:
    """A message with a mark at the end of each of its texts; roles, names and types stay what they are."""
    if isinstance(value, dict):
        marked = {
            key: with_marks(inner, mark, everything or key == "arguments")
            for key, inner in value.items()
        }
        return (
            marked
            if everything
            else {key: marked[key] if key in _TEXT_KEYS else value[key] for key in value}
        )
    if isinstance(value, list):
        return [with_marks(inner, mark, everything) for inner in value]
    if not isinstance(value, str) or not value.strip():
        return value  # for an empty text templates often write nothing
    body = value.rstrip()  # a trim stays a trim
    return body + mark + value[len(body) :]


def with_tags(message: Message) -> tuple[Message, dict[str, str]]:
    """A message with a mark of its own in each part that is not empty, and by mark what the part is.

    The parts are content, reasoning, and the name and the arguments of each tool call.
    """
    parts: dict[str, str] = {}

    def tagged(value: Any, what: str, tag: str = "") -> Any:
        tag = tag or f"Qq{len(parts)}Tag{len(parts)}qQ"
        marked = with_marks(value, tag, everything=isinstance(value, dict))
        if isinstance(value, dict) and value:
            marked[tag] = tag  # the values may all be numbers
        if marked != value:
            parts[tag] = what
        return marked

    def tagged_call(call: dict[str, Any]) -> dict[str, Any]:
        function = function_of(call)
        name = function.get("name")
        written = function | {"name": tagged(name, "name of a tool call")}
        if "arguments" in function:
            written["arguments"] = tagged(function["arguments"], f"arguments of tool call {name!r}")
        return call | ({"function": written} if "function" in call else written)

    result = message | {
        key: tagged(message[key], "reasoning", "QqRTagRqQ")
        for key in REASONING_KEYS
        if key in message
    }
    if "content" in message:
        result["content"] = tagged(message["content"], "text")
    if message.get("tool_calls"):
        result["tool_calls"] = [tagged_call(call) for call in message["tool_calls"]]
    return result, parts
