"""Score the demo: short questions before and after, in a table, and a count of exact answers.

python examples/ask.py --run RUN_DIR --short FILE.jsonl
python examples/ask.py --score MODEL_DIR --short FILE.jsonl     # as export.command does
"""

import argparse
import json
import time
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import torch
import yaml
from rich.console import Console
from rich.table import Table

from shardtune.ask import Chat, Model


def main() -> None:
    asked = time.time()
    parser = argparse.ArgumentParser(description="Count exact short answers, before and after.")
    asking = parser.add_mutually_exclusive_group(required=True)
    asking.add_argument("--run", type=Path, help="the run's directory, which holds model/")
    asking.add_argument("--score", type=Path, help="a model whose matches are counted as JSON")
    parser.add_argument("--short", type=Path, required=True, help="chats with short answers")
    parser.add_argument("--times", type=int, nargs=2, help="when make and the run began: date +%%s")
    arguments = parser.parse_args()
    short = read_chats(arguments.short)
    if arguments.score:
        count = exact_matches(Model(str(arguments.score), torch.float32), short)
        print(json.dumps({"exact_matches": count, "questions": len(short)}))
        return
    config = yaml.safe_load((arguments.run / "config.yaml").read_text(encoding="utf-8"))
    options = config["data"]["template_options"]  # the model learned to answer with these
    before, after = (
        answers(Model(str(path), torch.float32, options), short)
        for path in (config["model"]["path"], arguments.run / "model")
    )
    prompts, references = zip(*map(split, short), strict=True)
    show([prompt[-1]["content"] for prompt in prompts], before, after, references)
    if arguments.times:
        print(f"Time: {by_part(arguments.times, asked, arguments.run)}\n")
    for name, path in (
        ("Fine-tuned model", arguments.run / "model"),
        ("Checkpoints", arguments.run / "checkpoints"),
        ("Every step's numbers", arguments.run / "metrics.jsonl"),
        ("Resolved configuration", arguments.run / "config.yaml"),
        ("Original model", config["model"]["path"]),
    ):
        print(f"{name + ':':<23} {path}")


def read_chats(path: Path) -> list[Chat]:
    return [json.loads(line)["messages"] for line in path.read_text("utf-8").splitlines()]


def split(chat: Chat) -> tuple[Chat, str]:
    """Return what stands before the first answer, and this answer."""
    first_answer = [message["role"] for message in chat].index("assistant")
    return chat[:first_answer], chat[first_answer]["content"]


def answers(model: Model, chats: Sequence[Chat]) -> list[str]:
    prompts, references = zip(*map(split, chats), strict=True)
    # Room for a full stop, and for one token more, which shows an answer that goes on.
    longest = max(map(len, model.tokenizer(list(references))["input_ids"])) + 2
    return model.answer(prompts, longest)


def exact_matches(model: Model, chats: Sequence[Chat]) -> int:
    return sum(map(is_right, answers(model, chats), (split(chat)[1] for chat in chats)))


def is_right(answer: str, reference: str) -> bool:
    """Compare an answer with the reference, but for case and a full stop at the end."""
    return answer.casefold().removesuffix(".") == reference.casefold()


def show(questions: Sequence[str], *said: Sequence[str]) -> None:
    """Print the answers before and after and the references of five questions; count all."""
    before, after, references = said
    nth = max(1, len(questions) // 5)  # a rule, so that nobody chooses the answers
    table = Table("Question", box=None, padding=(0, 2, 0, 0))
    for name, width in (("Before", 30), ("After", 16), ("Reference", 14)):
        table.add_column(name, max_width=width, no_wrap=True)
    marks = {True: "+", False: "-"}
    for question, *two, reference in [*zip(questions, *said, strict=True)][nth - 1 :: nth]:
        marked = (f"{marks[is_right(text, reference)]} {' '.join(text.split())}" for text in two)
        table.add_row(question, *marked, reference)
    print(f"\nQuestions {nth}, {2 * nth}, ... of {len(questions)}; + is right, - is wrong:\n")
    Console(width=100, markup=False, emoji=False, highlight=False).print(table)
    what = f"{len(questions)} short answers to reworded questions"
    was, now = (sum(map(is_right, some, references)) for some in (before, after))
    print(f"\nExact match on {what}: {was} before, {now} after\n")


def by_part(times: Sequence[float], asked: float, run: Path) -> str:
    """Say the seconds of each part. A run writes its start when it knows its data."""
    made, began = times
    entries = map(json.loads, (run / "metrics.jsonl").read_text("utf-8").splitlines())
    *_, start = (entry["time"] for entry in entries if entry["kind"] == "start")
    trained = datetime.fromisoformat(start).timestamp()
    ends = [("set-up", began), ("data", trained), ("training", asked), ("answers", time.time())]
    if trained < began:
        ends[1:3] = [("finding the run finished", asked)]
    parts = pairwise([("", made), *ends])
    return ", ".join(f"{name} {end - start:.0f} s" for (_, start), (name, end) in parts)


if __name__ == "__main__":
    main()
