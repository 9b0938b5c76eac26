"""Weights drawn at random, and the counts of the experts that tokens choose."""

from __future__ import annotations

import torch
from helpers import moe_families

from shardtune.model.moe.counts import count_tokens
from shardtune.model.random_weights import draw_weights


def drawn(seed: int) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = moe_families.build("llama")
    draw_weights(model, seed, torch.device("cpu"))
    return dict(model.named_parameters())


def test_each_module_is_drawn_from_the_seed_and_its_name():
    weights, again, other = drawn(1), drawn(1), drawn(2)
    names = [name for name in weights if name.endswith("q_proj.weight")]
    first, second = (weights[name] for name in names)
    assert not torch.equal(first, second)
    assert torch.equal(first, again[names[0]]) and not torch.equal(first, other[names[0]])


def test_choices_beyond_the_experts_are_counted_apart():
    counts = torch.zeros(4, dtype=torch.int64)
    count_tokens(counts, torch.tensor([[0, 2], [2, 5], [3, 3]]))
    assert counts.tolist() == [1, 0, 2, 3]
