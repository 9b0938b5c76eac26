"""A chat template: its facts by trials, what it renders, and messages in the form that it takes."""

from __future__ import annotations

import copy
import datetime
import json
import re
import string
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from types import MappingProxyType
from typing import Any

from shardtune.data.records import (
    MARKS,
    NEXT_TEXT,
    REASONING_KEYS,
    Conversation,
    Message,
    Note,
    Outcome,
    Record,
    RecordError,
    Text,
    Tools,
    contains,
    message_texts,
    normalize,
    tool_function,
)

# Roles that other tools write, each with the roles that replace it where the template has none.
STAND_INS = {
    "developer": "system",
    **dict.fromkeys(("function", "observation", "tool_response"), "tool"),
}
# Markup such as <think>, [THINK] and <|channel>thought around a text.
_AROUND_THOUGHT = re.compile(
    rf"(<[^<>\s]*>\w*|\[[^\[\]\s]*\])\s*{NEXT_TEXT}\s*(<[^<>\s]*>|\[[^\[\]\s]*\])"
)
_PARTS = [{"type": "text", "text": NEXT_TEXT}]
# Renders messages, with a generation prompt behind a single one; "" if the template raises.
Probe = Callable[..., str]
Words = Collection[str]


@dataclass(frozen=True)
class TemplateFacts:
    """What a template does with the options of a run. `takes_...`: writes such a value as meant."""

    adds_date: bool
    writes_system: bool
    keeps_thoughts: bool  # of earlier turns
    ends_answers: str  # "in the turn", "in the next turn" or "never", with a stop token
    own_roles: tuple[str, ...]  # among STAND_INS
    takes_tools: bool
    takes_bare_tools: bool  # without a key `function`, or it writes none
    takes_bare_calls: bool
    takes_objects: bool  # as arguments of calls
    takes_parts: bool  # of text
    takes_thinking_parts: bool
    takes_thoughts_in_content: bool  # as it writes those beside it
    thoughts: tuple[tuple[str, str], ...]  # the texts that open and close one; the common pair, too
    no_thought_option: str  # whose value false puts an empty thought into the prompt
    begins_turns: tuple[str, ...]  # added tokens that open a turn

    def with_calls(self, message: Message) -> Message:
        """Copy a message with its calls as the template takes them."""
        message = message if self.takes_bare_calls else _with_wrapped_calls(message)
        return message if self.takes_objects else _with_arguments_as_text(message)


def _user(content: Any) -> Message:
    return {"role": "user", "content": content}


def _answer(content: Any = "", **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


_Q = _user("q")


def find_facts(
    probe: Probe, variables: Words, added: Words, bos: str, stop: re.Pattern[str]
) -> TemplateFacts:
    """Try a template. `variables`: its own. `added`: the tokens added to the vocabulary."""
    tool = {"name": NEXT_TEXT, "description": "d", "parameters": {"type": "object"}}
    bare_tool = NEXT_TEXT in probe(_Q, tools=[tool])
    takes_tools = NEXT_TEXT in probe(_Q, tools=[{"type": "function", "function": tool}])
    takes_objects = _takes_objects(probe)
    thoughts = _thoughts(probe, takes_objects)
    thought = dict.fromkeys(REASONING_KEYS, NEXT_TEXT)
    begin, end = thoughts[-1]
    beside, within = _answer("a", **thought), _answer(f"{begin}\n{NEXT_TEXT}\n{end}\n\na")
    # Some templates write parts alone.
    text = NEXT_TEXT if NEXT_TEXT in probe(_user(NEXT_TEXT)) else _PARTS
    thinking = [{"type": "thinking", "thinking": NEXT_TEXT}, {"type": "text", "text": "a"}]
    return TemplateFacts(
        adds_date="strftime_now" in variables,
        writes_system=NEXT_TEXT in probe({"role": "system", "content": text}, _Q),
        keeps_thoughts=NEXT_TEXT in probe(_Q, beside, _Q),
        ends_answers=_ends_answers(probe, _answer(text), stop),
        own_roles=tuple(role for role in STAND_INS if _writes_role(probe, role)),
        takes_tools=takes_tools,
        takes_bare_tools=bare_tool or not takes_tools,
        takes_bare_calls=_takes_bare_calls(probe),
        takes_objects=takes_objects,
        takes_parts=_takes_parts(probe),
        takes_thinking_parts=_is_written(thinking, probe(_Q, _answer(thinking))),
        takes_thoughts_in_content=_alike(probe(_Q, beside), probe(_Q, within)),
        thoughts=thoughts,
        no_thought_option=_no_thought_option(probe, variables, tuple(dict(thoughts).values())),
        begins_turns=_begins_turns(probe(_user(NEXT_TEXT)), added, bos, stop),
    )


def _is_written(value: Any, text: str) -> bool:
    """Whether a rendering has the text of a value, and not the value as code."""
    return NEXT_TEXT in text and not contains(normalize(text), str(value))


def _alike(text: str, other: str) -> bool:
    return normalize(text) == normalize(other)


def _takes_parts(probe: Probe) -> bool:
    """Whether it writes text parts as texts; one that writes no text at all may take them."""
    return _is_written(_PARTS, probe(_user(_PARTS))) or NEXT_TEXT not in probe(_user(NEXT_TEXT))


def _takes_bare_calls(probe: Probe) -> bool:
    """Whether it takes calls without a key `function`, or writes no calls."""
    message = _answer(tool_calls=[{"name": NEXT_TEXT, "arguments": {"a": "b"}}])
    bare, whole = (probe(_Q, each) for each in (message, _with_wrapped_calls(message)))
    return NEXT_TEXT in bare or NEXT_TEXT not in whole


def _takes_objects(probe: Probe) -> bool:
    """Whether arguments may be objects; not if it refuses them, or writes them as code."""
    arguments = {NEXT_TEXT: NEXT_TEXT}
    function = {"name": "f", "arguments": arguments}
    message = _answer(tool_calls=[{"type": "function", "function": function}])
    as_object, as_text = (probe(_Q, each) for each in (message, _with_arguments_as_text(message)))
    is_written = NEXT_TEXT in as_object and str(arguments) not in as_object
    return is_written or NEXT_TEXT not in as_text


def _writes_role(probe: Probe, role: str) -> bool:
    """Whether it has a form for this role: many write the name of an unknown role as it is."""
    stand_in = STAND_INS[role]
    before = [_Q, _answer("a")] if stand_in == "tool" else [_Q]
    own, other = (probe(*before, {"role": name, "content": NEXT_TEXT}) for name in (role, stand_in))
    is_like_any = own.replace(role, stand_in) == other
    return NEXT_TEXT in own and (stand_in != "tool" or is_like_any or NEXT_TEXT not in other)


def _thoughts(probe: Probe, takes_objects: bool) -> tuple[tuple[str, str], ...]:
    """Return the texts that open and close a thought: the common ones, and the template's."""
    answer = _answer("a", **dict.fromkeys(REASONING_KEYS, NEXT_TEXT))
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    calling = answer | {"tool_calls": [call]}
    pairs = {"<think>": "</think>"}
    # Some templates write thoughts beside calls alone.
    for message in (calling if takes_objects else _with_arguments_as_text(calling), answer):
        if found := _AROUND_THOUGHT.search(probe(_Q, message)):
            pairs[found[1]] = found[2]
    return tuple(pairs.items())


def _no_thought_option(probe: Probe, variables: Words, ends: tuple[str, ...]) -> str:
    names = (name for name in ("enable_thinking", "thinking") if name in variables)
    return next((n for n in names if probe(_Q, **{n: False}).rstrip().endswith(ends)), "")


def _begins_turns(text: str, added: Words, bos: str, stop: re.Pattern[str]) -> tuple[str, ...]:
    others = {bos} if bos and text.count(bos) == 1 else ()
    is_in = (token for token in added if token in text and token not in others)
    return tuple(token for token in is_in if not stop.fullmatch(token))


def _ends_answers(probe: Probe, answer: Message, stop: re.Pattern[str]) -> str:
    for where, more in (("in the turn", []), ("in the next turn", [_user("x")])):
        if stop.search(probe(_Q, answer, *more).rpartition(NEXT_TEXT)[2]):
            return where
    return "never"


def _with_wrapped_calls(message: Message) -> Message:
    """Copy a message whose tool calls all stand under `function`."""
    calls = []
    for call in message["tool_calls"]:
        function = {key: call[key] for key in ("name", "arguments") if key in call}
        others = {key: call[key] for key in call.keys() - function.keys()}
        is_bare = "function" not in call
        calls.append({"type": "function", **others, "function": function} if is_bare else call)
    return message | {"tool_calls": calls}


def _with_arguments_as_text(message: Message) -> Message:
    """Copy a message whose tool calls have their arguments as JSON text."""
    calls = []
    for call in message["tool_calls"]:
        function = tool_function(call)
        text = json.dumps(function["arguments"], ensure_ascii=False, default=str)
        as_text = function | {"arguments": text}
        calls.append(call | {"function": as_text} if "function" in call else as_text)
    return message | {"tool_calls": calls}


_NAME_IN_TEMPLATE = re.compile(r"""\.\s*(\w+)|(['"])(\w+)\2""")
# Every template gets these. A check shows whether it writes them, except the id, which ties an
# answer to a call. The marks are read before it renders.
_MESSAGE_FIELDS = {"role", "content", "tool_calls", "tool_call_id", *REASONING_KEYS, *MARKS}
_OF_A_TURN = ("tools", "functions", "available_tools", "tool_call", "function_calls")
Options = Mapping[str, Any]
NO_OPTIONS: Options = MappingProxyType({})


class ChatError(RecordError):
    """A record cannot be encoded exactly: `<what> - <what to do>`."""


class ChatTemplate:
    """A tokenizer's chat template, which may be several by purpose.

    `date`: for templates that insert today's. `stops`: the texts of the stop tokens, first the one
    to append. `options`: variables for the template, such as `enable_thinking`.
    """

    def __init__(
        self, tokenizer: Any, name: str, date: datetime.date, stops: Sequence[str], options: Options
    ) -> None:
        self.tokenizer, self.name, self.date, self.options = tokenizer, name, date, dict(options)
        self.eos_text, longest_first = stops[0], sorted(stops, key=len, reverse=True)
        alternatives = "|".join(re.escape(text) for text in longest_first)
        self.stop = re.compile(alternatives)
        self.only_stops = re.compile(rf"(?:\s|{alternatives})*")
        named = tokenizer.chat_template or ""
        source = "\n".join(named.values()) if isinstance(named, dict) else named
        self._variables = set(re.findall(r"\w+", source))
        self.mentioned = {a or b for a, _, b in _NAME_IN_TEMPLATE.findall(source)}
        self._date_macro = _date_macro(date) if "strftime_now" in self._variables else ""

    @cached_property
    def facts(self) -> TemplateFacts:
        """What the template does, tried once with the options of the run."""

        def probe(*messages: Message, tools: Tools = None, **options: Any) -> str:
            try:
                return self.render([*messages], tools, len(messages) == 1, options)
            except ChatError:
                return ""

        added, bos = self.tokenizer.get_added_vocab(), self.tokenizer.bos_token or ""
        return find_facts(probe, self._variables - self.options.keys(), added, bos, self.stop)

    def taken(self, key: str, options: Options) -> list[str]:
        """Return a problem for each of the options of a key that a user may not set."""
        parameters = signature(self.tokenizer.apply_chat_template).parameters
        taken = {"messages", *parameters, *self.tokenizer.special_tokens_map} & options.keys()
        said = "the template gets this from the records, the tokenizer or the renderer - remove it"
        return [f"{key}.{option}: {said}" for option in sorted(taken)]

    def with_options(self, options: Options) -> ChatTemplate:
        """Return the template with more options. RecordError: users may not set one of them."""
        if taken := self.taken("chat_template_kwargs", options):
            raise RecordError(taken[0])
        template = copy.copy(self)
        template.options = self.options | dict(options)
        vars(template)["facts"] = self.facts
        return template

    def render(
        self, messages: list[Message], tools: Tools, prompted: bool, options: Options = NO_OPTIONS
    ) -> str:
        """Return the text of the messages; raises ChatError when the template raises."""
        try:
            source = self.tokenizer.get_chat_template(None, tools=tools)
            text: str = self.tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=self._date_macro + source,
                add_generation_prompt=prompted,
                tokenize=False,
                **{**self.options, **options},
            )
        except Exception as error:  # a template is a program: it may raise anything
            roles = ", ".join(message["role"] for message in messages[-4:])
            raised = f"raises {type(error).__name__}"
            raise ChatError(
                f"{self.name} {raised} on {len(messages)} messages (... {roles}): {error} - change "
                'them to what it supports ("" for a content of null), or use another template',
                kind=f"{raised}: {str(error).partition(':')[0]}",
            ) from error
        return text

    def in_its_form(self, given: Conversation) -> tuple[list[Message], Tools, list[Note]]:
        """Return messages without marks and tools as the template takes them, and what changed."""
        notes: list[Note] = []
        messages = [self._in_its_form(message, notes) for message in given.messages]
        has_parts = any(isinstance(message.get("content"), list) for message in messages)
        if has_parts and not self.facts.takes_parts:
            messages = [*map(with_one_text, messages)]
            notes.append((Outcome.PARTS_JOINED, ""))
        if (tools := given.tools) and not self.facts.takes_bare_tools:
            tools = [t if "function" in t else {"type": "function", "function": t} for t in tools]
        return messages, tools, notes

    def _in_its_form(self, message: Message, notes: list[Note]) -> Message:
        given = (key for key in _OF_A_TURN if message.get(key, "[]") not in (None, "", "[]", []))
        if lost := next((key for key in given if key not in self.mentioned), None):
            said = f"a message has {lost}, which {self.name} does not read"
            raise ChatError(f"{said} - write calls as tool_calls, and tools beside messages")
        message = {key: value for key, value in message.items() if key not in MARKS}
        role, content = message["role"], message.get("content")
        has_thinking = isinstance(content, list) and any("thinking" in part for part in content)
        if has_thinking and not self.facts.takes_thinking_parts:
            message = without_thinking_parts(message)
        if (stand_in := STAND_INS.get(role)) and role not in self.facts.own_roles:
            notes.append((Outcome.STAND_IN, f"{role}, read as {stand_in}"))
            return message | {"role": stand_in}
        if not message.get("tool_calls"):
            return message
        if not self.facts.takes_objects:
            notes.append((Outcome.ARGUMENTS_AS_TEXT, ""))
        return self.facts.with_calls(message)

    @cached_property
    def second_thought(self) -> re.Pattern[str]:
        """Finds a closed thought before another, where a turn begins: behind the `\\0`."""
        pairs = zip(*self.facts.thoughts, strict=True)
        begins, ends = ("|".join(map(re.escape, each)) for each in pairs)
        # Some templates close a thought that they never write, such as </think:opensource>.
        closed = rf"(?:{ends}|</[^<>\s]*think[^<>\s]*>)\s*"
        return re.compile(rf"({closed}\0|\0\s*({begins})?\s*{closed})\s*({begins})")

    def opened_thought(self, text: str) -> tuple[str, str] | None:
        """Return the texts that open and close the thought with which a text begins."""
        text = text.lstrip()
        return next((pair for pair in self.facts.thoughts if text.startswith(pair[0])), None)

    def require_closed(self, where: str, text: str) -> None:
        """Raise ChatError where an answer opens a thought and does not close it."""
        thought = self.opened_thought(text)
        if thought and thought[1] not in text:
            said = f"{where} opens {thought[0]} and does not close it: its thought was cut off"
            raise ChatError(f"{said} - leave such records out")

    def rendered_already(self, record: Record) -> Iterator[Note]:
        """Yield a note for texts and tools of the record that a template has rendered before."""
        if isinstance(record, Text):
            is_text = record.prompt is None
            if token := self.token_in([record.prompt or "", record.text]):
                yield (Outcome.RENDERED_TEXT if is_text else Outcome.RENDERED_PROMPT), token
        if not isinstance(record, Conversation):
            return
        messages = record.messages
        if token := self.token_in(
            text for m in messages for text in self._texts_without_thought(m)
        ):
            yield Outcome.RENDERED_MESSAGE, token
        answers = [str(m.get("content")) for m in messages if m["role"] in ("tool", *STAND_INS)]
        if any("<tool_response>" in text for text in answers):
            yield Outcome.RENDERED_MESSAGE, "<tool_response>"
        system = "".join(str(m.get("content")) for m in messages if m["role"] == "system")
        names = [str(tool_function(tool).get("name")) for tool in record.tools or []]
        if names and all(f'"{name}"' in system for name in names):
            yield Outcome.RENDERED_TOOLS, ""

    def _texts_without_thought(self, message: Message) -> Iterator[str]:
        takes_in = message["role"] == "assistant" and self.facts.takes_thoughts_in_content
        for _, text in message_texts(message):
            if isinstance(text, str):
                thought = self.opened_thought(text) if takes_in else None
                yield text.partition(thought[1])[2] if thought else text

    def token_in(self, texts: Iterable[str]) -> str:
        """Return the first token in these texts with which the template begins turns, or ""."""
        if self._begin is None:
            return ""
        found = (found for text in texts if (found := self._begin.search(text)))
        return next((each[0] for each in found), "")

    @cached_property
    def _begin(self) -> re.Pattern[str] | None:
        tokens = self.facts.begins_turns
        return re.compile("|".join(map(re.escape, tokens))) if tokens else None

    def unread_fields(self, record: Record) -> list[str]:
        """Return `messages.weight` for every field of a message that no template mentions."""
        if not isinstance(record, Conversation):
            return []
        read = _MESSAGE_FIELDS | self.mentioned
        turns = {name: each for name, each in record.content.items() if name != "tools"}
        fields = ((name, *item) for name in turns for turn in turns[name] for item in turn.items())
        return sorted({f"{name}.{k}" for name, k, v in fields if v is not None and k not in read})

    def unread_of(self, options: Options) -> list[str]:
        """Return the names of the options that have a value and that the template does not read."""
        nothing: tuple[Any, ...] = (None, "", [], {})
        unread = options.keys() - self._variables
        return sorted(name for name in unread if options[name] not in nothing)


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
