"""Records with `messages`, turns of role and content."""

from __future__ import annotations

from typing import Any

from shardtune.data.conversation import Conversation
from shardtune.data.forms.turns import Roles, has_turns, parsed, read_turns
from shardtune.data.outcomes import Note, Outcome, RecordError

FIELDS = ("messages",)


def read(fields: dict[str, Any], roles: Roles, notes: list[Note]) -> Conversation:
    if isinstance(fields["messages"], str):
        notes.append((Outcome.FOREIGN_FORM, "JSON text in messages"))
    turns = parsed("messages", fields["messages"])
    if has_turns(turns) and "from" in turns[0] and "role" not in turns[0]:
        columns = '"data.columns={conversations: messages}"'
        raise RecordError(f"messages has turns of from and value - write {columns}")
    return Conversation(read_turns("messages", turns, roles, notes))
