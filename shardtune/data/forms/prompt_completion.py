"""Records with `prompt` and `completion`, two texts or two lists of messages."""

from shardtune.data.forms.turns import has_turns, read_turns
from shardtune.data.records import Conversation, Fields, Outcome, Text, from_json, parsed

FIELDS = ("prompt", "completion")
AS_CHAT = '"data.columns={instruction: prompt, output: completion}" to read it in a chat'


def read(fields: Fields) -> Conversation | Text:
    prompt, completion = fields.values["prompt"], fields.values["completion"]
    if isinstance(prompt, str) and has_turns(turns := from_json(prompt)):
        prompt, answer = turns, from_json(completion)
        completion = answer if has_turns(answer) else completion
        fields.notes.append((Outcome.FOREIGN_FORM, "JSON text in prompt"))
    if isinstance(prompt, list) and isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    if isinstance(completion, list):
        before = read_turns(fields, "prompt", parsed("prompt", prompt))
        return Conversation(
            [*before, *read_turns(fields, "completion", completion)], first=len(before)
        )
    return Text(fields.text("completion"), fields.text("prompt"))
