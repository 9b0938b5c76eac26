"""Chats for the benchmarks: real words, log-normal lengths, a fixed seed, and 60 to 75% of the
tokens in prompts.
"""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "examples/chats/train.jsonl"
MEDIAN_TOKENS, SIGMA = 280, 0.8  # of a chat
TOKENS_PER_WORD = 1.25
TEMPLATE_TOKENS = 30  # what the template adds to a chat's words, about


def write_chats(path: Path, tokens: int, max_length: int, seed: int = 0) -> Path:
    """Write about `tokens` tokens of chats, none longer than `max_length`."""
    source = random.Random(seed)
    words = sorted(set(re.findall(r"[a-z]{2,12}", SOURCE.read_text(encoding="utf-8"))))
    with path.open("w", encoding="utf-8") as file:
        while tokens > 0:
            length = min(
                0.8 * max_length, max(60.0, source.lognormvariate(math.log(MEDIAN_TOKENS), SIGMA))
            )
            answer = source.uniform(0.25, 0.40)
            shares = {"user": 1 - answer - TEMPLATE_TOKENS / length, "assistant": answer}
            messages = [
                {
                    "role": role,
                    "content": " ".join(
                        source.choices(words, k=max(4, round(share * length / TOKENS_PER_WORD)))
                    ),
                }
                for role, share in shares.items()
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
            tokens -= round(length)
    return path
