"""Ask a model held-out questions before and after fine-tuning.

python examples/ask.py --before MODEL_DIR --run RUN_DIR --questions FILE.jsonl [--short FILE.jsonl]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

Chat = list[dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Ask a model held-out questions before and after fine-tuning."
    )
    parser.add_argument(
        "--before", type=Path, required=True, help="directory of the model that was fine-tuned"
    )
    parser.add_argument(
        "--run", type=Path, required=True, help="the run's directory, which holds model/"
    )
    parser.add_argument(
        "--questions", type=Path, required=True, help="chats, one JSON object a line"
    )
    parser.add_argument("--number", type=int, default=0, help="which question, from 0")
    parser.add_argument(
        "--short", type=Path, help="chats with short answers, whose exact matches are counted"
    )
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    chat = read_chats(arguments.questions)[arguments.number]
    short = read_chats(arguments.short) if arguments.short else []
    config = yaml.safe_load((arguments.run / "config.yaml").read_text(encoding="utf-8"))
    options = config["data"]["template_options"]  # the model learned to answer with these
    after = arguments.run / "model"
    prompt, reference = split(chat)
    print(f"\nQuestion (held out): {prompt[-1]['content']}")
    matches = []
    for name, path in (("Before: ", arguments.before), ("After:  ", after)):
        model = Model(path, options)
        print(f"\n{name}{model.answer([prompt], 100)[0]}")
        matches.append(model.exact_matches(short))
    print(f"\nReference: {reference}\n")
    if short:
        numbers = "{} before, {} after".format(*matches)
        print(f"Exact match on {len(short)} short answers to reworded questions: {numbers}\n")
    for name, path in (
        ("Fine-tuned model", after),
        ("Checkpoints", arguments.run / "checkpoints"),
        ("Every step's numbers", arguments.run / "metrics.jsonl"),
        ("Resolved configuration", arguments.run / "config.yaml"),
        ("Original model", arguments.before),
    ):
        print(f"{name + ':':<23} {path}")


def read_chats(path: Path) -> list[Chat]:
    return [json.loads(line)["messages"] for line in path.read_text("utf-8").splitlines()]


def split(chat: Chat) -> tuple[Chat, str]:
    """Return what stands before the first answer, and this answer."""
    first_answer = [message["role"] for message in chat].index("assistant")
    return chat[:first_answer], chat[first_answer]["content"]


class Model:
    """A model in float32 that gives its most likely answers."""

    def __init__(self, path: Path, template_options: dict[str, Any]) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(path, padding_side="left")
        self._model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self._options = template_options

    def answer(self, prompts: Sequence[Chat], max_new_tokens: int) -> list[str]:
        inputs = self._tokenizer.apply_chat_template(
            prompts,
            add_generation_prompt=True,
            padding=len(prompts) > 1,
            return_tensors="pt",
            return_dict=True,
            **self._options,
        )
        generated = self._model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        answers = generated[:, inputs["input_ids"].shape[1] :]
        texts = self._tokenizer.batch_decode(answers, skip_special_tokens=True)
        return [text.strip() for text in texts]

    def exact_matches(self, chats: Sequence[Chat]) -> int:
        """Count the answers that are the reference, but for case and a full stop at the end."""
        if not chats:
            return 0
        prompts, references = zip(*map(split, chats), strict=True)
        # Room for a full stop, and for one token more, which shows an answer that goes on.
        longest = max(map(len, self._tokenizer(list(references))["input_ids"])) + 2
        answers = self.answer(prompts, longest)
        pairs = zip(answers, references, strict=True)
        return sum(
            answer.casefold().removesuffix(".") == reference.casefold()
            for answer, reference in pairs
        )


if __name__ == "__main__":
    main()
