"""Chats for the benchmarks: real words, log-normal lengths and a fixed seed, in several mixes."""

import json
import math
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[2] / "examples/chats/train.jsonl"
TOKENS_PER_WORD = 1.25
# SmolLM2's own template, with marks around all that it must generate, the end of turn included.
MARKED_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' "
    "}}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATE_TOKENS = 30  # about the tokens that the template adds to a chat


@dataclass(frozen=True)
class Mix:
    """The log-normal lengths of chats, their turns, and the share of answers."""

    median_tokens: float  # per chat
    sigma: float
    turns: tuple[int, int]  # the fewest and the most answers of a chat
    answers: tuple[float, float]  # their smallest and largest share of a chat's tokens


MIXES = {
    "prompts": Mix(280, 0.8, (1, 1), (0.25, 0.40)),
    "short": Mix(110, 0.4, (1, 1), (0.40, 0.60)),
    "long-tailed": Mix(200, 1.3, (1, 1), (0.30, 0.80)),
    "many turns": Mix(700, 0.4, (4, 12), (0.40, 0.70)),
}


def write_chats(path: Path, tokens: int, max_length: int, mix: str = "prompts") -> Path:
    """Write about `tokens` tokens of chats, none longer than `max_length`."""
    source, source_of_turns, kind = random.Random(0), random.Random(0), MIXES[mix]
    words = sorted(set(re.findall(r"[a-z]{2,12}", SOURCE.read_text(encoding="utf-8"))))
    records = []
    while tokens > 0:
        length = source.lognormvariate(math.log(kind.median_tokens), kind.sigma)
        length = min(0.8 * max_length, max(60.0, length))
        turns, answers = source_of_turns.randint(*kind.turns), source.uniform(*kind.answers)
        shares = {"user": 1 - answers - TEMPLATE_TOKENS / length, "assistant": answers}
        messages = []
        for role, share in list(shares.items()) * turns:
            count = max(4, round(share * length / turns / TOKENS_PER_WORD))
            text = " ".join(source.choices(words, k=count))
            messages.append({"role": role, "content": text})
        records.append({"messages": messages})
        tokens -= round(length)
    return write_jsonl(path, records)


def write_jsonl(path: Path, records: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path
