"""A conversation as text: the prompt of each assistant turn, and the text that it must generate.

chat_encoder.py explains the derivation.
"""

from __future__ import annotations

import datetime
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from shardtune.data.messages import (
    MARK,
    REASONING_KEYS,
    TRAIN_FLAGS,
    Message,
    contains,
    first_missing,
    holds_a_line,
    message_texts,
    normalize,
    stop_count,
    tool_function,
    with_arguments_as_text,
    with_marks,
    with_tags,
)
from shardtune.data.outcomes import Note, Outcome
from shardtune.data.record_error import RecordError

Tools = list[dict[str, Any]] | None

_NEXT_TEXT = "Qq0Probe0qQ"  # content of a probe message; letters and digits, as MARK
_NAME_IN_TEMPLATE = re.compile(r"""\.\s*(\w+)|(['"])(\w+)\2""")
# Every template gets these. Whether it writes them is checked, but for the id, which only ties an
# answer to a call. The flags are ours.
_MESSAGE_FIELDS = {"role", "content", "tool_calls", "tool_call_id", *REASONING_KEYS, *TRAIN_FLAGS}


# Roles that other tools write, and those that stand in where a template does not write them.
_STAND_INS = {
    "developer": "system",
    **dict.fromkeys(("function", "observation", "tool_response"), "tool"),
}


class ChatError(RecordError):
    """A record cannot be encoded exactly: `<what> - <what to do>`."""


@dataclass(frozen=True)
class Turn:
    """Assistant turn `index`: text[:begin] is its prompt, text[begin:end] is generated.

    `appended`: the template does not write the stop token that ends it.
    """

    index: int
    text: str
    begin: int
    end: int
    appended: bool


class ChatTemplate:
    """A tokenizer's chat template, which may be several by purpose, and the stop tokens.

    Args:
        tokenizer: a fast tokenizer of transformers.
        name: the template's name in messages to users.
        date: the date that templates get which insert today's; only used where `uses_date`.
        stop_texts: the texts of the stop tokens, first the one to append.
        options: variables for the template, such as `enable_thinking`.
    """

    def __init__(
        self,
        tokenizer: Any,
        name: str,
        date: datetime.date,
        stop_texts: Sequence[str],
        options: Mapping[str, Any],
    ) -> None:
        self.options = dict(options)
        self.tokenizer, self.name, self.date, self.eos_text = tokenizer, name, date, stop_texts[0]
        longest_first = sorted(stop_texts, key=len, reverse=True)
        alternatives = "|".join(re.escape(text) for text in longest_first)
        self.stop, self._stop_texts = re.compile(alternatives), set(stop_texts)
        self.only_stops = re.compile(rf"(?:\s|{alternatives})*")
        named = tokenizer.chat_template or ""
        sources = "\n".join(named.values()) if isinstance(named, dict) else named
        self.uses_date = "strftime_now" in sources
        self.unread_options = sorted(set(options) - set(re.findall(r"\w+", sources)))
        names = {a or b for a, _, b in _NAME_IN_TEMPLATE.findall(sources)}
        self._date_macro = _date_macro(date) if self.uses_date else ""
        self._read_fields = _MESSAGE_FIELDS | names
        self.knows_tool_calls = "tool_calls" in names

    def render(self, messages: list[Message], tools: Tools, generation_prompt: bool) -> str:
        """Return the text of the messages; raises ChatError when the template raises."""
        try:
            source = self.tokenizer.get_chat_template(None, tools=tools)
            text: str = self.tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=self._date_macro + source,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **self.options,
            )
        except Exception as error:  # a template is a program: it may raise anything
            roles = ", ".join(message["role"] for message in messages[-4:])
            raise ChatError(
                f"{self.name} raises {type(error).__name__} on {len(messages)} messages "
                f"(... {roles}): {error} - "
                "change the messages to what it supports, or use another template",
                kind=f"raises {type(error).__name__}: {str(error).partition(':')[0]}",
            ) from error
        return text

    @cached_property
    def takes_one_text(self) -> bool:
        """Whether the template writes a content of text parts as code, or not at all."""
        parts = [{"type": "text", "text": _NEXT_TEXT}]
        as_text, as_parts = (self._rendered_probe(content) for content in (_NEXT_TEXT, parts))
        is_read = _NEXT_TEXT in as_parts and not contains(normalize(as_parts), str(parts))
        return _NEXT_TEXT in as_text and not is_read

    def in_its_form(self, message: Message) -> tuple[Message, Note | None]:
        """Return a message with a role and arguments that the template takes, and what changed."""
        role = message["role"]
        if (stand_in := _STAND_INS.get(role)) and not self._writes_role(role):
            return message | {"role": stand_in}, (Outcome.STAND_IN, f"{role}, read as {stand_in}")
        if message.get("tool_calls") and self._takes_arguments_as_text:
            return with_arguments_as_text(message), (Outcome.ARGUMENTS_AS_TEXT, "")
        return message, None

    @cached_property
    def takes_bare_tools(self) -> bool:
        """Whether the template writes a tool that does not stand under `function`."""
        try:
            tool = {"name": _NEXT_TEXT, "description": "d", "parameters": {"type": "object"}}
            return _NEXT_TEXT in self.render([{"role": "user", "content": "q"}], [tool], True)
        except ChatError:
            return False

    @lru_cache  # noqa: B019 - a template lives as long as the process
    def _writes_role(self, role: str) -> bool:
        """Whether the template writes the text of a message with this role."""
        question, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
        probe = {"role": role, "content": _NEXT_TEXT}
        messages = [question, answer, probe] if _STAND_INS[role] == "tool" else [probe, question]
        try:
            return _NEXT_TEXT in self.render(messages, None, True)
        except ChatError:
            return False

    @cached_property
    def _takes_arguments_as_text(self) -> bool:
        """Whether the template refuses arguments that are objects, or writes them as code."""
        arguments = {_NEXT_TEXT: _NEXT_TEXT}
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        as_object, as_text = (
            self._rendered_probe("q", each) for each in (message, with_arguments_as_text(message))
        )
        is_written = _NEXT_TEXT in as_object and str(arguments) not in as_object
        return _NEXT_TEXT in as_text and not is_written

    @cached_property
    def _role_tokens(self) -> re.Pattern[str] | None:
        """The added tokens in front of turns, but for those that end one or begin every text."""
        rendered = self._rendered_probe(_NEXT_TEXT) if self.tokenizer.chat_template else ""
        others = set(self._stop_texts)
        bos = self.tokenizer.bos_token
        if bos and rendered.count(bos) == 1:
            others.add(bos)
        tokens = [t for t in self.tokenizer.get_added_vocab() if t in rendered and t not in others]
        return re.compile("|".join(map(re.escape, tokens))) if tokens else None

    def _rendered_probe(self, content: Any, *more: Message) -> str:
        """Return a question, and more, with a generation prompt; "" where the template raises."""
        try:
            return self.render([{"role": "user", "content": content}, *more], None, not more)
        except ChatError:
            return ""

    def rendered_already(self, record: dict[str, Any]) -> Note | None:
        """Return a note if a text of the record holds a token with which the template begins turns.

        A rendered text may be meant as it is. In a message, the template would write its own too.
        """
        if self._role_tokens is None:
            return None
        of_texts = Outcome.RENDERED_TEXT if "text" in record else Outcome.RENDERED_PROMPT
        for outcome, texts in (
            (of_texts, [text for text in record.values() if isinstance(text, str)]),
            (
                Outcome.RENDERED_MESSAGE,
                [
                    text
                    for name, messages in record.items()
                    if name != "tools" and isinstance(messages, list)
                    for message in messages
                    for _, text in message_texts(message)
                    if isinstance(text, str)
                ],
            ),
        ):
            tokens = (found for text in texts if (found := self._role_tokens.search(text)))
            if token := next(tokens, None):
                return outcome, token[0]
        return None

    def unread_fields(self, record: dict[str, Any]) -> list[str]:
        """Return `messages.weight` for every field of a message that no template mentions."""
        names = {
            f"{name}.{key}"
            for name, messages in record.items()
            if name != "tools" and isinstance(messages, list)
            for message in messages
            for key, value in message.items()
            if value is not None and key not in self._read_fields
        }
        return sorted(names)


class Conversation:
    """One conversation, rendered by a template."""

    def __init__(self, template: ChatTemplate, messages: list[Message], tools: Tools) -> None:
        self.template, self.messages, self.tools = template, messages, tools
        self._turns: dict[int, Turn] = {}

    def render(self, messages: list[Message], generation_prompt: bool = False) -> str:
        return self.template.render(messages, self.tools, generation_prompt)

    def turn(self, i: int) -> Turn:
        """Return assistant turn i, verified; raises ChatError where it cannot be verified."""
        if i not in self._turns:
            self._turns[i] = self._derive_turn(i)
        return self._turns[i]

    def _derive_turn(self, i: int) -> Turn:
        if i == 0:
            raise ChatError(
                "messages[0] is an assistant turn that nothing prompts - "
                "put another message before it"
            )
        before, through = self.messages[:i], self.messages[: i + 1]
        prompt, text = self.render(before, True), self.render(through)
        generated = self._continuation(i - 1, before, prompt, through, text, True)
        if generated is None:
            raise ChatError(
                f"the generation prompt of {self.template.name}, ...{prompt[-32:]!r}, is not in "
                f"its text of messages[{i}] (assistant) - "
                "use a template that begins a turn as it prompts for one, or other "
                "data.template_options",
                kind="the generation prompt is not in the text",
            )
        end = self._end_of_turn(i, text, generated)
        appended = "" if end else self._missing_stop(i, text)
        if first_missing(self.messages[i], normalize(generated)):
            # The turn's text may begin in the prompt: a content that opens <think>, as that does.
            plain = self.render(before)
            in_prompt = prompt[len(plain) :] if prompt.startswith(plain) else ""
            self.require_texts(i, in_prompt + generated)
        self.require_parts(i, through)
        generated += appended
        end = len(prompt) + (end or len(generated))
        return Turn(i, prompt + generated, len(prompt), end, bool(appended))

    def _continuation(
        self,
        i: int,
        shorter: list[Message],
        text: str,
        longer: list[Message],
        longer_text: str,
        prompted: bool = False,
    ) -> str | None:
        """Return what stands in `longer_text` behind `text`, the renderings of these messages.

        Message i is the last one of `shorter`; `prompted`: `text` ends with a generation prompt.
        None if the template writes something else behind message i in the longer conversation.
        """
        if longer_text.startswith(text):
            return longer_text[len(text) :]
        # More messages change how earlier ones are rendered (reasoning is dropped, a system text
        # moves). At inference the model sees `text`: compare what follows the texts of message i.
        tail = self._after_message(i, shorter, text, prompted)
        longer_tail = self._after_message(i, longer, longer_text)
        if tail is None or longer_tail is None or not longer_tail.startswith(tail):
            return None
        return longer_tail[len(tail) :]

    def _after_message(
        self, i: int, messages: list[Message], text: str, prompted: bool = False
    ) -> str | None:
        """Return the part of `text`, the rendering of `messages`, after the texts of message i.

        None where a mark behind them changes the rest of the rendering.
        """
        marked = self.render([*messages[:i], with_marks(messages[i]), *messages[i + 1 :]], prompted)
        is_same = MARK in marked and marked.replace(MARK, "") == text
        return marked.rpartition(MARK)[2] if is_same else None

    def _end_of_turn(self, i: int, text: str, generated: str) -> int | None:
        """Return the end in `generated` of the stop token that ends turn i; None if none does."""
        stop = self.template.stop.search(generated)
        if stop and not self.template.only_stops.fullmatch(generated, stop.end()):
            # The message's own text may hold a stop token: look behind it.
            after = self._after_message(i, self.messages[: i + 1], text)
            if after is None:
                raise ChatError(
                    f"cannot tell where {self.template.name} ends messages[{i}] (assistant): marks "
                    "in the message change its text - remove template markup from the message"
                )
            end = max(0, len(generated) - len(after))
            found = len(self.template.stop.findall(generated, 0, end))
            if found > stop_count(self.template.stop, self.messages[i]):
                raise ChatError(
                    f"{self.template.name} writes the stop token {stop[0]!r} inside messages[{i}] "
                    "(assistant), where generation would end - "
                    "use a template that ends a turn once"
                )
            stop = self.template.stop.search(generated, end)
        return stop.end() if stop else None

    def _missing_stop(self, i: int, text: str) -> str:
        """Return what a next message adds to `text` through a stop token; the eos if none."""
        is_last = i + 1 == len(self.messages)
        probe: Message = {"role": "user"} if is_last else self.messages[i + 1]
        calls = self.messages[i].get("tool_calls")
        if calls and is_last:
            name, call_id = tool_function(calls[0])["name"], calls[0].get("id")
            probe = {"role": "tool", "name": name, "tool_call_id": call_id}
        is_parts = isinstance(self.messages[i].get("content"), list)
        content = [{"type": "text", "text": _NEXT_TEXT}] if is_parts else _NEXT_TEXT
        through = self.messages[: i + 1]
        probed = [*through, probe | {"content": content}]
        try:
            added = self._continuation(i, through, text, probed, self.render(probed))
        except ChatError:
            added = None  # the template refuses the probe
        head, has_probe, _ = (added or "").partition(_NEXT_TEXT)
        stop = self.template.stop.search(head) if has_probe else None
        if stop is None and not is_last:
            raise ChatError(
                f"{self.template.name} writes no stop token behind messages[{i}] (assistant) - "
                "use a template that ends every turn, or data.loss_on=last"
            )
        return head[: stop.end()] if stop else self.template.eos_text

    def require_texts(self, i: int, text: str) -> None:
        """Raise ChatError when `text` lacks a text of message i."""
        self._refuse_missing(i, first_missing(self.messages[i], normalize(text)))

    def require_parts(self, i: int, messages: list[Message]) -> None:
        """Raise ChatError when the rendering of `messages` lacks a part of message i.

        Tags in the parts tell a part that is written from one that other text happens to hold.
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
            known, remedy = "", "remove it from the record, or use a template that writes it"
            if "tool call" in missing and not self.template.knows_tool_calls:
                known = ": it knows no tool calls"
                remedy = "leave such records out, or use a model whose template does"
            raise ChatError(
                f"{self.template.name} leaves out the {missing} of messages[{i}] (assistant)"
                f"{known} - {remedy}"
            )

    def notes(self, text: str) -> list[Note]:
        """Return what is unusual about `text`, the rendering of all messages, but exact.

        Raises:
            ChatError: the template writes contents as code.
        """
        normalized, notes = normalize(text), []
        for i, message in enumerate(self.messages):
            content, role = message.get("content"), message["role"]
            if isinstance(content, list) and contains(normalized, str(content)):
                raise ChatError(
                    f"{self.template.name} writes a list of text parts as code - "
                    "give the content of a message as one text"
                )
            is_context = role != "assistant" or message is self.messages[0]
            if is_context and (missing := first_missing(message, normalized)):
                article = "an" if role == "assistant" else "a"
                notes.append((Outcome.LEFT_OUT, f"{missing} of {article} {role} message"))
                if missing == "text" and not holds_a_line(message, normalized):
                    notes[-1] = Outcome.LOST, f"messages[{i}] ({role})"
            if role == "assistant" and stop_count(self.template.stop, message):
                notes.append((Outcome.STOP_IN_TEXT, ""))
        if any(str(tool_function(tool).get("name")) not in text for tool in self.tools or []):
            notes.append((Outcome.LEFT_OUT, "tools"))
        return list(dict.fromkeys(notes))


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
