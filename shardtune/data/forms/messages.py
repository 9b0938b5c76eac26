"""Records with `messages`, turns of role and content."""

from shardtune.data.forms.turns import has_turns, read_turns
from shardtune.data.records import Conversation, Fields, Outcome, RecordError

FIELDS = ("messages",)


def read(fields: Fields) -> Conversation:
    if isinstance(fields.values["messages"], str):
        fields.notes.append((Outcome.FOREIGN_FORM, "JSON text in messages"))
    turns = fields.parsed("messages")
    if has_turns(turns) and turns[0].keys() >= {"from", "value"}:
        columns = '"data.columns={conversations: messages}"'
        raise RecordError(f"messages has turns of from and value - write {columns}")
    return Conversation(read_turns(fields, "messages", turns))
