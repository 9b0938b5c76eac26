"""The demo's short answers: trained in other words, asked nowhere twice, and true."""

from __future__ import annotations

import json
import re

from conftest import REPOSITORY
from helpers.configs import DEFAULTS

from shardtune.cluster import environment

CHATS = REPOSITORY / "examples/chats"
# What a question with a name in it asks for.
DEFAULT = re.compile(
    r"What is (\S+)(?: in the launch scripts)?, unless I set it\?|What is the default of (\S+)\?"
    r"|Which number does (\S+) have if I set none\?"
)


def questions(name: str) -> list[tuple[str, str]]:
    """Return each question of a file with its answer."""
    chats = [json.loads(line)["messages"] for line in (CHATS / name).read_text().splitlines()]
    turns = [[message for message in chat if message["role"] != "system"] for chat in chats]
    return [
        (asked["content"], answer["content"])
        for chat in turns
        for asked, answer in zip(chat[::2], chat[1::2], strict=True)
    ]


SHORT = questions("short_eval.jsonl")


def test_no_question_is_asked_twice():
    files = ("train.jsonl", "eval.jsonl", "short_train.jsonl", "short_eval.jsonl")
    asked = {name: {question.casefold() for question, _ in questions(name)} for name in files}
    for held_out in ("eval.jsonl", "short_eval.jsonl"):
        others = set().union(*(asked[name] for name in files if name != held_out))
        assert asked[held_out].isdisjoint(others)
    assert len(asked["short_eval.jsonl"]) == len(SHORT)


def test_answers_that_name_a_default_are_the_default():
    asked = 0
    for question, answer in [*SHORT, *questions("short_train.jsonl")]:
        if match := DEFAULT.fullmatch(question):
            key = next(filter(None, match.groups()))
            section, _, name = key.partition(".")
            default = DEFAULTS[section][name] if name else environment.DEFAULTS[key]
            assert float(answer) == float(default), question
            asked += 1
    assert asked >= 2 * 14
