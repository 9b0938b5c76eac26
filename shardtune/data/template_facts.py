"""What a chat template does, found by trials: plain data that everything else asks."""

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from shardtune.data.records import (
    NEXT_TEXT,
    REASONING_KEYS,
    Message,
    contains,
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
