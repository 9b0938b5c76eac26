"""A trial of attention and of a small copy tells documents apart; the tiny model of a rehearsal."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import packing_families
from helpers.moe_families import SMALL, build
from helpers.packing_families import decided
from helpers.tiny_models import small_opt
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, MistralConfig

from distTest.workloads import small_models as tiny
from distTest.workloads.tiny import tiny_config
from shardtune.config import Config
from shardtune.config_io import load_config
from shardtune.distributed.layout import Layout
from shardtune.errors import UserError
from shardtune.model.documents import attention_choice
from shardtune.model.documents.attention_choice import LogitsTrial
from shardtune.model.facts import trial
from shardtune.model.facts.of_model import facts_of_model
from shardtune.model.facts.problems import problems
from shardtune.model.facts.trial import require_exact_copy
from shardtune.model.source.small_copy import small_copy

REPOSITORY = Path(__file__).parents[2]
GLM = REPOSITORY / "tests/data/configs/glm-4.5-air"


def configured(*assignments: str) -> Config:
    return load_config(REPOSITORY / "examples/demo.yaml", ["model.path=unread", *assignments], {})


def test_a_copy_of_a_large_model_is_small_and_keeps_the_parts_that_tell_documents_apart():
    whole = AutoConfig.from_pretrained(GLM)
    before = torch.get_rng_state()
    copy = small_copy(whole, "auto")
    assert copy and torch.equal(torch.get_rng_state(), before)
    assert copy.num_parameters() < 5e7 and copy.dtype == torch.float32
    assert copy.config.num_hidden_layers == 12
    for name in ("head_dim", "n_routed_experts", "first_k_dense_replace"):
        assert getattr(copy.config, name) == getattr(whole, name), name
    assert copy.config.rope_parameters == whole.rope_parameters
    require_exact_copy(Layout.of(configured()), whole)


def test_layers_that_share_keys_are_all_in_the_copy():
    whole = AutoConfig.for_model("gemma3n_text")
    copy = small_copy(whole, "auto")
    assert copy and copy.config.num_hidden_layers == whole.num_hidden_layers


@pytest.mark.parametrize(
    ("model_config", "attention"),
    [(build("gpt_oss").config, "eager"), (small_opt().config, "sdpa")],
    ids=["gpt_oss", "opt"],
)
def test_documents_that_would_mix_are_refused_by_name(model_config, attention):
    """Both make masks without positions; attention by documents needs none."""
    require_exact_copy(Layout.of(configured()), model_config)
    under_mask = f"model.attention={attention}"
    said = rf"^{model_config.model_type} lets a packed document see .* - use model\.attention=auto"
    with pytest.raises(UserError, match=said):
        require_exact_copy(Layout.of(configured(under_mask)), model_config)
    require_exact_copy(Layout.of(configured(under_mask, "data.packing=false")), model_config)


def test_a_narrow_window_is_no_reason_to_refuse():
    require_exact_copy(Layout.of(configured()), MistralConfig(**SMALL, sliding_window=4))


def test_a_model_that_has_passed_is_not_tried_again(cache, monkeypatch):
    tried, layout = list[Layout](), Layout(4, max_length=4096)
    model_config = MistralConfig(**SMALL)
    with monkeypatch.context() as watched:
        watched.setattr(trial, "_tried", lambda layout, _: (tried.append(layout) or [], True))
        others = replace(layout, ranks=8, micro_batches=2), replace(layout, max_length=512)
        for again in (layout, *others):
            require_exact_copy(again, model_config)
        assert len(tried) == 1
        require_exact_copy(replace(layout, stages=2), model_config)
        require_exact_copy(replace(layout, max_length=64), model_config)
        require_exact_copy(layout, MistralConfig(**SMALL, sliding_window=4))
        assert len(tried) == 4
    monkeypatch.setattr(trial, "small_copy", lambda *_: None)
    require_exact_copy(replace(layout, tensor=2), model_config)  # such as one without memory
    monkeypatch.setattr(trial, "_tried", lambda *_: (["its halves differ"], True))
    for _ in range(2):
        with pytest.raises(UserError, match="its halves differ"):
            require_exact_copy(replace(layout, tensor=2), model_config)


def test_an_architecture_without_a_copy_is_left_to_its_weights():
    """Heads may be too wide; CodeGen's forward takes a multiple of four."""
    wide = AutoConfig.for_model("llama", hidden_size=1 << 18, num_attention_heads=4)
    assert small_copy(wide, "auto") is None
    for model_config in (wide, AutoConfig.for_model("codegen")):
        require_exact_copy(Layout.of(configured()), model_config)


@pytest.mark.parametrize("packing", ["true", "false"])
def test_an_encoder_is_refused_by_name(packing):
    model_config = AutoConfig.for_model("bert", **SMALL)
    with pytest.raises(
        UserError, match=r"^bert is not a causal .* its tokens see those behind them"
    ):
        require_exact_copy(Layout.of(configured(f"data.packing={packing}")), model_config)
    decoder = AutoConfig.for_model("bert", **SMALL, is_decoder=True)
    require_exact_copy(Layout.of(configured("data.packing=false")), decoder)


def test_a_model_that_cannot_compute_layers_again_is_refused_by_name():
    model, given = AutoModelForCausalLM.from_config(tiny_config("jetmoe")), "data.packing=false"
    facts = facts_of_model(model)
    none, full = (
        Layout.of(configured(given, f"model.activation_checkpointing={how}"))
        for how in ("none", "full")
    )
    assert not list(problems(facts, none))
    (problem,) = problems(facts, full)
    assert problem.startswith("jetmoe cannot compute layers again - ")


CHUNKS = {
    "layer_types": ["chunked_attention", "full_attention"],
    "num_hidden_layers": 2,
    "attention_chunk_size": 32,
    "moe_layers": [],
    "intermediate_size_mlp": 32,
    "attn_temperature_tuning": False,
    "no_rope_layers": [1, 0],
}


def test_chunks_are_no_window():
    """Masks tell the trial, whose documents are shorter than a chunk."""
    attention = decided(packing_families.build("llama4_text", **CHUNKS))
    assert attention.by_layer
    assert "a window or chunks of 32 tokens in its masks or its layers alone" in attention.text
    wide = CHUNKS | {"attention_chunk_size": 128}
    assert not decided(packing_families.build("llama4_text", **wide)).by_layer


def test_a_prefix_that_sees_itself_is_another_mask(monkeypatch):
    from transformers.models.olmo3 import modeling_olmo3

    def prefixed(*given: Any, **named: Any) -> Any:
        named["or_mask_function"] = lambda batch, head, q, kv: kv < 3
        return causal(*given, **named)

    causal = modeling_olmo3.create_causal_mask
    monkeypatch.setattr(modeling_olmo3, "create_causal_mask", prefixed)
    attention = decided(packing_families.build("olmo3"))
    assert "another mask than the causal one within each document" in attention.text


def test_a_window_of_the_layers_alone_is_none(monkeypatch):
    """Their own attention goes by the mask. Here it is full."""
    from transformers.models.olmo3 import modeling_olmo3

    def full(*given: Any, **named: Any) -> Any:
        return modeling_olmo3.create_causal_mask(*given, **named)

    monkeypatch.setattr(modeling_olmo3, "create_sliding_window_causal_mask", full)
    attention = decided(packing_families.build("olmo3", sliding_window=30))
    assert "a window or chunks of 30 tokens in its masks or its layers alone" in attention.text
    assert attention.by_layer


@pytest.mark.parametrize(
    ("family", "settings", "objection"),
    [
        ("gemma2", {"sliding_window": 7}, "capped scores"),
        ("deepseek_v32", {"index_topk": 100}, "layers that read the mask"),
    ],
)
def test_what_it_has_not_is_named(family, settings, objection):
    """A document may have 128 tokens, of which the indexer would leave 28 out."""
    attention = decided(packing_families.build(family, **settings))
    assert attention.by_layer and objection in attention.text


def test_a_small_leak_is_seen_in_bfloat16(monkeypatch):
    """Loaded weights have no other dtype. Of Jamba's state 0.3% of the logits' spread."""
    model = packing_families.build("jamba", initializer_range=0.03).bfloat16()
    assert decided(model).by_document
    monkeypatch.setattr(attention_choice, "separate_documents", lambda *_, **__: None)
    attention = decided(packing_families.build("jamba", initializer_range=0.03).bfloat16())
    assert "jamba has logits that change without the mask, by 0." in attention.text


def test_the_architecture_is_asked_for_its_interface_and_not_fsdps_class():
    """Of that one transformers finds no source, and only rank 0 has asked a small copy before."""
    model = AutoModelForCausalLM.from_config(tiny_config("gptj"))
    sharded = type("Sharded", (FSDPModule, type(model)), {})
    object.__setattr__(model, "__class__", sharded)
    layout: Any = None  # not asked
    trial = LogitsTrial(model, layout, torch.device("cpu"))
    said = attention_choice._objection(trial)
    assert said == "does not use transformers' attention interface"


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "glm"])
@pytest.mark.parametrize("ranks", [2, 3, 16])
def test_a_tiny_model_has_the_architecture_of_its_source(architecture, ranks, tmp_path, models):
    line = tiny.make_model(str(models[architecture]), ranks, tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    source = AutoConfig.from_pretrained(models[architecture])
    assert config.model_type == source.model_type
    assert config.tie_word_embeddings == source.tie_word_embeddings
    assert line.endswith(f"as {models[architecture]}")
    if architecture == "glm":
        assert config.n_routed_experts % ranks == 0
        assert config.first_k_dense_replace < config.num_hidden_layers
    assert AutoModelForCausalLM.from_config(config).num_parameters() < 1_000_000
    assert config.vocab_size == len(AutoTokenizer.from_pretrained(tmp_path))


def test_glm_stands_in_for_an_architecture_that_cannot_be_read(tmp_path):
    """There is no such directory, or transformers does not know the model in it."""
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "config.json").write_text('{"model_type": "unheard-of"}', encoding="utf-8")
    for path in (tmp_path / "nothing", strange):
        line = tiny.make_model(str(path), 2, tmp_path / "out")
        assert line.startswith("glm4_moe, 2 layers, ")
        assert f" as zai-org/GLM-4.5-Air, because {path} cannot be had here, " in line
        assert AutoConfig.from_pretrained(tmp_path / "out").model_type == "glm4_moe"


def test_one_layer_of_each_kind_is_kept(tmp_path):
    large = AutoConfig.for_model("gemma3_text")
    large.save_pretrained(tmp_path / "large")
    tiny.make_model(str(tmp_path / "large"), 2, tmp_path / "small")
    small = AutoConfig.from_pretrained(tmp_path / "small")
    assert set(small.layer_types) == set(large.layer_types) and small.num_hidden_layers == 2
