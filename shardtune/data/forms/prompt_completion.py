"""Records with `prompt` and `completion`, two texts or two lists of messages."""

from __future__ import annotations

from shardtune.data.forms.turns import Fields, has_turns, parsed
from shardtune.data.records import Conversation, Outcome, Text, from_json

FIELDS = ("prompt", "completion")
AS_CHAT = '"data.columns={instruction: prompt, output: completion}" to read it in a chat'


def read(fields: Fields) -> Conversation | Text:
    prompt, completion = (fields.values[name] for name in FIELDS)
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
