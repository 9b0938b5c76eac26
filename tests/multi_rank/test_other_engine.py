"""An engine that is not transformers opens an exported model, and says the same."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from helpers.chats import chats, write_jsonl
from helpers.commands import REPOSITORY, completed, finish
from helpers.ranks import train
from test_whole_model import SETTINGS, publish
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

NUMBER = 24
ENGINE = REPOSITORY / ".venv/engine/bin/python"


def same_tokens(model: Path, question: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    messages = [{"role": "user", "content": question}]
    tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    opened = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    inputs = torch.tensor([tokens])
    made = opened.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),  # else it hides all end tokens, which pad here
        max_new_tokens=NUMBER,
        min_new_tokens=NUMBER,
        do_sample=False,
        eos_token_id=None,
    )[0, len(tokens) :].tolist()
    assert len(made) == NUMBER
    command = [ENGINE, REPOSITORY / "tests/helpers/greedy_mlx.py", model]
    said = finish(completed([*map(str, command), json.dumps(tokens), str(NUMBER)], timeout_s=300))
    assert json.loads(said.splitlines()[-1]) == made


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    rule = ["make", "-C", str(REPOSITORY), ".venv/engine/.installed"]
    subprocess.run(rule, check=True, timeout=540)


@pytest.mark.full
def test_another_engine_runs_a_mixture_with_an_extra_layer_and_new_tokens(tmp_path, models):
    publish(models["glm"], tmp_path / "source")
    write_jsonl(tmp_path / "train.jsonl", chats(20))
    rows = AutoConfig.from_pretrained(models["glm"]).vocab_size
    free = rows - len(AutoTokenizer.from_pretrained(models["glm"]))
    tokens = [f"<{i}>" for i in range(free + 3)]
    finish(train(2, *SETTINGS, f"model.new_tokens={tokens}", cwd=tmp_path))
    model = tmp_path / "runs/config/model"
    assert AutoConfig.from_pretrained(model).vocab_size > rows
    same_tokens(model, f"Where are the {tokens[-1]} apples?")
