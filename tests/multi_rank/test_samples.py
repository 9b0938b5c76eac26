"""Held-out prompts are answered as `generate` answers them, token by token, on every mesh."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.chats import chats, write_jsonl
from helpers.commands import finish, read_metrics
from helpers.exact import APART, Mesh
from helpers.plain_training import encode, on_uneven_chats
from helpers.ranks import run_script, train
from transformers import AutoModelForCausalLM

from shardtune.data.chat_encoder import stop_token_ids
from shardtune.log import quoted
from shardtune.model.loss import predicted_logits
from shardtune.report.read_run import read_run
from shardtune.training import evaluate
from shardtune.training.evaluate import Prompt, choose_prompts

TOKENS = 6
SAMPLES = 3


@pytest.mark.parametrize(
    ("family", "mesh", "more"),
    [
        ("qwen3_moe", Mesh(4, 2, stages=2), []),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("llama_of_4", Mesh(1), [APART]),
                ("llama_of_4", Mesh(2, context=2), []),
                ("llama_of_4", Mesh(4, replicate=2, tensor=2), ["lora.rank=4"]),
                ("glm4_moe", Mesh(4, 4), []),
            )
        ),
    ],
)
def test_answers_are_those_of_generate(family, mesh, more, sharp, tokenizer, tmp_path):
    records = chats(40, seed=3, longest_answer=5)
    held_out = write_jsonl(tmp_path / "eval.jsonl", records[:SAMPLES])
    given = [f"eval.samples={SAMPLES}", f"eval.sample_tokens={TOKENS}", f"data.eval={held_out}"]
    given += ["train.max_steps=2", "optimizer.lr=1e-3", *mesh.assignments(*more)]
    given = on_uneven_chats(sharp[family], tmp_path, *given, records=records)
    log = finish(train(mesh.ranks, *given, cwd=tmp_path))
    samples = read_metrics(tmp_path / "run", "sample")
    assert [sample["step"] for sample in samples] == [0] * SAMPLES + [2] * SAMPLES
    weights = (sharp[family], tmp_path / "run/model")
    for model, answered in zip(weights, (samples[:SAMPLES], samples[SAMPLES:]), strict=True):
        expected = [_generated(model, tokenizer, record) for record in records[:SAMPLES]]
        assert [sample["answer"] for sample in answered] == expected
    prompt, answer = records[0]["messages"][:2]
    assert prompt["content"] in samples[0]["prompt"]
    assert samples[0]["reference"].strip() == answer["content"]
    assert log.count("after step 2: ") == SAMPLES and "Samples took " in log
    assert len(read_run(tmp_path / "run").of_kind("sample")) == 2 * SAMPLES


def _generated(model: Path, tokenizer: Any, record: dict[str, Any]) -> str:
    """Return transformers' own answer to a record's first prompt."""
    ids = tokenizer.apply_chat_template(
        record["messages"][:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ends = stop_token_ids(tokenizer, str(model), whole.config)
    told = whole.generate(**ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=ends)
    return tokenizer.decode(told[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


def test_texts_of_a_sample_stay_in_their_line():
    """A log is searched for lines such as `Eval Perplexity: 9.8 | Loss: 2.3`."""
    assert quoted("a\nb\x1b[2J \u2028 Eval Perplexity: 1.0") == (
        '"a\\nb\\x1b[2J \\u2028 Eval \\x50erplexity\\x3a 1.0"'
    )
    assert not re.search("Step.*Loss", quoted("Step 3/9 | Loss: 2.1"))
    assert len(quoted("long " * 200)) < 400


class Sequences:
    """A set of one sequence a record: the tokens of which, from `begin` to `end`, are trained."""

    def __init__(self, *sequences: tuple[int, int, int]) -> None:
        self._sequences = sequences
        self.begins_record = np.ones(len(sequences), np.bool_)

    def __getitem__(self, i: int) -> Any:
        length, begin, end = self._sequences[i]
        numbers = np.arange(length)
        return numbers, (numbers >= begin) & (numbers < end)


def test_prompts_are_of_each_set_in_turn_and_a_text_is_continued_from_its_half():
    chosen: Any = [Sequences((6, 2, 4), (5, 3, 5)), Sequences((4, 1, 4), (3, 0, 0))]
    assert choose_prompts(chosen, 3) == [
        Prompt([0, 1], [2, 3]),
        Prompt([0, 1], [2, 3]),  # a text
        Prompt([0, 1, 2], [3, 4]),
    ]
    assert len(choose_prompts(chosen, 9)) == 3  # nothing of the last one is trained


def run_with_accuracy(arguments: list[str]) -> None:
    """Let evaluations count the tokens that are the likeliest, too: a function and a line."""

    def likeliest(model: Any, batch: Any) -> torch.Tensor:
        return (predicted_logits(model, batch).argmax(-1) == batch.targets).sum()

    evaluate.METRICS["accuracy"] = likeliest
    run_script(arguments)


def test_an_evaluation_has_each_metric_that_is_named(sharp, tokenizer, tmp_path):
    records, model = chats(12, seed=3), sharp["qwen3_moe"]
    given = [f"data.eval={tmp_path}/train.jsonl", "train.max_steps=1", "parallel.stages=2"]
    given += ["train.gradient_accumulation_steps=2"]
    given = on_uneven_chats(model, tmp_path, *given, records=records)
    said = finish(train(2, *given, cwd=tmp_path, work=run_with_accuracy))
    lines = (tmp_path / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    baseline = next(entry for entry in map(json.loads, lines) if entry["kind"] == "eval")
    hits = total = 0
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for ids, trained in (encode(tokenizer, record) for record in records):
        chosen = whole(torch.tensor([ids])).logits[0, :-1].argmax(-1)
        counted = torch.tensor(trained[1:])
        hits += int((chosen == torch.tensor(ids[1:]))[counted].sum())
        total += int(counted.sum())
    assert baseline["tokens"] == total and baseline["accuracy"] == pytest.approx(hits / total)
    assert f" | Accuracy: {hits / total:.4f}\n" in said
