"""Selective checkpointing changes no gradient, with experts that have biases, too."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from helpers.moe_families import build
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.tiny import tiny_config
from shardtune.model.recomputation import kept_operators


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm", "eager"])
@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
def test_gradients_are_those_without_checkpointing(family, experts):
    torch.manual_seed(0)
    model = build(family).train()
    model.set_experts_implementation(experts)
    require_same_gradients(model)
    assert torch.ops.aten.mm.default in kept_operators(model)
    is_kept = torch.ops.aten._grouped_mm.default in kept_operators(model)
    assert is_kept == (family == "mixtral")


def test_products_that_a_layer_adds_to_are_not_kept():
    """PyTorch does not notice where Gemma 3n does so."""
    torch.manual_seed(0)
    require_same_gradients(AutoModelForCausalLM.from_config(tiny_config("gemma3n_text")).train())


def require_same_gradients(model: PreTrainedModel) -> None:
    ids = torch.randint(100, (1, 40))
    gradients = []
    for _ in range(2):
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        contexts = partial(create_selective_checkpoint_contexts, kept_operators(model))
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
