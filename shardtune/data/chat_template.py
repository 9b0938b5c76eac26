"""A chat template: what it renders, and what trials show that it takes."""

from __future__ import annotations

import datetime
import re
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from inspect import signature
from typing import Any

from shardtune.data.messages import (
    MARKS,
    REASONING_KEYS,
    Message,
    contains,
    message_texts,
    normalize,
    tool_function,
    with_arguments_as_text,
    with_wrapped_calls,
    without_thinking_parts,
)
from shardtune.data.outcomes import Note, Outcome
from shardtune.data.record_error import RecordError

Tools = list[dict[str, Any]] | None

NEXT_TEXT = "Qq0Probe0qQ"  # content of a probe message; letters and digits, as MARK
_NAME_IN_TEMPLATE = re.compile(r"""\.\s*(\w+)|(['"])(\w+)\2""")
# Markup such as <think>, [THINK] and <|channel>thought around a text.
_AROUND_THOUGHT = re.compile(
    rf"(<[^<>\s]*>\w*|\[[^\[\]\s]*\])\s*{NEXT_TEXT}\s*(<[^<>\s]*>|\[[^\[\]\s]*\])"
)
# Every template gets these. A check shows whether it writes them, except the id, which ties an
# answer to a call. The marks are read before it renders.
_MESSAGE_FIELDS = {"role", "content", "tool_calls", "tool_call_id", *REASONING_KEYS, *MARKS}


_OF_A_TURN = ("tools", "functions", "available_tools", "tool_call", "function_calls")
# Roles that other tools write, each with the roles that replace it where the template has none.
_STAND_INS = {
    "developer": "system",
    **dict.fromkeys(("function", "observation", "tool_response"), "tool"),
}


TAKEN = "the template gets this from the records, the tokenizer or the renderer - remove it"


def taken_options(tokenizer: Any) -> set[str]:
    """Return the names of the template's variables that a user may not set."""
    parameters = signature(tokenizer.apply_chat_template).parameters
    return {"messages", *parameters, *tokenizer.special_tokens_map}


class ChatError(RecordError):
    """A record cannot be encoded exactly: `<what> - <what to do>`."""


class ChatTemplate:
    """A tokenizer's chat template, which may be several by purpose, and the stop tokens.

    Args:
        tokenizer: a fast tokenizer of transformers.
        name: the template's name in messages to users.
        date: the date that templates get which insert today's; used where `uses_date`.
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
        self._given = tokenizer, name, date, stop_texts
        longest_first = sorted(stop_texts, key=len, reverse=True)
        alternatives = "|".join(re.escape(text) for text in longest_first)
        self.stop, self._stop_texts = re.compile(alternatives), set(stop_texts)
        self.only_stops = re.compile(rf"(?:\s|{alternatives})*")
        named = tokenizer.chat_template or ""
        sources = "\n".join(named.values()) if isinstance(named, dict) else named
        self.uses_date = "strftime_now" in sources
        self._variables = set(re.findall(r"\w+", sources))
        self.unread_options = sorted(set(options) - self._variables)
        names = {a or b for a, _, b in _NAME_IN_TEMPLATE.findall(sources)}
        self._date_macro = _date_macro(date) if self.uses_date else ""
        self.mentioned, self._read_fields = names, _MESSAGE_FIELDS | names
        self.knows_tool_calls = "tool_calls" in names

    def with_options(self, options: Mapping[str, Any]) -> ChatTemplate:
        """Return the template with more options. RecordError: users may not set one of them."""
        if taken := taken_options(self.tokenizer) & options.keys():
            raise RecordError(f"chat_template_kwargs.{min(taken)}: {TAKEN}")
        template = ChatTemplate(*self._given, self.options | dict(options))
        for name in _TRIALS:  # what they show does not depend on options
            vars(template)[name] = getattr(self, name)
        return template

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
                'change the messages to what it supports ("" for a content of null), '
                "or use another template",
                kind=f"raises {type(error).__name__}: {str(error).partition(':')[0]}",
            ) from error
        return text

    @cached_property
    def option_without_thought(self) -> str:
        """Return the option that puts an empty thought into the generation prompt, or ""."""
        for name in ("enable_thinking", "thinking"):
            if name in self._variables and name not in self.options:
                prompt = self.with_options({name: False})._rendered_probe("q")
                if any(prompt.rstrip().endswith(end) for _, end in self.thoughts):
                    return f"{{{name}: false}}"
        return ""

    @cached_property
    def takes_one_text(self) -> bool:
        """Whether the template fails to write text parts, or writes them as code."""
        parts = [{"type": "text", "text": NEXT_TEXT}]
        as_text, as_parts = (self._rendered_probe(content) for content in (NEXT_TEXT, parts))
        is_read = NEXT_TEXT in as_parts and not contains(normalize(as_parts), str(parts))
        return NEXT_TEXT in as_text and not is_read

    def in_its_form(self, message: Message) -> tuple[Message, Note | None]:
        """Return a message with a role and arguments that the template takes, and what changed."""
        role, content = message["role"], message.get("content")
        given = (key for key in _OF_A_TURN if message.get(key, "[]") not in (None, "", "[]", []))
        if lost := next((key for key in given if key not in self.mentioned), None):
            raise ChatError(
                f"a message has {lost}, which {self.name} does not read - write calls as "
                "tool_calls, and tools beside messages"
            )
        has_thinking = isinstance(content, list) and any("thinking" in part for part in content)
        if has_thinking and not self._writes_thinking_parts:
            message = without_thinking_parts(message)
        if (stand_in := _STAND_INS.get(role)) and role not in self._own_roles:
            return message | {"role": stand_in}, (Outcome.STAND_IN, f"{role}, read as {stand_in}")
        if message.get("tool_calls"):
            if not self._takes_bare_calls:
                message = with_wrapped_calls(message)
            if self._takes_arguments_as_text:
                return with_arguments_as_text(message), (Outcome.ARGUMENTS_AS_TEXT, "")
        return message, None

    @cached_property
    def takes_bare_tools(self) -> bool:
        """Whether the template takes tools that are not under `function`, or writes none."""
        tool = {"name": NEXT_TEXT, "description": "d", "parameters": {"type": "object"}}
        wrapped = {"type": "function", "function": tool}
        bare, whole = (self._rendered_probe("q", tools=[each]) for each in (tool, wrapped))
        return NEXT_TEXT in bare or NEXT_TEXT not in whole

    @cached_property
    def _own_roles(self) -> set[str]:
        """The roles among _STAND_INS that the template writes."""
        return {role for role in _STAND_INS if self._writes_role(role)}

    def _writes_role(self, role: str) -> bool:
        """Whether the template has a form for this role.

        Many templates write the name of an unknown role as it is, which is not a form.
        """
        stand_in = _STAND_INS[role]
        answer = [{"role": "assistant", "content": "a"}] * (stand_in == "tool")
        own, other = (
            self._rendered_probe("q", *answer, {"role": name, "content": NEXT_TEXT})
            for name in (role, stand_in)
        )
        is_like_any = own.replace(role, stand_in) == other
        return NEXT_TEXT in own and (stand_in != "tool" or is_like_any or NEXT_TEXT not in other)

    @cached_property
    def _writes_thinking_parts(self) -> bool:
        """Whether the template writes parts of the type thinking."""
        parts = [{"type": "thinking", "thinking": NEXT_TEXT}, {"type": "text", "text": "a"}]
        rendered = self._rendered_probe("q", {"role": "assistant", "content": parts})
        return NEXT_TEXT in rendered and not contains(normalize(rendered), str(parts))

    @cached_property
    def _takes_bare_calls(self) -> bool:
        """Whether the template takes calls without a key `function`, or writes no calls."""
        call = {"name": NEXT_TEXT, "arguments": {"a": "b"}}
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        bare, whole = (
            self._rendered_probe("q", each) for each in (message, with_wrapped_calls(message))
        )
        return NEXT_TEXT in bare or NEXT_TEXT not in whole

    @cached_property
    def _takes_arguments_as_text(self) -> bool:
        """Whether the template refuses arguments that are objects, or writes them as code."""
        arguments = {NEXT_TEXT: NEXT_TEXT}
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        as_object, as_text = (
            self._rendered_probe("q", each) for each in (message, with_arguments_as_text(message))
        )
        is_written = NEXT_TEXT in as_object and str(arguments) not in as_object
        return NEXT_TEXT in as_text and not is_written

    @cached_property
    def _role_tokens(self) -> re.Pattern[str] | None:
        """The added tokens that open a turn, without end-of-turn tokens and BOS."""
        rendered = self._rendered_probe(NEXT_TEXT) if self.tokenizer.chat_template else ""
        others = set(self._stop_texts)
        bos = self.tokenizer.bos_token
        if bos and rendered.count(bos) == 1:
            others.add(bos)
        tokens = [t for t in self.tokenizer.get_added_vocab() if t in rendered and t not in others]
        return re.compile("|".join(map(re.escape, tokens))) if tokens else None

    def _rendered_probe(self, content: Any, *more: Message, tools: Tools = None) -> str:
        """Render a question, these messages and a generation prompt; "" if the template raises."""
        try:
            return self.render([{"role": "user", "content": content}, *more], tools, not more)
        except ChatError:
            return ""

    @cached_property
    def thoughts(self) -> list[tuple[str, str]]:
        """The texts that open and close a thought: the common ones, and those of the template."""
        answer = {"role": "assistant", "content": "a"} | dict.fromkeys(REASONING_KEYS, NEXT_TEXT)
        call = {"type": "function", "function": {"name": "f", "arguments": {}}}
        calling, _ = self.in_its_form(answer | {"tool_calls": [call]})
        pairs = {"<think>": "</think>"}
        for message in (calling, answer):  # some templates write thoughts beside calls alone
            if found := _AROUND_THOUGHT.search(self._rendered_probe("q", message)):
                pairs[found[1]] = found[2]
        return list(pairs.items())

    @cached_property
    def second_thought(self) -> re.Pattern[str]:
        """Finds a closed thought before another, where a turn begins: behind the `\\0`."""
        begins, ends = ("|".join(map(re.escape, each)) for each in zip(*self.thoughts, strict=True))
        # Some templates close a thought that they never write, such as </think:opensource>.
        closed = rf"(?:{ends}|</[^<>\s]*think[^<>\s]*>)\s*"
        return re.compile(rf"({closed}\0|\0\s*({begins})?\s*{closed})\s*({begins})")

    @cached_property
    def _takes_thoughts_in(self) -> bool:
        """Whether the template writes a thought in the content as it writes a separate one."""
        message = {"role": "assistant", "content": "a"}
        beside = message | dict.fromkeys(REASONING_KEYS, NEXT_TEXT)
        begin, end = self.thoughts[-1]
        within = message | {"content": f"{begin}\n{NEXT_TEXT}\n{end}\n\na"}
        texts = (normalize(self._rendered_probe("q", each)) for each in (beside, within))
        return len({*texts}) == 1

    def without_thought(self, text: str) -> str:
        """Return an answer without the thought that it begins with."""
        for begin, end in self.thoughts:
            if text.lstrip().startswith(begin):
                return text.partition(end)[2]
        return text

    def require_closed(self, where: str, text: str) -> None:
        """Raise ChatError where an answer opens a thought and does not close it."""
        for begin, end in self.thoughts:
            if text.lstrip().startswith(begin) and end not in text:
                raise ChatError(
                    f"{where} opens {begin} and does not close it: its thought was cut off - leave "
                    "such records out"
                )

    def rendered_already(self, record: dict[str, Any]) -> Iterator[Note]:
        """Yield a note for texts and tools of the record that a template has rendered before.

        A rendered text may be meant as it is. In a message, the template would write its own too.
        """
        messages = [
            message
            for name, messages in record.items()
            if name != "tools" and isinstance(messages, list)
            for message in messages
        ]
        if token := self.token_in(text for text in record.values() if isinstance(text, str)):
            is_text = "text" in record
            yield (Outcome.RENDERED_TEXT if is_text else Outcome.RENDERED_PROMPT), token
        elif token := self.token_in(t for m in messages for t in self._texts_beside_thoughts(m)):
            yield Outcome.RENDERED_MESSAGE, token
        answers = [str(m.get("content")) for m in messages if m["role"] in ("tool", *_STAND_INS)]
        if any("<tool_response>" in text for text in answers):
            yield Outcome.RENDERED_MESSAGE, "<tool_response>"
        system = "".join(str(m.get("content")) for m in messages if m["role"] == "system")
        names = [str(tool_function(tool).get("name")) for tool in record.get("tools") or []]
        if names and all(f'"{name}"' in system for name in names):
            yield Outcome.RENDERED_TOOLS, ""

    def _texts_beside_thoughts(self, message: Message) -> Iterator[str]:
        takes_in = message["role"] == "assistant" and self._takes_thoughts_in
        for _, text in message_texts(message):
            if isinstance(text, str):
                yield self.without_thought(text) if takes_in else text

    def token_in(self, texts: Iterable[str]) -> str:
        """Return the first token in these texts with which the template begins turns, or ""."""
        if self._role_tokens is None:
            return ""
        found = (found for text in texts if (found := self._role_tokens.search(text)))
        return next((each[0] for each in found), "")

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

    def unread_of(self, options: Mapping[str, Any]) -> list[str]:
        """Return the names of the options that have a value and that the template does not read."""
        nothing: tuple[Any, ...] = (None, "", [], {})
        return [name for name in self.unread_options if options.get(name) not in nothing]


_TRIALS = [
    name
    for name, value in vars(ChatTemplate).items()
    if isinstance(value, cached_property) and name != "option_without_thought"
]


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
