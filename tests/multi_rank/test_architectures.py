"""Architectures whose layers, positions or experts would make a record depend on its neighbours."""

import json
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from helpers import packing_families
from helpers.chats import chats
from helpers.commands import finish, read_metrics
from helpers.documented import refused
from helpers.exact import APART, RATE, TWO_ROWS
from helpers.moe_families import build
from helpers.plain_training import (
    assert_same_steps,
    encode,
    on_uneven_chats,
    plain_perplexity,
    plain_training,
    save_new_model,
    sharpen,
    step_losses,
    uneven_chats,
)
from helpers.ranks import train
from helpers.small_runs import steps_of, tensors_of, with_settings
from helpers.tiny_models import VOCABULARY, small_opt


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
    given = ["train.gradient_accumulation_steps=4", "train.epochs=2"]
    given += [f"model.attention={attention}"]
    given = on_uneven_chats(model, tmp_path, *given, records=records)
    refusal = refused(train(2, *given, cwd=tmp_path))
    assert refusal.endswith(" - use model.attention=auto or data.packing=false")
    finish(train(2, *given, APART, cwd=tmp_path))
    expected = plain_training(model, [encode(tokenizer, record) for record in records], [RATE] * 2)
    assert step_losses(tmp_path / "run") == pytest.approx(expected.losses, rel=1e-5)


def test_queries_scaled_by_their_place_in_the_row_are_refused(models, tmp_path):
    scaled = {"attn_temperature_tuning": True, "floor_scale": 200}
    model = with_settings(models["llama"], tmp_path / "model", **scaled)
    given = on_uneven_chats(
        model, tmp_path, "train.max_steps=1", "data.max_length=100", records=chats(6)
    )
    refusal = refused(train(1, *given, "train.micro_batch_size=3", cwd=tmp_path))
    assert "llama scales queries by their place in the row from 200" in refusal
    finish(train(1, *given, TWO_ROWS, cwd=tmp_path))


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

    def run(name: str, *more: str) -> CompletedProcess[str]:
        given = [f"data.eval={tmp_path}/train.jsonl", "train.gradient_accumulation_steps=5"]
        given += ["train.epochs=2", APART, *more]
        given = on_uneven_chats(model, tmp_path, *given, run=name, records=records)
        return train(2, *given, cwd=tmp_path)

    def baseline(name: str) -> float:
        return read_metrics(tmp_path / name, "eval")[0]["perplexity"]

    for wrong in "data.packing=true", TWO_ROWS:
        refusal = refused(run("refused", wrong))
        assert refusal.startswith("ERROR: phi3 takes other rope factors for a whole forward once ")
        assert " - use data.max_length=60 or less, or " in refusal
    finish(run("run"))
    assert_same_steps(tmp_path / "run", plain_training(model, encoded, [RATE] * 2))
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
    given = [APART, "train.gradient_accumulation_steps=2", "train.epochs=2"]
    records = [{"text": text} for text in texts]
    finish(train(2, *on_uneven_chats(model, tmp_path, *given, records=records), cwd=tmp_path))
    ids = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    assert not any(gemma.config.pad_token_id in of_text for of_text in ids)
    expected = plain_training(
        model, [(of_text, [True] * len(of_text)) for of_text in ids], [RATE] * 2
    )
    assert_same_steps(tmp_path / "run", expected)


def test_weights_that_no_rank_uses_stay_as_they_are(tokenizer, tmp_path):
    """An indexer only chooses what attention sees, so it has no gradient, in a layer of experts
    neither."""
    indexed = packing_families.build("deepseek_v32", index_topk=512)
    model = save_new_model(lambda: indexed, tokenizer, tmp_path / "model")
    given = [APART, "train.epochs=1", "optimizer.weight_decay=0.5"]
    given = on_uneven_chats(model, tmp_path, *given, records=uneven_chats()[:4])
    finish(train(2, *given, cwd=tmp_path))
    before, after = (tensors_of(folder) for folder in (model, tmp_path / "run/model"))
    unused = {
        name for name in before if ".indexer." in name or name.endswith("e_score_correction_bias")
    }
    assert len(unused) == 11
    assert {name for name in before if torch.equal(before[name], after[name])} == unused


def test_a_type_that_transformers_does_not_know_is_trained_as_its_class(tokenizer, tmp_path):
    """Kimi K2 names DeepSeek V3's class, and code of its own beside it, which does not run."""
    model = save_new_model(lambda: build("deepseek_v3"), tokenizer, tmp_path / "model")
    records = uneven_chats()[:4]
    expected = plain_training(model, [encode(tokenizer, record) for record in records], [RATE])
    values = json.loads((model / "config.json").read_text(encoding="utf-8"))
    values |= {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.Own"}}
    (model / "config.json").write_text(json.dumps(values), encoding="utf-8")
    (model / "configuration_deepseek.py").write_text("raise SystemExit\n", encoding="utf-8")
    (model / "generation_config.json").unlink()
    tokenizer_config = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    tokenizer_config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer_config), encoding="utf-8")
    given = ["train.epochs=1", "train.max_steps=1", "train.micro_batch_size=4"]
    given = on_uneven_chats(model, tmp_path, *given, records=records)
    said = finish(train(1, *given, cwd=tmp_path))
    assert "Architecture: kimi_k2, read as deepseek_v3" in said
    assert_same_steps(tmp_path / "run", expected)
    exported = tmp_path / "run/model"
    kept = json.loads((exported / "config.json").read_text(encoding="utf-8"))
    assert {key: kept[key] for key in ("model_type", "auto_map")} == {
        key: values[key] for key in ("model_type", "auto_map")
    }
    assert (exported / "configuration_deepseek.py").exists()
    before, after = (tensors_of(folder) for folder in (model, exported))
    assert {n: t.shape for n, t in after.items()} == {n: t.shape for n, t in before.items()}
    assert sum(not torch.equal(after[n], before[n]) for n in before) > 20


@pytest.mark.full
def test_ranks_reduce_what_only_some_of_them_use(tokenizer, tmp_path):
    """Ranks with short rows compress no keys, and have no gradient for what does."""
    compressed = packing_families.build("deepseek_v4")
    model = save_new_model(lambda: compressed, tokenizer, tmp_path / "model")
    for ranks in (1, 2):
        given = [APART, f"train.gradient_accumulation_steps={2 // ranks}"]
        given = on_uneven_chats(model, tmp_path, *given, run=f"{ranks}")
        finish(train(ranks, *given, cwd=tmp_path))
    one, two = (steps_of(tmp_path / ranks) for ranks in "12")
    for key in ("loss", "grad_norm"):
        assert [step[key] for step in two] == pytest.approx([step[key] for step in one], rel=1e-5)
