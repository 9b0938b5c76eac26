"""How the fields of each form become a conversation or a text; token_rows.py reads tokens."""

from __future__ import annotations

from shardtune.data.forms.turns import CALLS, Fields, has_turns, parsed
from shardtune.data.records import (
    Conversation,
    Message,
    Outcome,
    RecordError,
    Text,
    from_json,
    require,
)
from shardtune.errors import first_few

SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "function", "observation", "tool_response"), "tool"),
    **{role: role for role in (*CALLS, "developer")},
}


def read_messages(fields: Fields) -> Conversation:
    """Read `messages`, turns of role and content."""
    if isinstance(fields.values["messages"], str):
        fields.notes.append((Outcome.FOREIGN_FORM, "JSON text in messages"))
    turns = fields.parsed("messages")
    if has_turns(turns) and turns[0].keys() >= {"from", "value"}:
        columns = '"data.columns={conversations: messages}"'
        raise RecordError(f"messages has turns of from and value - write {columns}")
    return Conversation(fields.turns("messages", turns))


def read_sharegpt(fields: Fields) -> Conversation:
    """Read `conversations`, ShareGPT's turns of from and value."""
    known = {**SHAREGPT_ROLES, **fields.roles}

    def as_message(where: str, turn: Message) -> Message:
        if not {"from", "value"} <= turn.keys() or {"role", "content"} & turn.keys():
            has = first_few(sorted(turn), 10) or "no field"
            remedy = "write from and value (else data.columns={messages: conversations})"
            raise RecordError(f"{where} has {has} - {remedy}", kind=f"{where} - {remedy}")
        speaker, content = turn.pop("from"), turn.pop("value")
        role = known.get(speaker) if isinstance(speaker, str) else None
        remedy = f"one of {', '.join(SHAREGPT_ROLES)}, or name its role in data.roles"
        require(role, f"{where}.from", speaker, remedy)
        require(isinstance(content, str), f"{where}.value", content, "a string")
        return {"role": role, "content": content, **turn}

    turns = fields.parsed("conversations")
    return Conversation(fields.turns("conversations", turns, "from and value", as_message))


def read_alpaca(fields: Fields) -> Conversation:
    """Read `instruction` and `output`, a question and its answer, behind those of `history`."""
    question, more, output = map(fields.text, ("instruction", "input", "output"))
    pairs = fields.parsed("history") or []
    are_pairs = isinstance(pairs, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
        for pair in pairs
    )
    require(are_pairs, "history", pairs, "a list of pairs, each a question and its answer")
    return Conversation(
        [
            {"role": role, "content": text}
            for pair in [*pairs, (question + (more and f"\n{more}"), output)]
            for role, text in zip(("user", "assistant"), pair, strict=True)
        ]
    )


def read_completion(fields: Fields) -> Conversation | Text:
    """Read `prompt` and `completion`, two texts or two lists of messages."""
    prompt, completion = fields.values["prompt"], fields.values["completion"]
    if isinstance(prompt, str) and has_turns(turns := from_json(prompt)):
        prompt, answer = turns, from_json(completion)
        completion = answer if has_turns(answer) else completion
        fields.notes.append((Outcome.FOREIGN_FORM, "JSON text in prompt"))
    if isinstance(prompt, list) and isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    if isinstance(completion, list):
        before = fields.turns("prompt", parsed("prompt", prompt))
        return Conversation([*before, *fields.turns("completion", completion)], first=len(before))
    return Text(fields.text("completion"), fields.text("prompt"))


def read_text(fields: Fields) -> Text:
    """Read `text`, all of which is trained."""
    return Text(fields.text("text"))
