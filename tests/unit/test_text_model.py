"""A model that sees is built without its towers, and its export has the names of its files."""

import json
from pathlib import Path

import pytest
import torch
from helpers.multimodal import FAMILIES, config_of, save_seeing_model
from peft import PeftConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from shardtune.__main__ import run
from shardtune.checkpoint.assets import SOURCE, list_source, model_assets
from shardtune.checkpoint.export.adapter import Adapter
from shardtune.checkpoint.export.model_files import WholeModel
from shardtune.checkpoint.train_state import model_kinds, model_state
from shardtune.config import LoraConfig, ModelConfig
from shardtune.errors import UserError
from shardtune.model.lora import add_adapters
from shardtune.model.source.files import read_model_config
from shardtune.model.source.text_model import build_text_model, drop_towers, require_text

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


@pytest.mark.parametrize(
    ("family", "spell"),
    [
        *((family, as_saved) for family in FAMILIES),
        ("mistral3", as_in_memory),
        ("gemma3", as_in_memory),
        ("qwen3_5_moe", with_stacks),
        ("qwen3_vl_moe", transposed),
    ],
)
def test_an_untrained_export_is_the_source(family, spell, tokenizer, tmp_path):
    source, out = save_seeing_model(family, tokenizer, tmp_path / "source"), tmp_path / "out"
    stored = load_file(source / "model.safetensors")
    spelled = spell(stored)
    assert spell is as_saved or spelled.keys() != stored.keys() or spell is transposed
    save_file(spelled, source / "model.safetensors", metadata={"format": "pt"})
    model, info = AutoModelForImageTextToText.from_pretrained(source, output_loading_info=True)
    assert not info["missing_keys"]
    assert drop_towers(model)

    assert_exported_as(spelled, model, source, out)


def test_a_trained_tied_weight_is_exported_under_both_names_of_the_source(tokenizer, tmp_path):
    source = save_seeing_model("gemma3", tokenizer, tmp_path / "source")
    stored = load_file(source / "model.safetensors")
    names = "language_model.model.embed_tokens.weight", "language_model.lm_head.weight"
    stored[names[1]] = stored[names[0]].clone()
    save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForImageTextToText.from_pretrained(source)
    assert drop_towers(model)
    with torch.no_grad():
        model.get_input_embeddings().weight += 1
    trained = {name: stored[name] + 1 for name in names}
    assert_exported_as(stored | trained, model, source, tmp_path / "out")


def assert_exported_as(expected: Tensors, model: PreTrainedModel, source: Path, out: Path) -> None:
    assets = model_assets(source) | {SOURCE: json.dumps(list_source(str(source))).encode()}
    tied, state = model.all_tied_weights_keys, model_state(model)
    export = WholeModel(model_kinds(model), tied, "source", assets, source)
    out.mkdir()
    export.write_rest(
        out, export.write_files(out, lambda name: state[name].detach()), {"step": 1}, lambda *_: ""
    )
    written = load_file(out / "model.safetensors")
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        assert written[name].dtype == tensor.dtype and torch.equal(written[name], tensor), name


def test_a_checkpoint_with_a_tower_is_exported(tokenizer, tmp_path):
    """As older ones of Gemma 3 have it. The tower is copied from the source."""
    source = save_seeing_model("gemma3", tokenizer, tmp_path / "source")
    model = AutoModelForImageTextToText.from_pretrained(source)
    stored = load_file(source / "model.safetensors")
    assert_exported_as(stored, model, source, tmp_path / "out")


def test_an_export_of_drawn_weights_says_that_it_has_no_tower(tokenizer, tmp_path):
    source = save_seeing_model("gemma3", tokenizer, tmp_path / "source")
    with torch.device("meta"):
        model = build_text_model(config_of("gemma3"))
    assets = model_assets(source)
    export = WholeModel(model_kinds(model), model.all_tied_weights_keys, "source", assets, None)
    assert export.remark == "Left out: model.vision_tower, which model.init=random does not draw"


@pytest.mark.parametrize("family", FAMILIES)
def test_no_tower_is_built(family):
    config = config_of(family)
    with torch.device("meta"):
        model = build_text_model(config)
    models = [each for each in model.modules() if isinstance(each, PreTrainedModel)]
    assert {type(each.config) for each in models} == {type(config), type(config.get_text_config())}
    assert type(model).__name__.endswith("ForConditionalGeneration")


@pytest.mark.parametrize(
    "kind",
    [
        *("rwkv", "xlstm", "gpt_neo", "mpt", "zamba", "zamba2", "dbrx", "doge"),
        *("inkling2", "inkling2_text", "inkling_mm_model", "inkling_text"),
    ],
)
def test_an_architecture_that_needs_code_of_its_own_is_refused_with_others(kind, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}), encoding="utf-8")
    assert run(["plan", str(tmp_path), "--nodes", "2", "--gpus-per-node", "8"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    said, _, instead = line.partition(" - use a model of type ")
    assert said == f"ERROR: {kind} is not trained here"
    assert all(name in CONFIG_MAPPING for name in instead.split(" or "))
    with pytest.raises(UserError, match=f"^{kind} is not trained here"):  # as one of the hub is
        read_model_config(ModelConfig(path=str(tmp_path)))


@pytest.mark.parametrize("kind", ["vit", "t5", "florence2"])
def test_a_class_without_text_alone_is_refused(kind):
    with torch.device("meta"), pytest.raises(UserError, match=f"^{kind} has no text-only class"):
        build_text_model(AutoConfig.for_model(kind))


@pytest.mark.parametrize("kind", ["blip-2", "kosmos-2", "idefics"])
def test_a_forward_that_needs_an_image_is_refused(kind):
    with torch.device("meta"):
        model = build_text_model(AutoConfig.for_model(kind))
    with pytest.raises(UserError, match=f"^{kind} has no text-only class: .* ends with: .*pixel"):
        require_text(model)


@pytest.mark.parametrize("family", ["mistral3", "qwen3_5_moe"])
def test_adapters_have_the_names_that_peft_gives_them_in_the_whole_class(
    family, tokenizer, tmp_path
):
    source = save_seeing_model(family, tokenizer, tmp_path / "source")
    lora, model = LoraConfig(rank=2), build_text_model(AutoConfig.from_pretrained(source))
    add_adapters(model, lora)
    adapter = Adapter(model_kinds(model), lora, model_assets(source))
    (tmp_path / "adapter").mkdir()
    state = model_state(model)
    entries = adapter.write_files(tmp_path / "adapter", lambda name: state[name].detach())
    adapter.write_rest(tmp_path / "adapter", entries, {"step": 1}, lambda *_: "")
    whole = AutoModelForImageTextToText.from_pretrained(source)
    config = PeftConfig.from_pretrained(tmp_path / "adapter")
    expected = get_peft_model_state_dict(get_peft_model(whole, config))
    written = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert {n: t.shape for n, t in written.items()} == {n: t.shape for n, t in expected.items()}
