"""Held-out prompts are answered as `generate` answers them, token by token, on every mesh."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import moe_families
from helpers.chats import chats, write_jsonl
from helpers.commands import read_metrics
from helpers.plain_training import encode, models_on_demand, settings, sharpen
from helpers.ranks import on_ranks, run_script, train_each
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from shardtune.data.chat_encoder import stop_token_ids
from shardtune.data.prompts import Prompt, choose_prompts
from shardtune.log import quoted
from shardtune.model.loss import predicted_logits
from shardtune.report.read_run import read_run
from shardtune.training import evaluate

TOKENS = 6
SAMPLES = 3


@pytest.fixture(scope="module")
def models(
    tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    def build(family: str) -> Any:
        return moe_families.build(family, num_key_value_heads=4)

    folder = tmp_path_factory.mktemp("families")
    return models_on_demand(folder, tokenizer, build, lambda family: sharpen)


@pytest.mark.parametrize(
    ("family", "ranks", "more"),
    [
        ("qwen3_moe", 4, ["parallel.stages=2", "parallel.expert=2"]),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("llama", 2, []),
                ("llama", 1, ["data.packing=false"]),
                ("llama", 2, ["parallel.context=2"]),
                ("llama", 4, ["parallel.tensor=2", "parallel.replicate=2"]),
                ("llama", 4, ["lora.rank=4"]),
                ("glm4_moe", 4, ["parallel.expert=4"]),
            )
        ),
    ],
)
def test_answers_are_those_of_generate(family, ranks, more, models, tokenizer, tmp_path):
    records = chats(40, seed=3, longest_answer=5)
    data = write_jsonl(tmp_path / "train.jsonl", records)
    held_out = write_jsonl(tmp_path / "eval.jsonl", records[:SAMPLES])
    given = settings(models(family), data, tmp_path / "run", f"data.eval={held_out}", *more)
    given += [f"eval.samples={SAMPLES}", f"eval.sample_tokens={TOKENS}", "train.max_steps=2"]
    given += ["train.gradient_accumulation_steps=4", "optimizer.lr=1e-3"]
    train_each([(ranks, given)], tmp_path)
    samples = read_metrics(tmp_path / "run", "sample")
    assert [sample["step"] for sample in samples] == [0] * SAMPLES + [2] * SAMPLES
    weights = (models(family), tmp_path / "run/model")
    for model, answered in zip(weights, (samples[:SAMPLES], samples[SAMPLES:]), strict=True):
        expected = [_generated(model, tokenizer, record) for record in records[:SAMPLES]]
        assert [sample["answer"] for sample in answered] == expected
    prompt, answer = records[0]["messages"][:2]
    assert prompt["content"] in samples[0]["prompt"]
    assert samples[0]["reference"].strip() == answer["content"]
    log = (tmp_path / "run0.out").read_text(encoding="utf-8")
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


def test_an_evaluation_has_each_metric_that_is_named(models, tokenizer, tmp_path):
    records = chats(12, seed=3)
    data = write_jsonl(tmp_path / "train.jsonl", records)
    (tmp_path / "config.yaml").touch()
    model = models("qwen3_moe")
    given = settings(model, data, tmp_path / "run", f"data.eval={data}", "train.max_steps=1")
    arguments = ["--config", "config.yaml", *given, "parallel.stages=2"]
    arguments += ["train.gradient_accumulation_steps=2"]
    done = on_ranks(2, run_with_accuracy, arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
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
    assert f" | Accuracy: {hits / total:.4f}\n" in done.stdout
