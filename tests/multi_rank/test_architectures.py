"""Architectures whose layers, positions or experts would make a record depend on its neighbours."""

from __future__ import annotations

import json
import shutil
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from conftest import chats, read_metrics, small_opt, write_jsonl
from helpers import packing_families
from helpers.commands import finish
from helpers.moe_families import build
from helpers.plain_training import (
    assert_same_steps,
    encode,
    plain_perplexity,
    plain_training,
    save_new_model,
    settings,
    sharpen,
    step_losses,
    uneven_chats,
)
from helpers.ranks import train
from helpers.tiny_models import VOCABULARY
from safetensors.torch import load_file


def refused(done: CompletedProcess[str]) -> str:
    """The last line of a run that refused its model."""
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ERROR: ")
    return last


@pytest.mark.full
@pytest.mark.parametrize(
    ("leaking", "attention"),
    [
        (lambda: packing_families.build("bloom"), "eager"),
        (lambda: small_opt(dropout=0.0), "sdpa"),
    ],
    ids=["bloom", "opt"],
)
def test_a_model_whose_documents_would_mix_trains_unpacked_alone(
    leaking, attention, tokenizer, tmp_path
):
    model = save_new_model(leaking, tokenizer, tmp_path / "model")
    records = uneven_chats()[:8]
    given = settings(
        model,
        write_jsonl(tmp_path / "train.jsonl", records),
        tmp_path / "run",
        "train.gradient_accumulation_steps=4",
        "train.epochs=2",
        f"model.attention={attention}",
    )
    refusal = refused(train(2, *given, cwd=tmp_path))
    assert refusal.endswith(" - use model.attention=auto or data.packing=false")
    finish(train(2, *given, "data.packing=false", cwd=tmp_path))
    expected = plain_training(model, [encode(tokenizer, record) for record in records], [3e-3] * 2)
    assert step_losses(tmp_path / "run") == pytest.approx(expected.losses, rel=1e-5)


def test_queries_scaled_by_their_place_in_the_row_are_refused(models, tmp_path):
    config = json.loads((models["llama"] / "config.json").read_text(encoding="utf-8"))
    config |= {"attn_temperature_tuning": True, "floor_scale": 200}
    shutil.copytree(models["llama"], tmp_path / "model")
    (tmp_path / "model/config.json").write_text(json.dumps(config), encoding="utf-8")
    data = write_jsonl(tmp_path / "train.jsonl", chats(6))
    given = settings(
        tmp_path / "model", data, tmp_path / "run", "train.max_steps=1", "data.max_length=100"
    )
    refusal = refused(train(1, *given, "train.micro_batch_size=3", cwd=tmp_path))
    assert "llama scales queries by their place in the row from 200" in refusal
    finish(train(1, *given, "train.micro_batch_size=2", cwd=tmp_path))


def longrope() -> Any:
    """Records of up to 60 tokens take the short factors, and longer ones factors that are far from
    those."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [8.0] * 4}
    more = {"original_max_position_embeddings": 60, "initializer_range": 0.02}
    return packing_families.build("phi3", **more, rope_parameters=rope)


def test_a_rope_chosen_for_a_whole_forward_has_each_record_to_itself(tokenizer, tmp_path):
    model = save_new_model(longrope, tokenizer, tmp_path / "model", sharpen)
    records = [*chats(6, seed=4, longest_answer=8), *uneven_chats()[:4]]
    encoded = [encode(tokenizer, record) for record in records]
    assert 2 < sum(len(ids) > 60 for ids, _ in encoded) < 8
    data = write_jsonl(tmp_path / "train.jsonl", records)

    def run(name: str, *more: str) -> CompletedProcess[str]:
        given = [
            f"data.eval={data}",
            "train.gradient_accumulation_steps=5",
            "train.epochs=2",
            "data.packing=false",
        ]
        return train(2, *settings(model, data, tmp_path / name, *given, *more), cwd=tmp_path)

    def baseline(name: str) -> float:
        return read_metrics(tmp_path / name, "eval")[0]["perplexity"]

    for wrong in "data.packing=true", "train.micro_batch_size=2":
        assert refused(run("refused", wrong)) == (
            "ERROR: phi3 takes other rope factors for a whole forward once one of its records "
            "is longer than 60 tokens - use data.max_length=60 or less, or data.packing=false "
            "with train.micro_batch_size=1"
        )
    finish(run("run"))
    assert_same_steps(tmp_path / "run", plain_training(model, encoded, [3e-3] * 2))
    assert baseline("run") == pytest.approx(plain_perplexity(model, encoded), rel=1e-6)

    short = ["data.packing=true", "data.max_length=60", "data.overflow=drop", "train.max_steps=1"]
    finish(run("short", *short))
    kept = [(ids, trained) for ids, trained in encoded if len(ids) <= 60]
    assert baseline("short") == pytest.approx(plain_perplexity(model, kept), rel=1e-6)


def test_a_rank_without_rows_disturbs_no_gradient(tokenizer, tmp_path):
    """In gemma3n the gradient at a row of padding alone, whose embedding is zero, is not finite."""
    given = {"pad_token_id": 0, "vocab_size_per_layer_input": VOCABULARY, "sliding_window": 64}
    gemma = packing_families.build("gemma3n_text", **given)
    model = save_new_model(lambda: gemma, tokenizer, tmp_path / "model")
    texts = ["rank node shard", "mesh step " * 20, "token loss norm " * 10]
    given = ["data.packing=false", "train.gradient_accumulation_steps=2", "train.epochs=2"]
    data = write_jsonl(tmp_path / "train.jsonl", [{"text": text} for text in texts])
    finish(train(2, *settings(model, data, tmp_path / "run", *given), cwd=tmp_path))
    ids = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    assert not any(gemma.config.pad_token_id in of_text for of_text in ids)
    expected = plain_training(
        model, [(of_text, [True] * len(of_text)) for of_text in ids], [3e-3] * 2
    )
    assert_same_steps(tmp_path / "run", expected)


def test_weights_that_no_rank_uses_stay_as_they_are(tokenizer, tmp_path):
    """An indexer only chooses what attention sees, so it has no gradient, in a layer of experts
    neither."""
    indexed = packing_families.build("deepseek_v32", index_topk=512)
    model = save_new_model(lambda: indexed, tokenizer, tmp_path / "model")
    data = write_jsonl(tmp_path / "train.jsonl", uneven_chats()[:4])
    given = ["data.packing=false", "train.epochs=1", "optimizer.weight_decay=0.5"]
    finish(train(2, *settings(model, data, tmp_path / "run", *given), cwd=tmp_path))
    before, after = (
        load_file(folder / "model.safetensors") for folder in (model, tmp_path / "run" / "model")
    )
    unused = {
        name for name in before if ".indexer." in name or name.endswith("e_score_correction_bias")
    }
    assert len(unused) == 11
    assert {name for name in before if torch.equal(before[name], after[name])} == unused


def test_a_type_that_transformers_does_not_know_is_trained_as_its_class(tokenizer, tmp_path):
    """Kimi K2 names DeepSeek V3's class, and code of its own beside it, which does not run."""
    model = save_new_model(lambda: build("deepseek_v3"), tokenizer, tmp_path / "model")
    data = write_jsonl(tmp_path / "train.jsonl", uneven_chats()[:4])
    records = [encode(tokenizer, record) for record in uneven_chats()[:4]]
    expected = plain_training(model, records, [3e-3])
    values = json.loads((model / "config.json").read_text(encoding="utf-8"))
    values |= {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.Own"}}
    (model / "config.json").write_text(json.dumps(values), encoding="utf-8")
    (model / "configuration_deepseek.py").write_text("raise SystemExit\n", encoding="utf-8")
    (model / "generation_config.json").unlink()
    tokenizer_config = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    tokenizer_config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer_config), encoding="utf-8")
    given = settings(model, data, tmp_path / "run", "train.epochs=1", "train.max_steps=1")
    said = finish(train(1, *given, "train.micro_batch_size=4", cwd=tmp_path))
    assert "Architecture: kimi_k2, read as deepseek_v3" in said
    assert_same_steps(tmp_path / "run", expected)
    exported = tmp_path / "run/model"
    kept = json.loads((exported / "config.json").read_text(encoding="utf-8"))
    assert {key: kept[key] for key in ("model_type", "auto_map")} == {
        key: values[key] for key in ("model_type", "auto_map")
    }
    assert (exported / "configuration_deepseek.py").exists()
    before, after = (load_file(folder / "model.safetensors") for folder in (model, exported))
    assert {n: t.shape for n, t in after.items()} == {n: t.shape for n, t in before.items()}
    assert sum(not torch.equal(after[n], before[n]) for n in before) > 20
