"""examples/ask.py answers as the models would, with the run's options for the template."""

from __future__ import annotations

import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CHATML, REPOSITORY, write_jsonl
from helpers.plain_training import sharpen, with_weights
from transformers import AutoModelForCausalLM, AutoTokenizer

MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "which rank ?"},
    {"role": "assistant", "content": "the reference"},
]


def greedy(folder: Path, prompt: str) -> str:
    """The most likely token after another, by plain forward passes."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer(prompt)["input_ids"]
    start = len(ids)
    with torch.no_grad():
        while len(ids) < start + 100 and (len(ids) == start or ids[-1] != tokenizer.eos_token_id):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return str(tokenizer.decode(ids[start:], skip_special_tokens=True)).strip()


def test_both_models_answer_the_question(models, tmp_path, capsys, monkeypatch):
    """The one behind the system's turn."""
    before = shutil.copytree(models["llama"], tmp_path / "before")
    after = with_weights(models["llama"], tmp_path / "run/model", sharpen)
    for folder in (before, after):
        template = CHATML + "{% if not enable_thinking|default(true) %}silently {% endif %}"
        (folder / "chat_template.jinja").write_text(template)
    (tmp_path / "run/config.yaml").write_text(
        "data: {template_options: {enable_thinking: false}}\n"
    )
    questions = write_jsonl(tmp_path / "q.jsonl", [{"messages": []}, {"messages": MESSAGES}])
    arguments = ["--before", before, "--run", tmp_path / "run", "--questions", questions]
    short = write_jsonl(tmp_path / "s.jsonl", [{"messages": MESSAGES}] * 2)
    command = ["ask.py", *map(str, arguments), "--number", "1", "--short", str(short)]
    monkeypatch.setattr(sys, "argv", command)
    runpy.run_path(str(REPOSITORY / "examples/ask.py"), run_name="__main__")
    said = capsys.readouterr().out
    prompt = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in MESSAGES[:2])
    prompt += "<|im_start|>assistant\nsilently "
    answers = [greedy(folder, prompt) for folder in (before, after)]
    assert answers[0] != answers[1]
    assert said.startswith("\nQuestion (held out): which rank ?\n")
    assert f"\nBefore: {answers[0]}\n\nAfter:  {answers[1]}\n\nReference: the reference\n" in said
    assert "\nExact match on 2 short answers to reworded questions: 0 before, 0 after\n" in said
    assert str(tmp_path / "run/metrics.jsonl") in said


@pytest.fixture(scope="module")
def asking() -> dict[str, Any]:
    return runpy.run_path(str(REPOSITORY / "examples/ask.py"))


def test_questions_of_unequal_length_are_answered_together_as_alone(models, tmp_path, asking):
    folder = with_weights(models["llama"], tmp_path / "model", sharpen)
    model = asking["Model"](folder, {})
    questions = ["which rank ?", "why does the ring stop when a node is gone ?", "what is it ?"]
    prompts = [[{"role": "user", "content": question}] for question in questions]
    alone = [model.answer([prompt], 8)[0] for prompt in prompts]
    assert len(set(alone)) == 3
    assert model.answer(prompts, 8) == alone


def test_an_answer_counts_that_is_the_reference_but_for_case_and_a_full_stop(
    models, asking, monkeypatch
):
    given = {"75": "75", "COMPLETE": "complete.", "16": "16 bytes", "gloo": "It is gloo", "2": "3"}
    monkeypatch.setattr(asking["Model"], "answer", lambda *_, **__: list(given.values()))
    model = asking["Model"](models["llama"], {})
    chats = [[*MESSAGES[:2], {"role": "assistant", "content": text}] for text in given]
    assert model.exact_matches(chats) == 2
