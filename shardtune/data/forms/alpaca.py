"""Alpaca's records: `instruction` and `output`, a question and its answer."""

from __future__ import annotations

from typing import Any

from shardtune.data.conversation import Conversation
from shardtune.data.forms.turns import Roles, parsed
from shardtune.data.outcomes import Note, require

FIELDS = ("instruction", "output")
BESIDE = ("input", "history")
NAME = "Alpaca: instruction, input and output"


def read(fields: dict[str, Any], roles: Roles, notes: list[Note]) -> Conversation:
    texts = {name: fields.get(name, "") for name in ("instruction", "input", "output")}
    for name, text in texts.items():
        require(isinstance(text, str), name, text, "a string")
    question = texts["instruction"] + (texts["input"] and f"\n{texts['input']}")
    history = fields.get("history", "")
    pairs = parsed("history", history) or []
    are_pairs = isinstance(pairs, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
        for pair in pairs
    )
    require(are_pairs, "history", history, "a list of pairs, each a question and its answer")
    return Conversation(
        [
            {"role": role, "content": text}
            for pair in [*pairs, (question, texts["output"])]
            for role, text in zip(("user", "assistant"), pair, strict=True)
        ]
    )
