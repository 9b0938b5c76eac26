"""A small copy of an architecture shows whether documents stay apart before a weight is there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import packing_families
from helpers.moe_families import SMALL, build
from helpers.tiny_models import small_opt
from transformers import AutoConfig, AutoModelForCausalLM, MistralConfig

from benchmarks.tiny import tiny_config
from shardtune.config import Config
from shardtune.config_io import load_config
from shardtune.distributed.layout import Layout
from shardtune.errors import UserError
from shardtune.model.documents import attention_choice
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
    ("architecture", "heads"),
    [
        ("kimi_linear", {"linear_num_heads": 2}),
        ("qwen3_5_moe", {"linear_num_key_heads": 2, "linear_num_value_heads": 4}),
    ],
)
def test_a_copy_has_few_heads_of_delta_rules(architecture, heads):
    """With all of them a trial of Kimi Linear took minutes. Key heads serve as many values."""
    copy = small_copy(AutoConfig.for_model(architecture), "auto")
    assert copy
    text = copy.config.get_text_config()
    assert {name: getattr(text, name) for name in heads} == heads


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


def test_a_small_leak_of_a_state_is_seen(monkeypatch):
    """Of Jamba's state 0.6% of the logits' spread, which bfloat16's rounding would hide."""
    model_config = packing_families.build("jamba", initializer_range=0.04).config
    require_exact_copy(Layout.of(configured()), model_config)
    monkeypatch.setattr(attention_choice, "separate_documents", lambda *_, **__: None)
    with pytest.raises(UserError, match=r"^jamba lets a packed document see .* change by 0\.\d%"):
        require_exact_copy(Layout.of(configured()), model_config)


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
