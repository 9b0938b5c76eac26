"""Records with `prompt` and `completion`, two texts or two lists of messages."""

from __future__ import annotations

from typing import Any

from shardtune.data.conversation import Conversation, Text, from_json
from shardtune.data.forms.turns import Roles, has_turns, read_turns
from shardtune.data.outcomes import Note, Outcome, require

FIELDS = ("prompt", "completion")


def read(fields: dict[str, Any], roles: Roles, notes: list[Note]) -> Conversation | Text:
    prompt, completion = (fields[name] for name in FIELDS)
    if isinstance(prompt, str) and has_turns(turns := from_json(prompt)):
        prompt, answer = turns, from_json(completion)
        completion = answer if has_turns(answer) else completion
        notes.append((Outcome.FOREIGN_FORM, "JSON text in prompt"))
    if isinstance(prompt, list) and isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    if isinstance(completion, list):
        before = read_turns("prompt", prompt, roles, notes)
        behind = read_turns("completion", completion, roles, notes)
        return Conversation([*before, *behind], first=len(before))
    require(isinstance(prompt, str), "prompt", prompt, "a string")
    require(isinstance(completion, str), "completion", completion, "a string")
    return Text(completion, prompt)
