"""Ask a model a held-out question before and after fine-tuning.

python examples/ask.py --before MODEL_DIR --run RUN_DIR --questions FILE.jsonl
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Ask a model a held-out question before and after fine-tuning."
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
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    chat = json.loads(
        arguments.questions.read_text(encoding="utf-8").splitlines()[arguments.number]
    )["messages"]
    after = arguments.run / "model"
    config = yaml.safe_load((arguments.run / "config.yaml").read_text(encoding="utf-8"))
    options = config["data"]["template_options"]  # the model learned to answer with these
    first_answer = [message["role"] for message in chat].index("assistant")
    prompt = chat[:first_answer]
    print(f"\nQuestion (held out): {prompt[-1]['content']}")
    print(f"\nBefore: {answer(arguments.before, prompt, options)}")
    print(f"\nAfter:  {answer(after, prompt, options)}")
    print(f"\nReference: {chat[first_answer]['content']}\n")
    for name, path in (
        ("Fine-tuned model", after),
        ("Checkpoints", arguments.run / "checkpoints"),
        ("Every step's numbers", arguments.run / "metrics.jsonl"),
        ("Resolved configuration", arguments.run / "config.yaml"),
        ("Original model", arguments.before),
    ):
        print(f"{name + ':':<23} {path}")


def answer(path: Path, messages: list[dict[str, Any]], template_options: dict[str, Any]) -> str:
    """Generate the model's most likely answer, of at most 100 tokens."""
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        messages,
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
        **template_options,
    )
    generated = model.generate(**prompt, max_new_tokens=100, do_sample=False)
    return str(
        tokenizer.decode(generated[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    ).strip()


if __name__ == "__main__":
    main()
