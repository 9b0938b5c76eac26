"""Alpaca's records: `instruction` and `output`, a question and its answer behind `history`."""

from shardtune.data.records import Conversation, Fields, require

FIELDS = ("instruction", "output")
BESIDE = ("input", "history")
NAME = "Alpaca: instruction, input and output"


def read(fields: Fields) -> Conversation:
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
