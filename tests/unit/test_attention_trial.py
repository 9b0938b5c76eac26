"""The trial of attention objects to what `document_attention` is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.packing_families import build, decided
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM

from benchmarks.tiny import tiny_config
from shardtune.model.documents import attention_choice
from shardtune.model.documents.attention_trial import LogitsTrial

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
    attention = decided(build("llama4_text", **CHUNKS))
    assert attention.by_layer
    assert "a window or chunks of 32 tokens in its masks or its layers alone" in attention.text
    wide = CHUNKS | {"attention_chunk_size": 128}
    assert not decided(build("llama4_text", **wide)).by_layer


def test_a_prefix_that_sees_itself_is_another_mask(monkeypatch):
    from transformers.models.olmo3 import modeling_olmo3

    def prefixed(*given: Any, **named: Any) -> Any:
        named["or_mask_function"] = lambda batch, head, q, kv: kv < 3
        return causal(*given, **named)

    causal = modeling_olmo3.create_causal_mask
    monkeypatch.setattr(modeling_olmo3, "create_causal_mask", prefixed)
    attention = decided(build("olmo3"))
    assert "another mask than the causal one within each document" in attention.text


def test_a_window_of_the_layers_alone_is_none(monkeypatch):
    """Their own attention goes by the mask. Here it is full."""
    from transformers.models.olmo3 import modeling_olmo3

    def full(*given: Any, **named: Any) -> Any:
        return modeling_olmo3.create_causal_mask(*given, **named)

    monkeypatch.setattr(modeling_olmo3, "create_sliding_window_causal_mask", full)
    attention = decided(build("olmo3", sliding_window=30))
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
    attention = decided(build(family, **settings))
    assert attention.by_layer and objection in attention.text


def test_a_small_leak_is_seen_in_bfloat16(monkeypatch):
    """Loaded weights have no other dtype. Of Jamba's state 0.3% of the logits' spread."""
    model = build("jamba", initializer_range=0.03).bfloat16()
    assert decided(model).by_document
    monkeypatch.setattr(attention_choice, "separate_documents", lambda *_, **__: None)
    attention = decided(build("jamba", initializer_range=0.03).bfloat16())
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
