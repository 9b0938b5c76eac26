"""Layers are checkpointed as transformers 5.23 does it, under each version."""

from __future__ import annotations

from collections import Counter

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import shardtune.model.older_transformers  # noqa: F401, it is what is tested


def test_hooks_of_a_checkpointed_layer_run_once_and_its_forward_twice():
    """FSDP2 gathers and frees weights in such hooks."""
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = AutoConfig.for_model("llama", **shape, vocab_size=32, num_hidden_layers=2)
    model = AutoModelForCausalLM.from_config(config).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    calls = Counter[str]()
    layer = model.model.layers[0]
    layer.register_forward_pre_hook(lambda *_: calls.update(["layer"]))
    layer.mlp.register_forward_pre_hook(lambda *_: calls.update(["within"]))
    model(input_ids=torch.arange(8)[None], use_cache=False).logits.sum().backward()
    assert calls == {"layer": 1, "within": 2}
