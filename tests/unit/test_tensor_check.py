"""Models, meshes and optimizers that parallel.tensor, context and stages refuse."""

import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers import packing_families
from helpers.configs import configured
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from distTest.workloads.tiny import tiny_config
from shardtune.distributed.layout import Layout
from shardtune.errors import UserError, all_of
from shardtune.model.build import read_facts, require_trainable
from shardtune.model.facts.of_config import require_possible
from shardtune.model.facts.of_model import facts_of_model
from shardtune.model.facts.trial import require_exact_copy
from shardtune.model.stages import divide_layers, divided
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
            facts = read_facts(config, model_config, world.layout)
            all_of(
                lambda: require_trainable(config, model_config, facts, world),
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
            return divided(facts_of_model(AutoModelForCausalLM.from_config(config)).costs, 2)

    assert [len(part) for part in stages(8)] == [4, 4]
    assert len(stages(2000)[1]) < 4


def require(model_config: PreTrainedConfig) -> None:
    require_exact_copy(Layout(2, stages=2), model_config)


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
    facts = facts_of_model(model)
    assert not facts.layers and divided(facts.costs, 1) == [range(0)]


@pytest.mark.parametrize("kind", ["olmo", "granite_docling", "mamba"])
def test_a_norm_without_weights_and_a_scale_of_embeddings_are_of_one_stage(kind):
    require(tiny_config(kind))
