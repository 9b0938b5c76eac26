"""Of a model that sees, the text is trained, and all else in its files comes back to the byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.chats import write_jsonl
from helpers.multimodal import FAMILIES, save_seeing_model
from helpers.plain_training import (
    assert_same_steps,
    encode,
    finish,
    plain_training,
    settings,
    uneven_chats,
)
from helpers.ranks import train
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast

UNPACKED = ("data.packing=false",)
QUICK = [("qwen3_5_moe", UNPACKED), ("mistral3", ())]
CASES = [
    *QUICK,
    *(
        pytest.param(*case, marks=pytest.mark.full)
        for case in [
            *((family, UNPACKED) for family in FAMILIES if (family, UNPACKED) not in QUICK),
            ("gemma3", ()),
            ("qwen3_vl", ()),
            ("qwen3_vl_moe", ("parallel.expert=2",)),
            ("mistral3", ("parallel.replicate=2",)),
            (
                "mistral3",
                (
                    "parallel.stages=2",
                    "train.gradient_accumulation_steps=8",
                ),
            ),
            ("mistral3", ("model.master_dtype=float32", "model.activation_checkpointing=full")),
        ]
    ),
]
OF_TEXT = ("model.language_model.", "language_model.", "lm_head.", "model.layers.")


@pytest.mark.parametrize(("family", "options"), CASES)
def test_its_text_is_trained_exactly_and_the_rest_is_copied(
    family: str, options: tuple[str, ...], tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    source = save_seeing_model(family, tokenizer, tmp_path / "source")
    records = uneven_chats()[:8]
    data = write_jsonl(tmp_path / "train.jsonl", records)
    given = settings(
        source,
        data,
        tmp_path / "run",
        "train.gradient_accumulation_steps=4",
        "train.max_steps=2",
        "export.dtype=source",
        *options,
    )
    said = finish(train(2, *given, cwd=tmp_path))
    assert f"Copied from {source}: " in said
    encoded = [encode(tokenizer, record) for record in records]
    expected = plain_training(source, encoded, [3e-3] * 2, opened=AutoModelForImageTextToText)
    assert_same_steps(tmp_path / "run", expected)

    model = tmp_path / "run/model"
    before = load_file(source / "model.safetensors")
    after = load_file(model / "model.safetensors")
    assert {n: (t.dtype, t.shape) for n, t in after.items()} == {
        n: (t.dtype, t.shape) for n, t in before.items()
    }
    for name, tensor in before.items():
        if not name.startswith(OF_TEXT):
            assert torch.equal(after[name], tensor), name
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
        assert (tensor - wanted).norm() <= 1e-5 * wanted.norm(), name
        moved += not torch.equal(wanted, expected.initial[name])
    assert moved > 20
