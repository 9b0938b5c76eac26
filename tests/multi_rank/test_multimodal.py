"""Of a model that sees, the text is trained, and all else in its files comes back to the byte."""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.commands import finish
from helpers.multimodal import FAMILIES, save_seeing_model
from helpers.plain_training import (
    assert_same_steps,
    encode,
    on_uneven_chats,
    plain_training,
    step_losses,
    uneven_chats,
)
from helpers.ranks import run_script, train
from helpers.small_runs import assert_same_tensors, tensors_of
from peft import PeftModel
from transformers import AutoModelForImageTextToText

from shardtune.model.source import load_weights, text_model

QUICK = ("qwen3_5_moe", "mistral3")
MORE = [
    ("qwen3_5_moe", ["data.packing=false"]),
    ("qwen3_5_moe", ["parallel.expert=2", "model.activation_checkpointing=full"]),
    ("mistral3", ["parallel.stages=2", "train.gradient_accumulation_steps=8"]),
]
CASES = [
    *((family, []) for family in QUICK),
    *(
        pytest.param(family, [], marks=pytest.mark.full)
        for family in FAMILIES
        if family not in QUICK
    ),
    *(pytest.param(*case, marks=pytest.mark.full) for case in MORE),
]
NOT_OF_TEXT = re.compile(r"(^|\.)(mtp|visual|vision|vit|multi_modal|mm_|embed_vision|patch_merge)")


@pytest.mark.parametrize(("family", "options"), CASES)
def test_its_text_is_trained_exactly_and_the_rest_is_copied(family, options, tokenizer, tmp_path):
    source = save_seeing_model(family, tokenizer, tmp_path / "source")
    records = uneven_chats()[:8]
    given = ["train.gradient_accumulation_steps=4", "train.max_steps=2", "export.dtype=source"]
    given = on_uneven_chats(source, tmp_path, *given, *options, records=records)
    said = finish(train(2, *given, cwd=tmp_path))
    assert f"Copied from {source}: " in said
    encoded = [encode(tokenizer, record) for record in records]
    expected = plain_training(source, encoded, [3e-3] * 2, opened=AutoModelForImageTextToText)
    assert_same_steps(tmp_path / "run", expected)

    model = tmp_path / "run/model"
    before, after = tensors_of(source), tensors_of(model)
    assert {n: (t.dtype, t.shape) for n, t in after.items()} == {
        n: (t.dtype, t.shape) for n, t in before.items()
    }
    others = [name for name in before if NOT_OF_TEXT.search(name)]
    assert len(others) > 10
    for name in others:
        assert torch.equal(after[name], before[name]), name
    for file in ("config.json", "preprocessor_config.json"):
        assert (model / file).read_bytes() == (source / file).read_bytes()

    opened, info = AutoModelForImageTextToText.from_pretrained(model, output_loading_info=True)
    _, info_of_source = AutoModelForImageTextToText.from_pretrained(
        source, output_loading_info=True
    )
    assert not info["missing_keys"] and info == info_of_source
    moved = 0
    for name, tensor in opened.state_dict().items():
        wanted = expected.final[name]
        # One that begins at 0 is its update alone, with the rounding of its gradient.
        bound = 1e-5 if expected.initial[name].any() else 1e-4
        assert (tensor - wanted).norm() <= bound * wanted.norm(), name
        moved += not torch.equal(wanted, expected.initial[name])
    assert moved > 20


@pytest.mark.full
@pytest.mark.parametrize("family", ["mistral3", "qwen3_vl_moe"])
def test_its_adapters_open_with_peft_on_the_class_of_the_source(family, tokenizer, tmp_path):
    source = save_seeing_model(family, tokenizer, tmp_path / "source")
    given = ["train.max_steps=2", "lora.rank=2", "optimizer.lr=3e-2"]
    given = on_uneven_chats(source, tmp_path, *given, records=uneven_chats()[:8])
    finish(train(2, *given, cwd=tmp_path))

    def opened(folder: Path) -> Any:
        return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # peft's word for missing factors
        adapted = PeftModel.from_pretrained(opened(source), tmp_path / "run/adapter")
    # Weights, since CPUs round the logits of a model and of its factors otherwise.
    merged, before = adapted.merge_and_unload().state_dict(), opened(source).state_dict()
    for name, weight in opened(tmp_path / "run/model").state_dict().items():
        torch.testing.assert_close(merged[name], weight, rtol=1e-6, atol=1e-6)
    assert max((merged[name] - before[name]).abs().max() for name in before) > 0.01


@pytest.mark.full
def test_a_checkpoint_that_holds_a_tower_resumes_without_it(tokenizer, tmp_path):
    """Earlier versions trained Gemma 3 with its tower, which got no gradient."""
    source = save_seeing_model("gemma3", tokenizer, tmp_path / "source")
    given = ["train.gradient_accumulation_steps=4", "train.epochs=4", "train.max_steps=4"]
    given = on_uneven_chats(source, tmp_path, *given, records=uneven_chats()[:8])
    earlier = [*given, "train.max_steps=2", "export.final=false"]
    finish(train(2, *earlier, cwd=tmp_path, work=train_with_towers))
    (state,) = (tmp_path / "run/checkpoints").glob("checkpoint_*")
    assert b"vision_tower" in b"".join(
        each.read_bytes() for each in state.rglob("*") if each.is_file()
    )
    assert "Resumed from checkpoint_0000002" in finish(train(2, *given, cwd=tmp_path))
    finish(train(2, *given, f"run.dir={tmp_path / 'whole'}", cwd=tmp_path))
    assert step_losses(tmp_path / "run") == step_losses(tmp_path / "whole")
    assert_same_tensors(tmp_path / "run/model", tmp_path / "whole/model")


def train_with_towers(arguments: list[str]) -> None:
    """On a rank: run train_fsdp.py as it was before it left towers out."""
    text_model.drop_towers = load_weights.drop_towers = lambda model: []
    run_script(arguments)
