"""What stands between the forms of records and templates, and the texts that a message holds."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

Message = dict[str, Any]
Tools = list[dict[str, Any]] | None

MARK = "Qq0Mark0qQ"  # letters and digits only: no filter of a template changes them
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")  # in the order of transformers
# On a message, ours and other tools': whether its turn is trained where the mark is true.
MARKS = {
    **dict.fromkeys(("train", "weight", "trainable", "training"), True),
    **dict.fromkeys(("loss", "loss_mask", "loss_weight"), True),
    "masked": False,
}
_MEDIA = re.compile(r"(image|picture|video|audio)s?")
_TEXT_KEYS = {"content", "text", "tool_calls", "function", "arguments", *REASONING_KEYS}


@dataclass(frozen=True)
class Conversation:
    """Messages in the one form of all records that have turns.

    A message has a `role`; a `content`, a text or a list of parts of the types text and thinking;
    a thought under one key of REASONING_KEYS; `tool_calls`, whose arguments are objects; a mark of
    MARKS, if it says whether its turn is trained; and what else its template may read. `tools`:
    None if the record has none. `options`: of the template, for this record. Answers before
    message `first` are context.
    """

    messages: list[Message]
    tools: Tools = None
    options: Mapping[str, Any] = field(default_factory=dict)
    first: int = 0

    @property
    def content(self) -> dict[str, Any]:
        """The record as JSON has it, by which evaluation data is chosen. Options do not count."""
        turns: dict[str, Any] = {"messages": self.messages}
        if self.first:
            turns = {"prompt": self.messages[: self.first]}
            turns["completion"] = self.messages[self.first :]
        return turns if self.tools is None else turns | {"tools": self.tools}


@dataclass(frozen=True)
class Text:
    """A text that is trained, behind its `prompt` if it has one."""

    text: str
    prompt: str | None = None

    @property
    def content(self) -> dict[str, Any]:
        if self.prompt is None:
            return {"text": self.text}
        return {"prompt": self.prompt, "completion": self.text}


@dataclass(frozen=True)
class TokenRow:
    """Tokens as they are, without padding. `loss_mask`: which are trained, if the record says."""

    input_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...] | None = None

    @property
    def content(self) -> dict[str, Any]:
        mask = {} if self.loss_mask is None else {"loss_mask": self.loss_mask}
        return {"input_ids": self.input_ids} | mask


Record = Conversation | Text | TokenRow


def tool_function(call: dict[str, Any]) -> dict[str, Any]:
    """Return the {name, arguments} of a tool call or tool, which may stand under `function`."""
    function: dict[str, Any] = call.get("function", call)
    return function


def train_flag(message: Message) -> bool | None:
    """Return whether a message asks to be trained or not; None if it says neither."""
    marks = (bool(message[m]) == yes for m, yes in MARKS.items() if message.get(m) is not None)
    return next(marks, None)


def without_flags(message: Message) -> Message:
    """Return the message as the template gets it."""
    return {key: value for key, value in message.items() if key not in MARKS}


def from_json(value: Any) -> Any:
    """Return the value of a JSON text, as tables hold it; any other text or value as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def without_nulls(value: Any, kept: str = "") -> Any:
    """Drop keys with None, but `kept`: Arrow gives each struct the keys of its column's others."""
    if isinstance(value, dict):
        pairs = ((key, item) for key, item in value.items() if item is not None or key == kept)
        return {key: without_nulls(item, kept) for key, item in pairs}
    return [without_nulls(item, kept) for item in value] if isinstance(value, list) else value


def is_media(name: str) -> bool:
    """Whether a field or a part has the name of images, videos or sounds."""
    return _MEDIA.fullmatch(name.lower()) is not None


def message_texts(message: Message) -> Iterator[tuple[str, Any]]:
    """Yield (description, value) of each text; values in tool-call arguments may be no strings."""
    content = message.get("content")
    for part in content if isinstance(content, list) else [content or ""]:
        if not isinstance(part, str) and "thinking" in part:
            yield "reasoning", part["thinking"]
        else:
            yield "text", part if isinstance(part, str) else part["text"]
    yield "reasoning", next((message[key] for key in REASONING_KEYS if message.get(key)), "")
    for call in message.get("tool_calls") or []:
        name = tool_function(call)["name"]
        yield "name of a tool call", name
        for value in _keys_and_values(tool_function(call).get("arguments")):
            yield f"arguments of tool call {name!r}", value


def _keys_and_values(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        return [leaf for inner in value for leaf in _keys_and_values(inner)]
    return [value]


def is_empty(message: Message) -> bool:
    """Return whether a message has neither a text nor a tool call."""
    has_text = any(value.strip() for what, value in message_texts(message) if what == "text")
    return not has_text and not message.get("tool_calls")


def stop_count(stop: re.Pattern[str], message: Message) -> int:
    """Count the stop tokens in the texts of a message."""
    texts = (value for _, value in message_texts(message) if isinstance(value, str))
    return sum(len(stop.findall(text)) for text in texts)


def normalize(text: str) -> str:
    """Remove what a template may change when it writes a value: whitespace, quotes, escapes."""
    return "".join(text.split()).replace("\\", "").replace('"', "").replace("'", "")


def contains(normalized: str, value: Any, times: int = 1) -> bool:
    """Whether a normalized text holds a value at least `times` times, as it is or as JSON."""
    if value is None or normalized.count(normalize(str(value))) >= times:
        return True
    dumps = partial(json.dumps, value, default=str)  # Arrow has values that JSON has not
    forms = (normalize(dumps(ensure_ascii=ascii_only)) for ascii_only in (False, True))
    return any(normalized.count(form) >= times for form in forms)


def first_missing(message: Message, normalized: str) -> str | None:
    """Return the description of the first text of a message that a normalized text lacks."""
    times: Counter[tuple[type, Any]] = Counter()  # two equal calls must be there twice
    for description, value in message_texts(message):
        times[type(value), value] += 1
        if not contains(normalized, value, times[type(value), value]):
            return description
    return None


def holds_a_line(message: Message, normalized: str) -> bool:
    """Whether a normalized text has any line of a message's texts."""
    texts = (str(value) for description, value in message_texts(message) if description == "text")
    lines = (normalize(line) for text in texts for line in text.splitlines())
    return any(line and line in normalized for line in lines)


def with_wrapped_calls(message: Message) -> Message:
    """Copy a message whose tool calls all stand under `function`."""
    calls = []
    for call in message["tool_calls"]:
        function = {key: call[key] for key in ("name", "arguments") if key in call}
        others = {key: call[key] for key in call.keys() - function.keys()}
        is_bare = "function" not in call
        calls.append({"type": "function", **others, "function": function} if is_bare else call)
    return message | {"tool_calls": calls}


def with_arguments_as_text(message: Message) -> Message:
    """Copy a message whose tool calls have their arguments as JSON text."""
    calls = []
    for call in message["tool_calls"]:
        function = tool_function(call)
        text = json.dumps(function["arguments"], ensure_ascii=False, default=str)
        as_text = function | {"arguments": text}
        calls.append(call | {"function": as_text} if "function" in call else as_text)
    return message | {"tool_calls": calls}


def with_one_text(message: Message) -> Message:
    """Copy a message with its text parts joined, as templates that read parts join them."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return message | {"content": "".join(part.get("text", "") for part in content)}


def without_thinking_parts(message: Message) -> Message:
    """Copy a message with its parts of thinking as `reasoning_content` beside the others."""
    parts = message["content"]
    thoughts = [part["thinking"] for part in parts if "thinking" in part]
    texts = [part for part in parts if "thinking" not in part]
    return message | {"content": texts, "reasoning_content": "\n".join(thoughts)}


def with_marks(value: Any, mark: str = MARK, everything: bool = False) -> Any:
    """Copy a message with a mark at the end of each text.

    Roles, names and types stay as they are, unless `everything` is marked.
    """
    if isinstance(value, dict):
        return {
            key: with_marks(inner, mark, everything or key == "arguments")
            if everything or key in _TEXT_KEYS
            else inner
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [with_marks(inner, mark, everything) for inner in value]
    if not isinstance(value, str) or not value.strip():
        return value  # templates often write nothing for an empty text
    body = value.rstrip()  # a template that trims still trims
    return body + mark + value[len(body) :]


def with_tags(message: Message) -> tuple[Message, dict[str, str]]:
    """Copy a message with a mark of its own in each part; also return the parts by their marks.

    The parts are content, reasoning, and the name and the arguments of each tool call, where they
    are not empty.
    """
    parts: dict[str, str] = {}

    def tagged(value: Any, part: str) -> Any:
        tag = f"Qq{len(parts)}Tag{len(parts)}qQ"
        marked = with_marks(value, tag, everything=isinstance(value, dict))
        if isinstance(value, dict) and value:
            marked[MARK] = tag  # the values may all be numbers, and only the keys be written
        if marked != value:
            parts[tag] = part
        return marked

    def tagged_call(call: dict[str, Any]) -> dict[str, Any]:
        function = tool_function(call)
        name, arguments = function["name"], function.get("arguments")
        copy = function | {"name": tagged(name, "name of a tool call")}
        if arguments:
            copy["arguments"] = tagged(arguments, f"arguments of tool call {name!r}")
        return call | ({"function": copy} if "function" in call else copy)

    result = dict(message)
    if "content" in message:
        result["content"] = tagged(message["content"], "text")
    if keys := [key for key in REASONING_KEYS if message.get(key)]:
        result |= dict.fromkeys(keys, tagged(message[keys[0]], "reasoning"))
    if message.get("tool_calls"):
        result["tool_calls"] = [tagged_call(call) for call in message["tool_calls"]]
    return result, parts
