"""Which experts can be spread over ranks."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shardtune.model.experts import spread_problems

SMALL = {"vocab_size": 16, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("family", "settings", "degree", "problem"),
    [
        ("llama", {}, 1, None),
        ("llama", {}, 2, "llama has no experts - use parallel.expert=1"),
        ("mixtral", {"num_local_experts": 6}, 3, None),
        (
            "mixtral",
            {"num_local_experts": 6, "intermediate_size": 10},
            3,
            "4 ranks share 2 experts of mixtral, and neither these nor their width, 10, can be cut "
            "into 4 - use a larger parallel.replicate",
        ),
        ("mixtral", {"num_local_experts": 6}, 4, "does not divide the 6 experts of mixtral - "),
        # It also sends tokens to experts without parameters.
        (
            "longcat_flash",
            {"num_hidden_layers": 2, "n_routed_experts": 4, "expert_ffn_hidden_size": 16},
            2,
            "longcat_flash has no plan to spread its experts over ranks - use parallel.expert=1",
        ),
    ],
)
def test_experts_that_cannot_be_spread_are_named(
    family: str, settings: dict[str, int], degree: int, problem: str | None
) -> None:
    small = {**SMALL, **settings}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **small))
    problems = list(spread_problems(model, degree, copies=4))
    assert len(problems) == (problem is not None)
    assert problem is None or problem in problems[0]
