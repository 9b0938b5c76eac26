"""Heads that travel between ranks that share rows, and models whose rows ranks cannot share."""

from __future__ import annotations

import re
from typing import Any

import pytest
from helpers import packing_families
from helpers.configs import configured

from shardtune.distributed.layout import Layout
from shardtune.errors import UserError, all_of
from shardtune.model.build import read_facts, require_trainable
from shardtune.model.facts.trial import require_exact_copy
from shardtune.planner.simulation.simulate import fake_world

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 100,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 100},
    "llama4_text": {"attn_temperature_tuning": True, "floor_scale": 100},
    "deepseek_v32": {"index_topk": 64},
}


def problems(family: str, *assignments: str, ranks: int = 4) -> list[str]:
    """Return why a run is refused before weights are read."""
    config = configured("model.init=random", "data.max_length=128", *assignments)
    model_config = packing_families.config_of(family, **SETTINGS.get(family, {}))
    try:
        with fake_world(Layout.of(config, ranks), ranks) as world:
            facts = read_facts(config, model_config, world)
            all_of(
                lambda: require_trainable(facts, config, model_config, world),
                lambda: require_exact_copy(Layout.of(config), model_config),
            )
    except UserError as error:
        return error.problems
    return []


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
    shared = ["parallel.context=2"]
    for packing in ("true", "false"):
        found = problems(family, *shared, f"data.packing={packing}")
        assert any(words in problem for problem in found), packing
    remedies = [p.rpartition(" - use ")[2] for p in problems(family, *shared)]
    settings = [each for remedy in remedies for each in re.findall(r"[\w.]+=\w+", remedy)]
    assert not problems(family, *shared, *settings)


def test_degrees_that_do_not_divide_are_refused_with_those_that_do():
    (ranks,) = problems("llama", "parallel.context=3")
    assert ranks == "parallel.context=3 does not divide the world size, 4 - use one of 1, 2, 4"
    (ranks,) = problems("llama", "parallel.context=4", "parallel.stages=2")
    assert ranks == (
        "parallel.context=4 does not divide world size / parallel.stages, 2 - use one of 1, 2"
    )
    for degree in (3, 8):
        (heads,) = problems("llama", f"parallel.context={degree}", ranks=2 * degree)
        assert heads == (
            f"parallel.context={degree} does not divide the 4 heads of llama - use one of 1, 2, 4 "
            "that divides world size / parallel.stages too"
        )
    assert not problems("llama", "parallel.context=4", "parallel.replicate=4")
    with pytest.raises(UserError) as refused:
        configured("parallel.context=2", "model.attention=sdpa")
    assert 'model.attention = "sdpa" (command line) is not for parallel.context=2' in str(
        refused.value
    )
