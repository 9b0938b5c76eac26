"""A conversation as text: what inference is given for a turn, and what it must generate, as `chat` explains."""

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
    function_of,
    holds,
    lost_from,
    squeeze,
    texts_of,
    with_marks,
    with_tags,
)

Tools = list[dict[str, Any]] | None
Offsets = list[tuple[int, int]]

_PROBE = "Qq0Probe0qQ"  # letters and digits only: no filter of a template changes them
_NAME_IN_TEMPLATE = re.compile(r"""\.\s*(\w+)|(['"])(\w+)\2""")
# These are handed to every template: what becomes of most of them is checked, and the id only ties an answer to a call.
_MESSAGE_FIELDS = {"role", "content", "tool_calls", "tool_call_id", *REASONING_KEYS}


class ChatError(ValueError):
    """One record cannot be encoded exactly; the text is `<what> - <what to do>` (the caller adds file and number)."""


@dataclass(frozen=True)
class Turn:
    """Assistant turn `index`: text[:begin] is given, text[begin:end] generated, text[stop:end] is its stop token."""

    index: int
    text: str
    begin: int
    stop: int
    end: int
    appended: bool


class ChatTemplate:
    """A tokenizer's chat template, which may be several by purpose, and the stop tokens that end turns in its texts.

    `stop_texts`: what the stop tokens write, `eos_text` the one to append. `name` stands in messages. `date`: what
    templates that insert today's date get; it matters where `uses_date`.
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
        alternatives = "|".join(
            re.escape(text) for text in sorted(stop_texts, key=len, reverse=True)
        )
        self.stop = re.compile(alternatives)
        self.only_stops = re.compile(rf"(?:\s|{alternatives})*")
        named = tokenizer.chat_template or ""
        sources = "\n".join(named.values()) if isinstance(named, dict) else named
        self.uses_date = "strftime_now" in sources
        self._read_fields = _MESSAGE_FIELDS | {
            a or b for a, _, b in _NAME_IN_TEMPLATE.findall(sources)
        }
        self._date_macro = _date_macro(date)

    def source(self, tools: Tools) -> str:
        """The template's text, for conversations with these tools; raises ChatError when there is none."""
        try:
            source = str(self.tokenizer.get_chat_template(None, tools=tools))
        except ValueError as error:
            raise ChatError(
                f"{error} - give the tokenizer a chat template, or write prompt and completion"
            ) from error
        return self._date_macro + source if "strftime_now" in source else source

    def unread_fields(self, record: dict[str, Any]) -> list[str]:
        """`messages.weight` for every field of the record's messages that the template does not mention."""
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
    """One conversation as text: what inference is given for a turn, and what it must generate."""

    def __init__(
        self, template: ChatTemplate, messages: list[Message], tools: Tools, with_roles: bool
    ) -> None:
        self.template, self.messages, self.tools, self.with_roles = (
            template,
            messages,
            tools,
            with_roles,
        )
        self.name = template.name
        self.source = template.source(tools)

    def apply(self, messages: list[Message], **options: Any) -> Any:
        """`apply_chat_template` of some messages; raises ChatError when the template raises."""
        apply = self.template.tokenizer.apply_chat_template
        try:
            return apply(messages, tools=self.tools, chat_template=self.source, **options)
        except Exception as error:  # a template is somebody's program: it may raise anything
            roles = ", ".join(message["role"] for message in messages[-4:])
            what = f"{self.name} raises {type(error).__name__} on {len(messages)} messages (... {roles}): {error}"
            raise ChatError(
                f"{what} - change the messages to what it supports, or use another template"
            ) from error

    def render(self, messages: list[Message], generation_prompt: bool = False) -> str:
        return self.apply(messages, add_generation_prompt=generation_prompt, tokenize=False)

    def turn(self, i: int) -> Turn:
        """Assistant turn i behind its generation prompt, verified; raises ChatError where it cannot be."""
        if i == 0:
            raise ChatError(
                "messages[0] is an assistant turn that nothing prompts - put another message before it"
            )
        prompt, text = self.render(self.messages[:i], True), self.render(self.messages[: i + 1])
        rest = self._behind_prompt(i, prompt, text)
        span = self._stop_in(i, text, rest)
        appended = "" if span else self._missing_stop(i, text)
        if lost_from(self.messages[i], squeeze(rest)):
            # What must be generated may begin in the prompt: a content that opens <think> as the prompt does.
            plain = self.render(self.messages[:i])
            self.require(i, (prompt[len(plain) :] if prompt.startswith(plain) else "") + rest)
        self.require_written(i, self.messages[: i + 1])
        begin, end = len(prompt), len(prompt) + (span[1] if span else len(rest) + len(appended))
        stop = begin + span[0] if span else end - len(self.template.stop.findall(appended)[-1])
        return Turn(i, prompt + rest + appended, begin, stop, end, bool(appended))

    def _behind_prompt(self, i: int, prompt: str, text: str) -> str:
        """What `text`, the rendering through turn i, holds behind the turn's generation prompt."""
        if text.startswith(prompt):
            return text[len(prompt) :]
        # The turn changes how messages before it are rendered. What inference gives stays what it is; the turn is what
        # stands behind the end of the prompt, if that still stands behind the message before.
        tail = self._behind_message(self.messages[:i], i - 1, prompt, True)
        rest = self._behind_message(self.messages[: i + 1], i - 1, text)
        if tail is None or rest is None or not rest.startswith(tail):
            what = f"the generation prompt of {self.name}, ...{prompt[-32:]!r}, is not in its text of messages[{i}]"
            raise ChatError(
                f"{what} (assistant) - use a template that begins a turn as it prompts for one"
            )
        return rest[len(tail) :]

    def _behind_message(
        self, messages: list[Message], i: int, text: str, prompted: bool = False
    ) -> str | None:
        """What `text`, the rendering of `messages`, holds behind the last text of message i; None where unknown."""
        marked = self.render([*messages[:i], with_marks(messages[i]), *messages[i + 1 :]], prompted)
        return (
            marked.rpartition(MARK)[2]
            if MARK in marked and marked.replace(MARK, "") == text
            else None
        )

    def _stop_in(self, i: int, text: str, rest: str) -> tuple[int, int] | None:
        """Where in `rest` the stop token that ends turn i stands; None where the template writes none."""
        stop = self.template.stop
        found = stop.search(rest)
        if found is None:
            return None
        if self.template.only_stops.fullmatch(rest, found.end()):
            return found.span()  # also where it is the message's own: generation ends there
        own = sum(
            len(stop.findall(value))
            for _, value in texts_of(self.messages[i])
            if isinstance(value, str)
        )
        behind = self._behind_message(self.messages[: i + 1], i, text)
        if behind is None:
            what = f"cannot tell where {self.name} ends messages[{i}] (assistant): marks in the message change its text"
            raise ChatError(f"{what} - remove template markup from the message")
        end_of_message = max(0, len(rest) - len(behind))
        if len(stop.findall(rest, 0, end_of_message)) > own:
            what = (
                f"{self.name} writes the stop token {found[0]!r} inside messages[{i}] (assistant)"
            )
            raise ChatError(
                f"{what}, where generation would end - use a template that ends a turn once"
            )
        last = stop.search(rest, end_of_message)
        return last.span() if last else None

    def _missing_stop(self, i: int, text: str) -> str:
        """What a next message would put behind `text`, through a stop token; the eos if that is none."""
        is_last = i + 1 == len(self.messages)
        calls, content = self.messages[i].get("tool_calls"), self.messages[i].get("content")
        probe: Message = {"role": "user"} if is_last else {"role": self.messages[i + 1]["role"]}
        if calls and (is_last or probe["role"] == "tool"):
            probe = {
                "role": "tool",
                "name": function_of(calls[0]).get("name"),
                "tool_call_id": calls[0].get("id"),
            }
        probe["content"] = (
            [{"type": "text", "text": _PROBE}] if isinstance(content, list) else _PROBE
        )
        through = [*self.messages[: i + 1], probe]
        try:
            probed = self.render(through)
        except ChatError:
            probed = ""  # a template that refuses the probe cannot say what follows
        behind = probed[len(text) :] if probed.startswith(text) else None
        if probed and behind is None:
            # The probe changes how the turn itself is rendered (reasoning dropped): compare behind its last text.
            tail, after = (
                self._behind_message(through[:-1], i, text),
                self._behind_message(through, i, probed),
            )
            if tail is not None and after is not None and after.startswith(tail):
                behind = after[len(tail) :]
        head, found_probe, _ = (behind or "").partition(_PROBE)
        stop = self.template.stop.search(head) if found_probe else None
        if stop is None and not is_last:
            what = f"{self.name} writes no stop token behind messages[{i}] (assistant)"
            raise ChatError(f"{what} - use a template that ends every turn, or data.loss_on=last")
        return head[: stop.end()] if stop else self.template.eos_text

    def require(self, i: int, text: str) -> None:
        """Raises ChatError when `text` leaves out something of message i, naming what."""
        self._refuse_lost(i, lost_from(self.messages[i], squeeze(text)))

    def require_written(self, i: int, messages: list[Message]) -> None:
        """Raises ChatError when `messages` are rendered without a part of message i that another part happens to hold.

        Answers of text alone have no other part.
        """
        tagged, tags = with_tags(messages[i])
        if set(tags.values()) <= {"text"}:
            return
        try:
            text = self.render([*messages[:i], tagged, *messages[i + 1 :]])
        except ChatError:
            return  # it was rendered before: a template that minds the tags has read what they stand behind
        self._refuse_lost(i, next((what for tag, what in tags.items() if tag not in text), None))

    def _refuse_lost(self, i: int, lost: str | None) -> None:
        if lost is not None:
            what = (
                f"{self.name} leaves out the {lost} of messages[{i}] ({self.messages[i]['role']})"
            )
            raise ChatError(f"{what} - remove it from the record, or use a template that writes it")

    def notes(self, turns: list[Turn]) -> list[str]:
        """What is odd about the record and yet exact; raises ChatError where contents are written as code."""
        if not turns:
            return []
        notes, squeezed = [], squeeze(turns[-1].text)
        for message in self.messages[: turns[-1].index + 1]:
            parts = message.get("content")
            if isinstance(parts, list) and holds(squeezed, str(parts)):
                what = f"{self.name} writes a list of text parts as code"
                raise ChatError(f"{what} - give the content of a message as one text")
            lost = lost_from(message, squeezed)
            if lost and message["role"] != "assistant":
                notes.append(f"{self.name} leaves out the {lost} of a {message['role']} message")
        if any(not holds(squeezed, function_of(tool).get("name")) for tool in self.tools or []):
            notes.append(f"{self.name} leaves out the tools")
        for turn in turns:
            texts = [
                (what, v) for what, v in texts_of(self.messages[turn.index]) if isinstance(v, str)
            ]
            if any(self.template.stop.search(value) for _, value in texts):
                notes.append(
                    "an assistant turn holds the text of a stop token: generation would end there"
                )
            if any(
                what.startswith("arguments") and '"' in v and v not in turn.text
                for what, v in texts
            ):
                notes.append(
                    f"{self.name} encodes tool-call arguments given as JSON text again: give them as objects"
                )
        return list(dict.fromkeys(notes))

    def roles(self, text: str, offsets: Offsets, turns: list[Turn]) -> list[str]:
        """A role for each token, where asked for: texts are looked up one behind another, at best effort."""
        if not self.with_roles:
            return []
        spans, at = [], 0
        for message in self.messages:
            for body in (value.strip() for _, value in texts_of(message) if isinstance(value, str)):
                if body and (found := text.find(body, at)) >= 0:
                    at = found + len(body)
                    spans.append((found, at, message["role"]))
        spans += [(turn.begin, turn.end, "assistant") for turn in turns]
        spans += [
            (turn.stop, turn.end, "appended")
            for turn in turns
            if turn.appended and turn.end == len(text)
        ]
        roles = ["template"] * len(offsets)
        for begin, end, role in spans:
            first, last = bisect_left(offsets, (begin, -1)), bisect_left(offsets, (end, -1))
            roles[first:last] = [role] * (last - first)
        return roles


def _date_macro(date: datetime.date) -> str:
    """Template code that fixes `strftime_now`: as arguments transformers gives a template plain data, no functions."""
    midnight = datetime.datetime.combine(date, datetime.time())
    directives = (flag + letter for flag in ("", *"-_0^#EO") for letter in string.ascii_letters)
    # The C library leaves a directive that it does not know as it is.
    values = {d: value for d in directives if (value := midnight.strftime(f"%{d}")) != f"%{d}"}
    return (
        "{% macro strftime_now(format) %}{% set values = " + repr(values) + " %}"
        "{% for part in format.replace('%%', '\\0').split('%') %}{{ (part if loop.first"
        " else values[part[:1]] ~ part[1:] if part[:1] in values else values[part[:2]] ~ part[2:] if part[:2] in values"
        " else raise_exception('strftime_now of ' ~ format ~ ': unknown directive %' ~ part)) | replace('\\0', '%') }}"
        "{% endfor %}{% endmacro +%}"
    )
