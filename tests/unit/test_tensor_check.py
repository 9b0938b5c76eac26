"""Models, meshes and optimizers that parallel.tensor refuses before a weight is read."""

from __future__ import annotations

import re
from typing import Any

import pytest
from helpers import packing_families
from helpers.configs import configured

from shardtune.distributed.layout import Layout
from shardtune.errors import UserError, all_of
from shardtune.model.build import read_facts, require_trainable
from shardtune.model.facts.of_config import require_possible
from shardtune.model.facts.trial import require_exact_copy
from shardtune.planner.simulation.simulate import fake_world

EIGHT_BITS = "optimizer.name=adamw8bit"
WIDE: dict[str, Any] = {"hidden_size": 512, "head_dim": 128, "intermediate_size": 1024}
UNITS = {"intermediate_size": 34}
KEYS = {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 6}
TWO_KEYS = {"num_attention_heads": 4, "num_key_value_heads": 2}
FEW_HEADS = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}


def problems(family: str, *assignments: str, **settings: Any) -> list[str]:
    """Return why a run on 4 ranks is refused before weights are read."""
    config = configured("model.init=random", "data.max_length=128", *assignments)
    model_config = packing_families.config_of(family, **settings)
    layout = Layout.of(config, 4)
    try:
        with fake_world(layout, 4) as world:
            facts = read_facts(config, model_config, world)
            all_of(
                lambda: require_trainable(facts, config, model_config, world),
                lambda: require_exact_copy(layout, model_config),
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
        (
            "llama",
            4,
            UNITS | {"num_key_value_heads": 4},
            "=4 does not divide model.layers.0.mlp.gate_proj.weight of llama, [34, 32]",
            "context=4, tensor=2",
        ),
        ("gptj", 2, {}, "=2: transformers' plan of gptj does not exist", "tensor=1"),
        ("gpt_oss", 2, {}, "plan of gpt_oss leaves attention whole", "context=2, tensor=1"),
        ("deepseek_v3", 2, {}, "plan of deepseek_v3 leaves attention", "context=2, tensor=1"),
        (
            "phi3",
            2,
            {},
            "plan of phi3 has the unknown rule rowwise_split_input",
            "context=2, tensor=1",
        ),
        (
            "deepseek_v2",
            2,
            {},
            "plan of deepseek_v2 has the unknown rule mla_kv_a",
            "context=2, tensor=1",
        ),
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


def test_a_rope_that_goes_by_the_row_is_refused_with_the_key_that_shares_it():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 100}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    alone = ["data.packing=false", "train.micro_batch_size=1"]
    problem, *_ = problems("llama", "parallel.tensor=2", *alone, rope_parameters=rope)
    assert problem.endswith(f"or {' with '.join(alone)} and parallel.tensor=1")
    assert not problems("llama", *alone, rope_parameters=rope)


@pytest.mark.parametrize("family", ["llama", "qwen3", "glm4_moe", "gemma3_text", "ministral3"])
def test_a_model_that_can_be_cut_is_not_refused(family):
    assert not problems(family, "parallel.tensor=2")


def test_weights_in_blocks_of_8_bits_are_cut_between_blocks():
    model = {"num_attention_heads": 4, "num_key_value_heads": 4} | WIDE
    assert not problems("llama", EIGHT_BITS, "parallel.tensor=2", **model)
    for units, fewer in ((1024, 2), (768, 1), (640, 1)):
        model["intermediate_size"] = units
        (problem,) = problems("llama", EIGHT_BITS, "parallel.tensor=4", **model)
        assert problem == (
            "optimizer.name=adamw8bit: model.layers.0.self_attn.o_proj.weight is divided into "
            "parts of 128 columns, which cut its blocks of 256 with one scale - use "
            f"parallel.tensor={fewer}, so that fewer ranks cut its columns, or optimizer.name=adamw"
        )
        assert not problems("llama", EIGHT_BITS, f"parallel.tensor={fewer}", **model)
        assert not problems("llama", "parallel.tensor=4", **model)


@pytest.mark.parametrize(
    ("assignments", "problem"),
    [
        (
            ["parallel.tensor=3"],
            "parallel.tensor=3 does not divide world size / parallel.replicate, 4 - use "
            "parallel.tensor=2",
        ),
        (
            ["parallel.tensor=4", "parallel.replicate=2"],
            "parallel.tensor=4 does not divide world size / parallel.replicate, 2 - use "
            "parallel.tensor=2",
        ),
        (
            ["parallel.tensor=2", "parallel.context=2"],
            "parallel.tensor=2 and parallel.context=2 both cut rows - use one of them",
        ),
    ],
)
def test_meshes_that_cannot_be_are_refused(assignments, problem):
    assert problems("llama", *assignments) == [problem]


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


def test_attention_under_a_mask_is_refused_with_the_configuration():
    for attention in ("sdpa", "eager"):
        with pytest.raises(UserError) as refused:
            configured("parallel.tensor=2", f"model.attention={attention}")
        assert (
            f'model.attention = "{attention}" (command line) is not for parallel.tensor=2, which '
            "cuts matrices around document attention - use model.attention=auto, or "
            "parallel.tensor=1"
        ) in str(refused.value)
