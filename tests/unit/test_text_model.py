"""A model that sees is built without its towers, and its export has the names of its files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.multimodal import FAMILIES, config_of, save_seeing_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

from shardtune.checkpoint.assets import SOURCE, list_source, model_assets
from shardtune.checkpoint.export.layout import WholeModel
from shardtune.checkpoint.train_state import model_kinds, model_state
from shardtune.errors import UserError
from shardtune.model.text_model import build_text_model, drop_towers, require_text

Tensors = dict[str, torch.Tensor]


def as_saved(tensors: Tensors) -> Tensors:
    return tensors


def as_in_memory(tensors: Tensors) -> Tensors:
    """Give the names that the class itself has, not those of earlier files."""
    spelled = {
        "language_model.lm_head.": "lm_head.",
        "language_model.model.": "model.language_model.",
        "vision_tower.": "model.vision_tower.",
        "multi_modal_projector.": "model.multi_modal_projector.",
    }
    return {
        next((new + n.removeprefix(old) for old, new in spelled.items() if n.startswith(old)), n): t
        for n, t in tensors.items()
    }


def with_stacks(tensors: Tensors) -> Tensors:
    """Give one tensor for all experts of a layer, as Qwen3.5's files have."""
    stacked = {n: t for n, t in tensors.items() if ".mlp.experts." not in n or "mtp" in n}
    for layer in {n.partition(".mlp.experts.")[0] for n in tensors.keys() - stacked.keys()}:
        stack = f"{layer}.mlp.experts"
        each = [
            {part: tensors[f"{stack}.{i}.{part}_proj.weight"] for part in ("gate", "up", "down")}
            for i in range(4)
        ]
        joined = [torch.cat([expert["gate"], expert["up"]]) for expert in each]
        stacked[f"{stack}.gate_up_proj"] = torch.stack(joined)
        stacked[f"{stack}.down_proj"] = torch.stack([expert["down"] for expert in each])
    return stacked


def transposed(tensors: Tensors) -> Tensors:
    return {
        n: t.transpose(1, 2).contiguous() if ".mlp.experts." in n else t for n, t in tensors.items()
    }


def with_tied_twice(tensors: Tensors) -> Tensors:
    head = tensors["language_model.model.embed_tokens.weight"]
    return tensors | {"language_model.lm_head.weight": head.clone()}


@pytest.mark.parametrize(
    ("family", "spell"),
    [
        *((family, as_saved) for family in FAMILIES),
        ("mistral3", as_in_memory),
        ("gemma3", as_in_memory),
        ("gemma3", with_tied_twice),
        ("qwen3_5_moe", with_stacks),
        ("qwen3_vl_moe", transposed),
    ],
)
def test_an_untrained_export_is_the_source(
    family: str,
    spell: Callable[[Tensors], Tensors],
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
) -> None:
    source, out = save_seeing_model(family, tokenizer, tmp_path / "source"), tmp_path / "out"
    stored = load_file(source / "model.safetensors")
    spelled = spell(stored)
    assert spell is as_saved or spelled.keys() != stored.keys() or spell is transposed
    save_file(spelled, source / "model.safetensors", metadata={"format": "pt"})
    model, info = AutoModelForImageTextToText.from_pretrained(source, output_loading_info=True)
    assert not info["missing_keys"]
    assert drop_towers(model)

    assets = model_assets(source) | {SOURCE: json.dumps(list_source(str(source))).encode()}
    tied, state = model.all_tied_weights_keys, model_state(model)
    export = WholeModel(model_kinds(model), tied, "source", assets, source)
    out.mkdir()
    export.write_rest(out, export.write_files(out, lambda name: state[name].detach()), {})
    written = load_file(out / "model.safetensors")
    assert written.keys() == spelled.keys()
    for name, tensor in spelled.items():
        assert written[name].dtype == tensor.dtype and torch.equal(written[name], tensor), name


@pytest.mark.parametrize("family", FAMILIES)
def test_no_tower_is_built(family: str) -> None:
    with torch.device("meta"):
        model = build_text_model(config_of(family))
    assert not any(part in name for name, _ in model.named_parameters() for part in ("vis", "tow"))
    assert type(model).__name__.endswith("ForConditionalGeneration")


@pytest.mark.parametrize("kind", ["vit", "t5", "florence2"])
def test_a_class_without_text_alone_is_refused(kind: str) -> None:
    with torch.device("meta"), pytest.raises(UserError, match=f"^{kind} has no text-only class"):
        build_text_model(AutoConfig.for_model(kind))


@pytest.mark.parametrize("kind", ["blip-2", "kosmos-2", "idefics"])
def test_a_forward_that_needs_an_image_is_refused(kind: str) -> None:
    with torch.device("meta"):
        model = build_text_model(AutoConfig.for_model(kind))
    with pytest.raises(UserError, match=f"^{kind} has no text-only class: .* ends with: .*pixel"):
        require_text(model)
