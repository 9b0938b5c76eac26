"""Score the demo: held-out questions before and after, and a count of exact short answers.

python examples/ask.py --before MODEL_DIR --run RUN_DIR --questions FILE.jsonl [--short FILE.jsonl]
python examples/ask.py --score MODEL_DIR --short FILE.jsonl     # as export.command does
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
import yaml

from shardtune.ask import Chat, Model


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Ask a model held-out questions before and after fine-tuning."
    )
    parser.add_argument("--before", type=Path, help="directory of the model that was fine-tuned")
    parser.add_argument("--run", type=Path, help="the run's directory, which holds model/")
    parser.add_argument("--questions", type=Path, help="chats, one JSON object a line")
    parser.add_argument("--score", type=Path, help="a model whose matches are counted as JSON")
    parser.add_argument("--number", type=int, default=0, help="which question, from 0")
    parser.add_argument(
        "--short", type=Path, help="chats with short answers, whose exact matches are counted"
    )
    arguments = parser.parse_args()
    if arguments.score:
        short = read_chats(arguments.short)
        count = exact_matches(Model(str(arguments.score), torch.float32), short)
        print(json.dumps({"exact_matches": count, "questions": len(short)}))
        return
    if not (arguments.before and arguments.run and arguments.questions):
        parser.error("name --before, --run and --questions, or --score and --short")
    chat = read_chats(arguments.questions)[arguments.number]
    short = read_chats(arguments.short) if arguments.short else []
    config = yaml.safe_load((arguments.run / "config.yaml").read_text(encoding="utf-8"))
    options = config["data"]["template_options"]  # the model learned to answer with these
    after = arguments.run / "model"
    prompt, reference = split(chat)
    print(f"\nQuestion (held out): {prompt[-1]['content']}")
    matches = []
    for name, path in (("Before: ", arguments.before), ("After:  ", after)):
        model = Model(str(path), torch.float32, options)
        print(f"\n{name}{model.answer([prompt], 64)[0]}")
        matches.append(exact_matches(model, short))
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


def exact_matches(model: Model, chats: Sequence[Chat]) -> int:
    """Count the answers that are the reference, but for case and a full stop at the end."""
    if not chats:
        return 0
    prompts, references = zip(*map(split, chats), strict=True)
    # Room for a full stop, and for one token more, which shows an answer that goes on.
    longest = max(map(len, model.tokenizer(list(references))["input_ids"])) + 2
    return sum(
        answer.casefold().removesuffix(".") == reference.casefold()
        for answer, reference in zip(model.answer(prompts, longest), references, strict=True)
    )


if __name__ == "__main__":
    main()
