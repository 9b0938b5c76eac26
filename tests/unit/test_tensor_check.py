"""Models, meshes and optimizers that parallel.tensor and parallel.context refuse before a weight is
read.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from helpers import packing_families
from helpers.configs import configured

from shardtune.distributed.layout import Layout
from shardtune.errors import UserError, all_of
from shardtune.model.build import require_trainable
from shardtune.model.documents.attention_check import require_documents_apart
from shardtune.model.source.config_json import require_possible
from shardtune.model.tensor_parallel import require_separable
from shardtune.planner.simulation.simulate import fake_world

EIGHT_BITS = "optimizer.name=adamw8bit"
WIDE: dict[str, Any] = {"hidden_size": 512, "head_dim": 128, "intermediate_size": 1024}
UNITS = {"intermediate_size": 34, "num_key_value_heads": 4}
KEYS = {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 6}
TWO_KEYS = {"num_attention_heads": 4, "num_key_value_heads": 2}
FEW_HEADS = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 100}
LONGROPE |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
# Without the indexers and scales of these, documents of 128 tokens would not show them.
SETTINGS: dict[str, dict[str, Any]] = {
    "phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 100},
    "llama4_text": {"attn_temperature_tuning": True, "floor_scale": 100},
    "deepseek_v32": {"index_topk": 64},
}


def problems(family: str, *assignments: str, ranks: int = 4, **settings: Any) -> list[str]:
    """Return why a run is refused before weights are read."""
    config = configured("model.init=random", "data.max_length=128", *assignments)
    model_config = packing_families.config_of(family, **settings)
    layout = Layout.of(config, ranks)
    try:
        with fake_world(layout, ranks) as world:
            all_of(
                lambda: require_trainable(config, model_config, world),
                lambda: require_documents_apart(layout, model_config),
                lambda: require_separable(layout, model_config),
            )
    except UserError as error:
        return error.problems
    return []


@pytest.mark.parametrize(
    ("family", "degree", "settings", "words", "remedies"),
    [
        ("qwen3", 4, TWO_KEYS, "=4 does not divide the 2 key heads", "tensor=2, context=4"),
        ("llama", 4, KEYS, "=4 does not divide the 6 key heads of llama", "tensor=2, context=4"),
        ("llama", 4, FEW_HEADS, "=4 does not divide the 2 key heads of llama", "tensor=2"),
        ("llama", 4, UNITS, "gate_proj.weight of llama, [34, 32]", "context=4, tensor=2"),
        ("gptj", 2, {}, "=2: transformers' plan of gptj does not exist", "tensor=1"),
        ("gpt_oss", 2, {}, "plan of gpt_oss leaves attention whole", "context=2, tensor=1"),
        ("deepseek_v3", 2, {}, "plan of deepseek_v3 leaves attention", "context=2, tensor=1"),
        ("phi3", 2, {}, "plan of phi3 has the unknown rule", "context=2, tensor=1"),
        ("deepseek_v2", 2, {}, "plan of deepseek_v2 has the unknown rule", "context=2, tensor=1"),
        ("deepseek_v32", 2, {}, "=2: indexers of deepseek_v32 choose 300 keys", "tensor=1"),
        ("qwen3_next", 2, {}, "=2: layers of qwen3_next hand a state along the row", "tensor=1"),
        ("mamba2", 2, {}, "=2: layers of mamba2 hand a state along the row", "tensor=1"),
        ("gemma2", 2, {}, "=2 needs attention without a mask, and this model", "tensor=1"),
        # A layer's activation is sparse by the mean of all hidden units.
        ("gemma3n_text", 2, {}, "parts of the matrices of gemma3n_text", "context=2, tensor=1"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_and_each_remedy_is_not(
    family, degree, settings, words, remedies
):
    found = problems(family, f"parallel.tensor={degree}", **settings)
    (problem,) = (p for p in found if words in p)
    assert problem.startswith(f"parallel.tensor={degree}")
    named = re.findall(r"(?:parallel\.)(\w+=\d+)", problem.rpartition(" - use ")[2])
    assert ", ".join(named) == remedies
    for remedy in named:
        assert not problems(family, f"parallel.{remedy}", **settings)


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("qwen3_5_moe_text", "layers of qwen3_5_moe_text hand a state along the row"),
        ("mamba2", "layers of mamba2 hand a state along the row"),
        ("bamba", "layers of bamba hand a state along the row"),
        ("deepseek_v32", "indexers of deepseek_v32 choose 64 keys of the row"),
        ("phi3", "phi3 takes other rope factors for a whole forward"),
        ("llama4_text", "llama4_text scales queries by their place in the row from 100 tokens on"),
        ("gptj", "needs attention without a mask, and this model attends under one ("),
    ],
)
def test_models_that_a_slice_would_get_wrong_are_refused_and_the_remedy_is_not(family, words):
    shared, settings = ["parallel.context=2"], SETTINGS.get(family, {})
    for packing in ("true", "false"):
        found = problems(family, *shared, f"data.packing={packing}", **settings)
        assert any(words in problem for problem in found), packing
    remedies = [p.rpartition(" - use ")[2] for p in problems(family, *shared, **settings)]
    given = [each for remedy in remedies for each in re.findall(r"[\w.]+=\w+", remedy)]
    assert not problems(family, *shared, *given, **settings)


def test_a_rope_that_goes_by_the_row_is_refused_with_the_key_that_shares_it():
    alone = ["data.packing=false", "train.micro_batch_size=1"]
    problem, *_ = problems("llama", "parallel.tensor=2", *alone, rope_parameters=LONGROPE)
    assert problem.endswith(f"or {' with '.join(alone)} and parallel.tensor=1")
    assert not problems("llama", *alone, rope_parameters=LONGROPE)


@pytest.mark.parametrize("family", ["llama", "qwen3", "glm4_moe", "gemma3_text", "ministral3"])
def test_a_model_that_can_be_cut_is_not_refused(family):
    assert not problems(family, "parallel.tensor=2")


def test_weights_in_blocks_of_8_bits_are_cut_between_blocks():
    model = {"num_attention_heads": 4, "num_key_value_heads": 4} | WIDE
    assert not problems("llama", EIGHT_BITS, "parallel.tensor=2", **model)
    for units, fewer in ((1024, 2), (768, 1), (640, 1)):
        model["intermediate_size"] = units
        (problem,) = problems("llama", EIGHT_BITS, "parallel.tensor=4", **model)
        assert "parts of 128 columns, which cut its blocks of 256" in problem
        assert f" - use parallel.tensor={fewer}, " in problem
        assert not problems("llama", EIGHT_BITS, f"parallel.tensor={fewer}", **model)
        assert not problems("llama", "parallel.tensor=4", **model)


@pytest.mark.parametrize(
    ("mesh", "ranks", "problem"),
    [
        ("tensor=3", 4, "tensor=3 does not divide world size / parallel.replicate, 4 - "),
        ("tensor=4 replicate=2", 4, "tensor=4 does not divide world size / parallel.replicate, 2 "),
        ("tensor=2 context=2", 4, "tensor=2 and parallel.context=2 both cut rows - "),
        ("context=3", 4, "context=3 does not divide the world size, 4 - use one of 1, 2, 4"),
        ("context=4 stages=2", 4, "context=4 does not divide world size / parallel.stages, 2 - "),
        ("context=3", 6, "context=3 does not divide the 4 heads of llama - use one of 1, 2, 4 "),
        ("context=8", 16, "context=8 does not divide the 4 heads of llama - use one of 1, 2, 4 "),
        ("context=4 replicate=4", 4, None),
    ],
)
def test_meshes_that_cannot_be_are_refused(mesh, ranks, problem):
    found = problems("llama", *(f"parallel.{degree}" for degree in mesh.split()), ranks=ranks)
    assert len(found) == bool(problem)
    assert all(line.startswith(f"parallel.{problem}") for line in found)


def test_ranks_of_two_nodes_are_refused_with_a_degree_that_stays_within_one():
    def refusals(degree: int, nodes: int, ranks_per_node: int) -> list[str]:
        try:
            given = "model.path=unread", f"parallel.tensor={degree}"
            require_possible(configured(*given), nodes, ranks_per_node)
        except UserError as error:
            return [problem.rpartition(" - ")[2] for problem in error.problems]
        return []

    assert refusals(4, 1, 4) == refusals(2, 2, 2) == refusals(2, 3, 6) == []
    assert refusals(4, 2, 2) == refusals(3, 3, 2) == ["use parallel.tensor=2"]
    assert refusals(3, 2, 8) == ["use parallel.tensor=2"]
    assert refusals(5, 3, 4) == ["use parallel.tensor=4"]
    with pytest.raises(UserError, match="so that each layer waits for the network - use"):
        require_possible(configured("model.path=unread", "parallel.tensor=4"), 2, 2)


@pytest.mark.parametrize("key", ["tensor", "context"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_under_a_mask_is_refused_with_the_configuration(key, attention):
    said = f'model.attention = "{attention}" (command line) is not for parallel.{key}=2'
    with pytest.raises(UserError, match=re.escape(said)):
        configured(f"parallel.{key}=2", f"model.attention={attention}")
