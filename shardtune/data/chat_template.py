"""A conversation as text: the prompt of each assistant turn, and the text that it must generate.

chat_encoder.py explains the derivation.
"""

from __future__ import annotations

import datetime
import re
import string
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardtune.data.messages import (
    MARK,
    REASONING_KEYS,
    Message,
    contains,
    first_missing,
    message_texts,
    normalize,
    tool_function,
    with_marks,
    with_tags,
)
from shardtune.data.records import RecordError

Tools = list[dict[str, Any]] | None
Offsets = list[tuple[int, int]]

_NEXT_TEXT = "Qq0Probe0qQ"  # content of a probe message; letters and digits, as MARK
_NAME_IN_TEMPLATE = re.compile(r"""\.\s*(\w+)|(['"])(\w+)\2""")
# Every template gets these. Whether it writes them is checked, but for the id, which only ties an
# answer to a call.
_MESSAGE_FIELDS = {"role", "content", "tool_calls", "tool_call_id", *REASONING_KEYS}


class ChatError(RecordError):
    """A record cannot be encoded exactly: `<what> - <what to do>`."""


@dataclass(frozen=True)
class Turn:
    """Assistant turn `index`: text[:begin] is its prompt, text[begin:end] is generated.

    text[stop:end] is its stop token; `appended` if the template does not write it.
    """

    index: int
    text: str
    begin: int
    stop: int
    end: int
    appended: bool


class ChatTemplate:
    """A tokenizer's chat template, which may be several by purpose, and the stop tokens.

    Args:
        tokenizer: a fast tokenizer of transformers.
        name: the template's name in messages to users.
        date: the date that templates get which insert today's; only used where `uses_date`.
        stop_texts: the texts of the stop tokens.
        eos_text: the text of the stop token to append.
    """

    def __init__(
        self,
        tokenizer: Any,
        name: str,
        date: datetime.date,
        stop_texts: Sequence[str],
        eos_text: str,
    ) -> None:
        self.tokenizer, self.name, self.date, self.eos_text = tokenizer, name, date, eos_text
        longest_first = sorted(stop_texts, key=len, reverse=True)
        alternatives = "|".join(re.escape(text) for text in longest_first)
        self.stop = re.compile(alternatives)
        self.only_stops = re.compile(rf"(?:\s|{alternatives})*")
        named = tokenizer.chat_template or ""
        sources = "\n".join(named.values()) if isinstance(named, dict) else named
        self.uses_date = "strftime_now" in sources
        names = {a or b for a, _, b in _NAME_IN_TEMPLATE.findall(sources)}
        self._read_fields = _MESSAGE_FIELDS | names
        self._date_macro = _date_macro(date)

    def source(self, tools: Tools) -> str:
        """Return the template's text for conversations with these tools.

        Raises:
            ChatError: the tokenizer has no such template.
        """
        try:
            source = str(self.tokenizer.get_chat_template(None, tools=tools))
        except ValueError as error:
            raise ChatError(
                f"{error} - give the tokenizer a chat template, or write prompt and completion"
            ) from error
        return self._date_macro + source if "strftime_now" in source else source

    def unread_fields(self, record: dict[str, Any]) -> list[str]:
        """Return `messages.weight` for every field of a message that no template mentions."""
        return sorted(
            {
                f"{name}.{key}"
                for name, messages in record.items()
                if name != "tools" and isinstance(messages, list)
                for message in messages
                for key, value in message.items()
                if value is not None and key not in self._read_fields
            }
        )


class Conversation:
    """One conversation, rendered by a template. `with_roles`: tokens get a role for display."""

    def __init__(
        self, template: ChatTemplate, messages: list[Message], tools: Tools, with_roles: bool
    ) -> None:
        self.template, self.messages, self.tools = template, messages, tools
        self.with_roles = with_roles
        self.name = template.name
        self.source = template.source(tools)

    def apply(self, messages: list[Message], **options: Any) -> Any:
        """Call `apply_chat_template`; raises ChatError when the template raises."""
        apply = self.template.tokenizer.apply_chat_template
        try:
            return apply(messages, tools=self.tools, chat_template=self.source, **options)
        except Exception as error:  # a template is a program: it may raise anything
            roles = ", ".join(message["role"] for message in messages[-4:])
            raise ChatError(
                f"{self.name} raises {type(error).__name__} on {len(messages)} messages "
                f"(... {roles}): {error} - "
                "change the messages to what it supports, or use another template"
            ) from error

    def render(self, messages: list[Message], generation_prompt: bool = False) -> str:
        return self.apply(messages, add_generation_prompt=generation_prompt, tokenize=False)

    def turn(self, i: int) -> Turn:
        """Return assistant turn i, verified; raises ChatError where it cannot be verified."""
        if i == 0:
            raise ChatError(
                "messages[0] is an assistant turn that nothing prompts - "
                "put another message before it"
            )
        prompt, text = self.render(self.messages[:i], True), self.render(self.messages[: i + 1])
        rest = self._after_prompt(i, prompt, text)
        stop_span = self._find_stop(i, text, rest)
        appended = "" if stop_span else self._missing_stop(i, text)
        if first_missing(self.messages[i], normalize(rest)):
            # The turn's text may begin in the prompt: a content that opens <think>, as that does.
            plain = self.render(self.messages[:i])
            in_prompt = prompt[len(plain) :] if prompt.startswith(plain) else ""
            self.require_texts(i, in_prompt + rest)
        self.require_parts(i, self.messages[: i + 1])
        begin = len(prompt)
        end = begin + (stop_span[1] if stop_span else len(rest) + len(appended))
        if stop_span:
            stop = begin + stop_span[0]
        else:
            stop = end - len(self.template.stop.findall(appended)[-1])
        return Turn(i, prompt + rest + appended, begin, stop, end, bool(appended))

    def _after_prompt(self, i: int, prompt: str, text: str) -> str:
        """Return the part of `text`, the rendering through turn i, after the turn's prompt."""
        if text.startswith(prompt):
            return text[len(prompt) :]
        # The turn changes how earlier messages are rendered. Its prompt at inference is still
        # `prompt`: the turn is what follows the prompt's end, if that still follows message i - 1.
        tail = self._after_message(self.messages[:i], i - 1, prompt, True)
        rest = self._after_message(self.messages[: i + 1], i - 1, text)
        if tail is None or rest is None or not rest.startswith(tail):
            raise ChatError(
                f"the generation prompt of {self.name}, ...{prompt[-32:]!r}, is not in its text "
                f"of messages[{i}] (assistant) - "
                "use a template that begins a turn as it prompts for one"
            )
        return rest[len(tail) :]

    def _after_message(
        self, messages: list[Message], i: int, text: str, prompted: bool = False
    ) -> str | None:
        """Return the part of `text`, the rendering of `messages`, after the texts of message i.

        None where a mark behind them changes the rest of the rendering.
        """
        marked = self.render([*messages[:i], with_marks(messages[i]), *messages[i + 1 :]], prompted)
        is_same = MARK in marked and marked.replace(MARK, "") == text
        return marked.rpartition(MARK)[2] if is_same else None

    def _find_stop(self, i: int, text: str, rest: str) -> tuple[int, int] | None:
        """Return the span in `rest` of the stop token that ends turn i; None if there is none."""
        stop = self.template.stop
        first = stop.search(rest)
        if first is None:
            return None
        if self.template.only_stops.fullmatch(rest, first.end()):
            return first.span()  # even if it is in the message's own text: generation ends there
        after = self._after_message(self.messages[: i + 1], i, text)
        if after is None:
            raise ChatError(
                f"cannot tell where {self.name} ends messages[{i}] (assistant): marks in the "
                "message change its text - remove template markup from the message"
            )
        end_of_message = max(0, len(rest) - len(after))
        values = [value for _, value in message_texts(self.messages[i]) if isinstance(value, str)]
        if len(stop.findall(rest, 0, end_of_message)) > sum(len(stop.findall(v)) for v in values):
            raise ChatError(
                f"{self.name} writes the stop token {first[0]!r} inside messages[{i}] (assistant), "
                "where generation would end - use a template that ends a turn once"
            )
        last = stop.search(rest, end_of_message)
        return last.span() if last else None

    def _missing_stop(self, i: int, text: str) -> str:
        """Return what a next message adds to `text` through a stop token; the eos if none."""
        is_last = i + 1 == len(self.messages)
        calls, content = self.messages[i].get("tool_calls"), self.messages[i].get("content")
        probe: Message = {"role": "user"} if is_last else {"role": self.messages[i + 1]["role"]}
        if calls and (is_last or probe["role"] == "tool"):
            name = tool_function(calls[0]).get("name")
            probe = {"role": "tool", "name": name, "tool_call_id": calls[0].get("id")}
        is_parts = isinstance(content, list)
        probe["content"] = [{"type": "text", "text": _NEXT_TEXT}] if is_parts else _NEXT_TEXT
        messages = [*self.messages[: i + 1], probe]
        try:
            probed = self.render(messages)
        except ChatError:
            probed = ""  # the template refuses the probe
        added = probed[len(text) :] if probed.startswith(text) else None
        if probed and added is None:
            # The probe changes the rendering of the turn itself (reasoning dropped): compare what
            # follows its last text.
            tail = self._after_message(messages[:-1], i, text)
            probed_tail = self._after_message(messages, i, probed)
            if tail is not None and probed_tail is not None and probed_tail.startswith(tail):
                added = probed_tail[len(tail) :]
        head, has_probe, _ = (added or "").partition(_NEXT_TEXT)
        stop = self.template.stop.search(head) if has_probe else None
        if stop is None and not is_last:
            raise ChatError(
                f"{self.name} writes no stop token behind messages[{i}] (assistant) - "
                "use a template that ends every turn, or data.loss_on=last"
            )
        return head[: stop.end()] if stop else self.template.eos_text

    def require_texts(self, i: int, text: str) -> None:
        """Raise ChatError when `text` lacks a text of message i."""
        self._refuse_missing(i, first_missing(self.messages[i], normalize(text)))

    def require_parts(self, i: int, messages: list[Message]) -> None:
        """Raise ChatError when the rendering of `messages` lacks a part of message i.

        Tags in the parts tell a part that is written from one that another part happens to hold.
        """
        tagged, parts = with_tags(messages[i])
        if set(parts.values()) <= {"text"}:
            return
        try:
            text = self.render([*messages[:i], tagged, *messages[i + 1 :]])
        except ChatError:
            return  # without tags it was rendered: a template that refuses them has read the parts
        missing = (part for tag, part in parts.items() if tag not in text)
        self._refuse_missing(i, next(missing, None))

    def _refuse_missing(self, i: int, missing: str | None) -> None:
        if missing is not None:
            role = self.messages[i]["role"]
            raise ChatError(
                f"{self.name} leaves out the {missing} of messages[{i}] ({role}) - "
                "remove it from the record, or use a template that writes it"
            )

    def notes(self, turns: list[Turn]) -> list[str]:
        """Return what is unusual about the record but exact.

        Raises:
            ChatError: the template writes contents as code.
        """
        if not turns:
            return []
        notes, normalized = [], normalize(turns[-1].text)
        for message in self.messages[: turns[-1].index + 1]:
            content = message.get("content")
            if isinstance(content, list) and contains(normalized, str(content)):
                raise ChatError(
                    f"{self.name} writes a list of text parts as code - "
                    "give the content of a message as one text"
                )
            missing = first_missing(message, normalized)
            if missing and message["role"] != "assistant":
                notes.append(f"{self.name} leaves out the {missing} of a {message['role']} message")
        if any(not contains(normalized, tool_function(t).get("name")) for t in self.tools or []):
            notes.append(f"{self.name} leaves out the tools")
        for turn in turns:
            pairs = message_texts(self.messages[turn.index])
            texts = [(part, text) for part, text in pairs if isinstance(text, str)]
            if any(self.template.stop.search(text) for _, text in texts):
                notes.append(
                    "an assistant turn holds the text of a stop token: generation would end there"
                )
            arguments = [text for part, text in texts if part.startswith("arguments")]
            if any('"' in text and text not in turn.text for text in arguments):
                notes.append(
                    f"{self.name} encodes tool-call arguments given as JSON text again: "
                    "give them as objects"
                )
        return list(dict.fromkeys(notes))

    def roles(self, text: str, offsets: Offsets, turns: list[Turn]) -> list[str]:
        """Return a role for each token, at best effort: texts are looked up one after another."""
        if not self.with_roles:
            return []
        spans, at = [], 0
        for message in self.messages:
            values = [value for _, value in message_texts(message) if isinstance(value, str)]
            for body in filter(None, map(str.strip, values)):
                begin = text.find(body, at)
                if begin >= 0:
                    at = begin + len(body)
                    spans.append((begin, at, message["role"]))
        spans += [(turn.begin, turn.end, "assistant") for turn in turns]
        appended = [turn for turn in turns if turn.appended and turn.end == len(text)]
        spans += [(turn.stop, turn.end, "appended") for turn in appended]
        roles = ["template"] * len(offsets)
        for begin, end, role in spans:
            first, last = bisect_left(offsets, (begin, -1)), bisect_left(offsets, (end, -1))
            roles[first:last] = [role] * (last - first)
        return roles


def _date_macro(date: datetime.date) -> str:
    """Return template code that fixes `strftime_now`: transformers passes data, no functions."""
    midnight = datetime.datetime.combine(date, datetime.time())
    directives = (flag + letter for flag in ("", *"-_0^#EO") for letter in string.ascii_letters)
    # The C library leaves a directive that it does not know as it is.
    values = {d: value for d in directives if (value := midnight.strftime(f"%{d}")) != f"%{d}"}
    return (
        "{% macro strftime_now(format) %}{% set values = " + repr(values) + " %}"
        "{% for part in format.replace('%%', '\\0').split('%') %}{{ (part if loop.first"
        " else values[part[:1]] ~ part[1:] if part[:1] in values"
        " else values[part[:2]] ~ part[2:] if part[:2] in values"
        " else raise_exception('strftime_now of ' ~ format ~ ': unknown directive %' ~ part))"
        " | replace('\\0', '%') }}"
        "{% endfor %}{% endmacro +%}"
    )
