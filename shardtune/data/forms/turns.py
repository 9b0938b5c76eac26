"""The turns of a conversation, as forms of records have them, and what stands beside them.

The mark of a trained turn has many names, and a call several forms; here each becomes one.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from shardtune.data.records import (
    MARKS,
    REASONING_KEYS,
    WEIGHTS,
    Conversation,
    Fields,
    Message,
    Note,
    Outcome,
    RecordError,
    from_json,
    is_media,
    require,
    weight_of,
    without_nulls,
)

_ROLES = ("user", "assistant", "system", "tool", "developer")
# Other tools write the calls of an assistant turn as turns of these roles.
CALLS = ("function_call", "tool_call")
# Turns of other roles are context. A misspelt role would silently become one.
MISNAMED_ROLES = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "model", "bot", "ai"), "assistant"),
}
_KNOWN_ROLES = {*_ROLES, *CALLS, "function", "observation", "tool_response"}
# Names of other tools for the arguments of a call.
_ARGUMENTS = ("arguments", "parameters", "input", "args", "params", "kwargs", "tool_input")
_KEYS_OF_TURNS = ({"role", "content"}, {"from", "value"})
_SYSTEM = ("system", "system_prompt")  # the same under two names
_TOOLS = ("tools", "functions")  # the second is OpenAI's older name
BESIDE_TURNS = (*_TOOLS, "chat_template_kwargs", *_SYSTEM)


def has_turns(value: Any) -> bool:
    """Whether this is a list of turns, ours or ShareGPT's."""
    is_list = isinstance(value, list) and value and isinstance(value[0], dict)
    return bool(is_list) and any(keys <= value[0].keys() for keys in _KEYS_OF_TURNS)


def read_turns(
    fields: Fields,
    name: str,
    turns: Any,
    keys: str = "role and content",
    as_message: Callable[[str, Message], Message] | None = None,
) -> list[Message]:
    """Return the messages of the field `name`, whose turns have these keys.

    `as_message`: reads a turn, given its path and itself, as a message.
    """
    require(turns and isinstance(turns, list), name, turns, f"a list of turns, each with {keys}")
    messages: list[Message] = []
    for i, turn in enumerate(turns):
        where = f"{name}[{i}]"
        require(isinstance(turn, dict), where, turn, f"an object with {keys}")
        message = without_nulls(turn)
        if message != turn:
            fields.notes.append((Outcome.NULLS, "turns"))
        message = as_message(where, message) if as_message else message
        role = message["role"] = _one_role(f"{where}.role", message.get("role"), fields.roles)
        if fields.roles:
            fields.notes.append((Outcome.ROLE, turn["from" if as_message else "role"]))
        if role not in _KNOWN_ROLES:
            fields.notes.append((Outcome.OTHER_ROLE, role))
        if role in CALLS:
            calls = _calls_in_text(f"{where}.content", message.get("content"))
            message |= {"role": "assistant", "content": "", "tool_calls": calls}
        if mark := _untrained_by(f"{where} ({message['role']})", message):
            fields.notes.append((Outcome.MARKED, mark))
        _unify_calls(where, message)
        _require_one_thought(where, message)
        _unify_content(where, message)
        if role in CALLS and messages and messages[-1]["role"] == "assistant":
            messages[-1] = _joined(where, messages[-1], message)
        else:  # null fields stay: they count in the hash that assigns records to evaluation
            nulls = {} if as_message else {key: None for key in turn if turn[key] is None}
            messages.append(nulls | message)
    return messages


def _one_role(where: str, role: Any, roles: Mapping[str, str]) -> str:
    """Return the role by `data.roles`; refuse one that is misspelt."""
    require(role and isinstance(role, str), where, role, "user, assistant, ...")
    if role in roles or role in _KNOWN_ROLES:
        return roles.get(role, role)
    plain = role.strip().lower()
    meant = MISNAMED_ROLES.get(plain, plain)
    if meant not in _KNOWN_ROLES:
        meant = next((known for known in sorted(_KNOWN_ROLES) if _is_an_edit(known, plain)), role)
    mapping = f', or "data.roles={{{role}: {meant}}}"' if meant in _ROLES else ""
    require(role == meant or meant not in _KNOWN_ROLES, where, role, f"{meant}{mapping}")
    return str(role)


def _is_an_edit(a: str, b: str) -> bool:
    """Whether two words differ by one letter added, dropped or replaced, or by two swapped."""
    while a and b and a[0] == b[0]:
        a, b = a[1:], b[1:]
    while a and b and a[-1] == b[-1]:
        a, b = a[:-1], b[:-1]
    return max(len(a), len(b)) == 1 or (len(a) == 2 and a == b[::-1])


def _untrained_by(where: str, message: Message) -> str:
    """Return the mark that leaves an answer untrained, or ""; refuse marks without a sense."""
    if "train_detail" in message:
        raise RecordError(f"{where} has train_detail, which marks characters - mark turns by train")
    names = [name for name in MARKS if name in message]
    for name in names:
        value, is_weight = message[name], name in WEIGHTS
        is_mark = isinstance(value, (bool, int, float)) and (
            value in (0, 1) or (is_weight and 0 < value < 1)
        )
        no, yes = ("true or 1", "false or 0") if name == "masked" else ("false or 0", "true or 1")
        remedy = f"{yes} to train this turn, {no} not to"
        remedy += ", a number between to train it by so much" if is_weight else ""
        require(is_mark, f"{where}: {name}", value, remedy)
    if not names:
        return ""
    weights = {weight_of({name: message[name]}) for name in names}
    if len(weights) > 1:
        raise RecordError(f"{where}: {' and '.join(names)} contradict each other - write one")
    is_answer = message["role"] == "assistant"
    if weights != {0.0} and not is_answer:
        said = f"is to be trained, by its {' and '.join(names)}"
        raise RecordError(f"{where} {said} - remove that: only assistant turns are generated")
    return names[0] if is_answer and weights == {0.0} else ""


def _unify_calls(where: str, message: Message) -> None:
    """Give the calls of a message one form, with arguments as objects."""
    if "function_call" in message:  # OpenAI's older form
        if message.get("tool_calls"):
            raise RecordError(f"{where} has function_call and tool_calls - write one of them")
        message["tool_calls"] = [{"type": "function", "function": message.pop("function_call")}]
    if "tool_calls" in message:
        path, calls = f"{where}.tool_calls", from_json(message["tool_calls"])
        require(isinstance(calls, list), path, calls, "a list of objects")
        message["tool_calls"] = [_one_call(f"{path}[{i}]", call) for i, call in enumerate(calls)]


def _one_call(where: str, call: Any) -> dict[str, Any]:
    require(isinstance(call, dict), where, call, "an object")
    function = call.get("function", call)
    remedy = "an object with name and arguments"
    require(isinstance(function, dict), f"{where}.function", function, remedy)
    name = function.get("name")
    require(name and isinstance(name, str), f"{where}: the name", name, "a string")
    given = {key: call[key] for key in _ARGUMENTS if key in call} | function
    written = {key: given[key] for key in _ARGUMENTS if given.get(key) not in (None, "", {})}
    if len(written) > 1:
        raise RecordError(f"{where} has {' and '.join(written)} - keep one of them as arguments")
    key, value = next(iter(written.items()), ("arguments", {}))
    arguments = {} if isinstance(value, str) and not value.strip() else from_json(value)
    require(isinstance(arguments, dict), f"{where}: {key}", value, "a JSON object")
    function = {k: v for k, v in function.items() if k not in _ARGUMENTS}
    function["arguments"] = arguments
    others = {k: v for k, v in call.items() if k not in _ARGUMENTS}
    return others | {"function": function} if "function" in call else function


def _calls_in_text(where: str, content: Any) -> list[Any]:
    """Return the calls of a turn that holds them as JSON text."""
    calls = from_json(content)
    calls = calls if isinstance(calls, list) else [calls]
    functions = [call.get("function", call) if isinstance(call, dict) else call for call in calls]
    is_calls = calls and all(isinstance(each, dict) and "name" in each for each in functions)
    require(
        is_calls, where, content, 'a JSON object as {"name": ..., "arguments": {...}}, or a list'
    )
    return [{"type": "function", "function": function} for function in functions]


def _joined(where: str, before: Message, call: Message) -> Message:
    """Return an assistant turn with the calls of the turn behind it."""
    weights = {weight_of(before), weight_of(call)}
    if len(weights) > 1 and weights != {None, 1.0}:
        what = f"{where} is one turn with that before it, and their marks differ"
        raise RecordError(f"{what} - give both the same")
    mark = {"train": True} if 1.0 in weights else {}
    return before | mark | {"tool_calls": [*(before.get("tool_calls") or []), *call["tool_calls"]]}


def _require_one_thought(where: str, message: Message) -> None:
    texts = {key: message[key] for key in REASONING_KEYS if key in message}
    for key, text in texts.items():
        require(isinstance(text, str), f"{where}.{key}", text, "a string")
    if len(set(texts.values())) > 1:
        raise RecordError(f"{where} has different texts as {' and '.join(texts)} - keep one")
    content = message.get("content")
    if texts and isinstance(content, list) and any(map(_is_thought, content)):
        raise RecordError(f"{where} has a part thinking and {min(texts)} - keep one of them")


def _is_thought(part: Any) -> bool:
    is_dict = isinstance(part, dict) and part.get("type") == "thinking"
    return is_dict and isinstance(part.get("thinking"), str)


def _unify_content(where: str, message: Message) -> None:
    """Give the parts of a content a type, which Bedrock's have not; refuse all but texts."""
    if "content" not in message and not message.get("tool_calls"):
        role = message["role"]
        raise RecordError(f"{where} ({role}) has neither content nor tool_calls - give it one")
    content, path = message.get("content", ""), f"{where}.content"
    remedy = 'a string, or parts as {"type": "text", "text": "..."}'
    for part in content if isinstance(content, list) else [{"text": content}]:
        if _is_thought(part):
            continue
        fields = part if isinstance(part, dict) else {}
        if is_media((kind := str(fields.get("type", ""))).partition("_")[0]):
            what = f"{path} has a part of type {kind}, and only text is trained"
            raise RecordError(f"{what} - leave such records out")
        if not isinstance(fields.get("text"), str) and isinstance(fields.get("value"), str):
            raise RecordError(f"{path} has parts with value in place of text - write {remedy}")
        require(isinstance(fields.get("text"), str), path, content, remedy)
    if isinstance(content, list):
        message["content"] = [{"type": "text", **part} for part in content]


def with_what_stands_beside(
    conversation: Conversation, fields: Mapping[str, Any], notes: list[Note]
) -> Conversation:
    """Return a conversation with the system text, the tools and the options of its record."""
    messages, first = conversation.messages, conversation.first
    if (system := _system(fields)) and _is_missing(system, messages[: first or None]):
        messages = [{"role": "system", "content": system}, *messages]
        first += bool(first)
    options = without_nulls(from_json(fields.get("chat_template_kwargs"))) or {}
    require(isinstance(options, dict), "chat_template_kwargs", options, "an object")
    tools = _tools(fields, notes)
    return replace(conversation, messages=messages, tools=tools, options=options, first=first)


def _system(fields: Mapping[str, Any]) -> str:
    """Return the system text beside the turns, or an empty one."""
    texts = {}
    for name in _SYSTEM:
        value = fields.get(name, "")
        parts = value if isinstance(value, list) else [{"text": value}]
        is_text = all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in parts)
        require(is_text, name, value, "a string")
        if (text := "".join(part["text"] for part in parts)).strip():
            texts[name] = text
    if len(set(texts.values())) > 1:
        what = "has different texts as system and system_prompt"
        raise RecordError(f"{what} - keep one, or write data.columns={{system_prompt: null}}")
    return next(iter(texts.values()), "")


def _is_missing(system: str, messages: list[Message]) -> bool:
    """Whether no turn has the system text; RecordError where one has another."""
    turns = [message.get("content") for message in messages if message["role"] == "system"]
    if turns and turns != [system]:
        what = "has system and a system turn with another text"
        remedy = "data.columns={system: null, system_prompt: null} to read the turn"
        raise RecordError(f"{what} - keep one, or write {remedy}")
    return not turns


def _tools(fields: Mapping[str, Any], notes: list[Note]) -> list[Any] | None:
    """Return the list of tools, None where there is none; it may be JSON text."""
    given = [fields[name] for name in _TOOLS if fields.get(name)]
    # Tables write in several ways that there are none.
    lists = [value for value in given if str(value).strip() not in ("", "null", "[]")]
    if len(lists) > 1:
        raise RecordError("has tools and functions - keep one of them")
    if not lists:
        return [] if "[]" in given else None
    tools = without_nulls(lists[0], "default")
    notes += [(Outcome.NULLS, "tools")] * (tools != lists[0])
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            what = f"tools is a string that is not JSON ({error}) - write a list of tools"
            raise RecordError(what, kind="tools is not JSON") from error
    require(isinstance(tools, list), "tools", tools, "a list of tools")
    for i, tool in enumerate(tools):
        is_tool = isinstance(tool, dict) and isinstance(tool.get("function", {}), dict)
        require(is_tool, f"tools[{i}]", tool, "an object")
    return list(tools)
