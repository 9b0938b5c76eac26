"""The turns of a conversation, as ours, ShareGPT's and other tools write them, read as messages.

The mark of a trained turn has many names, and a call several forms; here each becomes one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardtune.data.messages import (
    MARKS,
    REASONING_KEYS,
    Message,
    from_json,
    is_media,
    train_flag,
    without_nulls,
)
from shardtune.data.outcomes import Note, Outcome
from shardtune.data.record_error import RecordError, require
from shardtune.errors import first_few

_ROLES = ("user", "assistant", "system", "tool", "developer")
# Other tools write the calls of an assistant turn as turns of these roles.
_CALLS = ("function_call", "tool_call")
SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "function", "observation", "tool_response"), "tool"),
    **{role: role for role in (*_CALLS, "developer")},
}
# Turns of other roles are context. A misspelt role would silently become one.
MISNAMED_ROLES = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "model", "bot", "ai"), "assistant"),
}
_KNOWN_ROLES = {*_ROLES, *_CALLS, "function", "observation", "tool_response"}
# Names of other tools for the arguments of a call, and for the calls of a turn.
_ARGUMENTS = ("arguments", "parameters", "input", "args", "params", "kwargs", "tool_input")
_CALL_REMEDY = 'a JSON object as {"name": "...", "arguments": {...}}, or a list of them'


def read_turns(name: str, turns: Any, roles: Mapping[str, str]) -> tuple[list[Message], list[Note]]:
    """Return the messages of a field, `conversations` or one of ours, and what is unusual in them.

    `roles`: `data.roles`, from the data's names to ours.

    Raises:
        RecordError: they are no turns, contradict themselves, or mark what cannot be trained.
    """
    is_sharegpt = name == "conversations"
    what, keys = ("turns", "from and value") if is_sharegpt else ("messages", "role and content")
    require(turns and isinstance(turns, list), name, turns, f"a list of {what}, each with {keys}")
    if not is_sharegpt and isinstance(turns[0], dict) and turns[0].keys() >= {"from", "value"}:
        columns = f'"data.columns={{conversations: {name}}}"'
        raise RecordError(f"{name} has turns of from and value - write {columns}")
    messages: list[Message] = []
    notes: list[Note] = []
    for i, turn in enumerate(turns):
        where = f"{name}[{i}]"
        require(isinstance(turn, dict), where, turn, f"an object with {keys}")
        message = without_nulls(turn)
        if message != turn:
            notes.append((Outcome.NULLS, "turns"))
        if is_sharegpt:
            message = _from_sharegpt(where, message, roles)
        role = message["role"] = _role(f"{where}.role", message.get("role"), roles)
        if roles:
            notes.append((Outcome.ROLE, turn["from" if is_sharegpt else "role"]))
        if role not in _KNOWN_ROLES:
            notes.append((Outcome.OTHER_ROLE, role))
        if role in _CALLS:
            message |= {
                "role": "assistant",
                "content": "",
                "tool_calls": _calls_in_text(where, message),
            }
        if mark := _read_marks(f"{where} ({message['role']})", message):
            notes.append((Outcome.MARKED, mark))
        _read_message(where, message)
        if role in _CALLS and messages and messages[-1]["role"] == "assistant":
            messages[-1] = _joined(where, messages[-1], message)
        else:  # null fields stay: they count in the hash that assigns records to evaluation
            nulls = {} if is_sharegpt else {key: None for key in turn if turn[key] is None}
            messages.append(nulls | message)
    return messages, notes


def _from_sharegpt(where: str, turn: Message, roles: Mapping[str, str]) -> Message:
    if not {"from", "value"} <= turn.keys() or {"role", "content"} & turn.keys():
        raise RecordError(
            f"{where} has {first_few(sorted(turn), 10) or 'no field'} - write from and value "
            "(of role and content: data.columns={messages: conversations})",
            kind=f"{where} is a turn without from and value",
        )
    speaker, content = turn.pop("from"), turn.pop("value")
    known = {**SHAREGPT_ROLES, **roles}
    role = known.get(speaker) if isinstance(speaker, str) else None
    require(
        role,
        f"{where}.from",
        speaker,
        f"one of {', '.join(SHAREGPT_ROLES)}, or name its role in data.roles",
    )
    require(isinstance(content, str), f"{where}.value", content, "a string")
    return {"role": role, "content": content, **turn}


def _role(where: str, role: Any, roles: Mapping[str, str]) -> str:
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


def _read_marks(where: str, message: Message) -> str:
    """Check the marks of a turn; return the one that leaves an answer untrained, if any."""
    if "train_detail" in message:
        raise RecordError(
            f"{where} has train_detail, which marks characters, and whole turns are trained - "
            "write train: true or false"
        )
    marks = {name: message[name] for name in MARKS if name in message}
    if not marks:
        return ""
    for name, mark in marks.items():
        is_mark = isinstance(mark, (bool, int, float)) and mark in (0, 1)
        no, yes = ("true or 1", "false or 0") if name == "masked" else ("false or 0", "true or 1")
        require(is_mark, f"{where}: {name}", mark, f"{yes} to train this turn, {no} not to")
    senses = {name: bool(mark) == MARKS[name] for name, mark in marks.items()}
    if len(set(senses.values())) > 1:
        named = " and ".join(senses)
        raise RecordError(f"{where}: {named} contradict each other - write one of them")
    is_assistant = message["role"] == "assistant"
    if any(senses.values()) and not is_assistant:
        raise RecordError(
            f"{where} is to be trained, by its {' and '.join(senses)} - remove that: only "
            "assistant turns are generated"
        )
    return next(
        (name for name, is_trained in senses.items() if is_assistant and not is_trained), ""
    )


def _read_message(where: str, message: Message) -> None:
    """Check a message, and give its calls one form, with arguments as objects."""
    if "function_call" in message:  # OpenAI's older form
        if message.get("tool_calls"):
            raise RecordError(f"{where} has function_call and tool_calls - write one of them")
        message["tool_calls"] = [{"type": "function", "function": message.pop("function_call")}]
    calls, content = from_json(message.get("tool_calls", [])), message.get("content", "")
    require(isinstance(calls, list), f"{where}.tool_calls", calls, "a list of objects")
    if "tool_calls" in message:
        message["tool_calls"] = [
            _read_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls)
        ]
    texts = {key: message[key] for key in REASONING_KEYS if key in message}
    for key, text in texts.items():
        require(isinstance(text, str), f"{where}.{key}", text, "a string")
    if len(set(texts.values())) > 1:
        raise RecordError(
            f"{where} has different texts as {' and '.join(texts)} - keep one of them"
        )
    if "content" not in message and not calls:
        role = message["role"]
        raise RecordError(f"{where} ({role}) has neither content nor tool_calls - give it one")
    for part in content if isinstance(content, list) else [{"text": content}]:
        kind = str(part.get("type", "")) if isinstance(part, dict) else ""
        if is_media(kind.partition("_")[0]):
            raise RecordError(
                f"{where}.content has a part of type {kind}, and only text is trained - "
                "leave such records out"
            )
        if kind == "thinking" and isinstance(part.get("thinking"), str):
            if texts:
                raise RecordError(
                    f"{where} has a part thinking and {min(texts)} - keep one of them"
                )
            continue
        is_text = isinstance(part, dict) and isinstance(part.get("text"), str)
        remedy = 'a string, or parts as {"type": "text", "text": "..."}'
        if not is_text and isinstance(part, dict) and isinstance(part.get("value"), str):
            raise RecordError(
                f"{where}.content has parts with value in place of text - write {remedy}"
            )
        require(is_text, f"{where}.content", content, remedy)
    if isinstance(content, list):  # Bedrock's parts have no type
        message["content"] = [{"type": "text", **part} for part in content]


def _read_call(where: str, call: Any) -> dict[str, Any]:
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


def _calls_in_text(where: str, message: Message) -> list[Any]:
    """Return the calls of a turn that holds them as JSON text."""
    calls = from_json(message.get("content"))
    calls = calls if isinstance(calls, list) else [calls]
    functions = [call.get("function", call) if isinstance(call, dict) else call for call in calls]
    is_calls = calls and all(isinstance(each, dict) and "name" in each for each in functions)
    require(is_calls, f"{where}.content", message.get("content"), _CALL_REMEDY)
    return [{"type": "function", "function": function} for function in functions]


def _joined(where: str, before: Message, call: Message) -> Message:
    """Return an assistant turn with the calls of the turn behind it."""
    flags = {train_flag(before), train_flag(call)}
    if len(flags) > 1 and False in flags:
        raise RecordError(
            f"{where} and the turn before it are one turn of the assistant, and their marks "
            "differ - give both the same"
        )
    mark = {"train": True} if True in flags else {}
    return before | mark | {"tool_calls": [*before.get("tool_calls", []), *call["tool_calls"]]}
