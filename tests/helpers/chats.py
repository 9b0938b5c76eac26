"""Made-up conversations, which the tokenizer of `tiny_models` was trained on."""

import random
from typing import Any

from distTest.workloads.chats import write_jsonl

__all__ = ["WORDS", "chats", "sentence", "write_jsonl"]  # tests import them from here

NAMES = "rank node shard mesh step token loss norm gloo store port epoch batch layer expert router"
WORDS = NAMES.split()


def sentence(source: random.Random, words: int) -> str:
    return " ".join(source.choice(WORDS) for _ in range(words))


def chats(count: int, seed: int = 0, longest_answer: int = 30) -> list[dict[str, Any]]:
    """Conversations of one to three turns, with questions and answers of very different lengths."""
    source = random.Random(seed)
    roles = (("user", 20), ("assistant", longest_answer))
    return [
        {
            "messages": [
                {"role": role, "content": sentence(source, source.randint(1, longest))}
                for _ in range(source.randint(1, 3))
                for role, longest in roles
            ]
        }
        for _ in range(count)
    ]
