"""What stands between the forms of records and templates, and the texts that a message holds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

Message = dict[str, Any]
Tools = list[dict[str, Any]] | None

# Content of a probe message; letters and digits only: no filter of a template changes them.
NEXT_TEXT = "Qq0Probe0qQ"
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")  # in the order of transformers
# On a message, ours and other tools': whether its turn is trained where the mark is true.
MARKS = {
    **dict.fromkeys(("train", "weight", "trainable", "training"), True),
    **dict.fromkeys(("loss", "loss_mask", "loss_weight"), True),
    "masked": False,
}
_MEDIA = re.compile(r"(image|picture|video|audio)s?")


@dataclass(frozen=True)
class Conversation:
    """Messages in the one form of all records that have turns."""

    # Each has a `role`; a `content`, a text or a list of parts of the types text and thinking; a
    # thought under one of REASONING_KEYS; `tool_calls`, whose arguments are objects; a mark of
    # MARKS, if it says whether its turn is trained; and what else its template may read.
    messages: list[Message]
    tools: Tools = None  # None if the record has none
    options: Mapping[str, Any] = field(default_factory=dict)  # of the template, for this record
    first: int = 0  # answers before this message are context

    @property
    def content(self) -> dict[str, Any]:
        """The record as JSON has it, by which evaluation data is chosen. Options do not count."""
        turns: dict[str, Any] = {"messages": self.messages}
        if self.first:
            turns = {"prompt": self.messages[: self.first]}
            turns["completion"] = self.messages[self.first :]
        return turns if self.tools is None else turns | {"tools": self.tools}

    @property
    def train_flags(self) -> dict[int, bool]:
        """Whether a message is to be trained, by its index, for those whose marks say it."""
        flags = ((i, train_flag(message)) for i, message in enumerate(self.messages))
        return {i: flag for i, flag in flags if flag is not None}


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
