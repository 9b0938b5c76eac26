"""ShareGPT's records: `conversations`, turns of from and value."""

from shardtune.data.forms.turns import CALLS, read_turns
from shardtune.data.records import Conversation, Fields, Message, RecordError, require
from shardtune.errors import first_few

FIELDS = ("conversations",)
NAME = "ShareGPT: conversations of from and value"
SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "function", "observation", "tool_response"), "tool"),
    **{role: role for role in (*CALLS, "developer")},
}


def read(fields: Fields) -> Conversation:
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
    return Conversation(read_turns(fields, "conversations", turns, "from and value", as_message))
