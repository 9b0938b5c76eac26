"""Stages: how layers are divided, and which architectures can be cut."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from benchmarks.tiny import tiny_config
from shardtune.distributed.layout import Layout
from shardtune.errors import UserError
from shardtune.model.stages import divide_layers, layers_of_stages, require_composable
from shardtune.model.traits import decoder_layers

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def highest(costs: list[float], parts: list[range]) -> float:
    return max(sum(costs[number] for number in part) for part in parts)


@given(st.lists(st.integers(1, 9), min_size=3, max_size=8))
def test_no_other_division_has_a_lower_highest_cost(costs):
    numbers, end = [float(cost) for cost in costs], len(costs)
    for stages in (1, 2, 3):
        parts = divide_layers(numbers, stages)
        assert [i for part in parts for i in part] == list(range(end))
        assert len(parts) == stages and all(parts)
        cuts = [
            [0, *middle, end]
            for middle in ([[]] if stages == 1 else [[a] for a in range(1, end)])
            if stages < 3
        ] or [[0, a, b, end] for a in range(1, end) for b in range(a + 1, end)]
        others = [[range(*edge) for edge in pairwise(cut)] for cut in cuts]
        assert highest(numbers, parts) == min(highest(numbers, other) for other in others)


def test_a_large_head_leaves_its_stage_fewer_layers():
    def stages(vocabulary: int) -> list[range]:
        config = AutoConfig.for_model(
            "llama", **SMALL | {"vocab_size": vocabulary, "num_hidden_layers": 8}
        )
        with torch.device("meta"):
            return layers_of_stages(AutoModelForCausalLM.from_config(config), 2)

    assert [len(part) for part in stages(8)] == [4, 4]
    assert len(stages(2000)[1]) < 4


def require(model_config: PreTrainedConfig) -> None:
    require_composable(Layout(2, stages=2), model_config)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3_text"])
def test_stages_of_usual_architectures_compose(family, is_tied):
    given = SMALL | {"head_dim": 8, "tie_word_embeddings": is_tied}
    require(AutoConfig.for_model(family, **given))


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("nanochat", {}),  # normalises what the embedding gives
        ("opt", {"ffn_dim": 32, "word_embed_proj_dim": 16}),  # adds positions to that
    ],
)
def test_an_architecture_that_changes_hidden_states_outside_of_its_layers_is_refused(family, more):
    with pytest.raises(UserError, match=f"parallel.stages=2: {family} "):
        require(AutoConfig.for_model(family, **SMALL | more))


def test_a_model_that_does_not_name_its_layers_is_one_stage():
    model = AutoModelForCausalLM.from_config(tiny_config("biogpt"))
    assert not decoder_layers(model) and layers_of_stages(model, 1) == [range(0)]


@pytest.mark.parametrize("kind", ["olmo", "granite_docling", "mamba"])
def test_a_norm_without_weights_and_a_scale_of_embeddings_are_of_one_stage(kind):
    require(tiny_config(kind))
