"""Which experts can be spread over ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from helpers.configs import configured
from helpers.moe_families import FAMILIES
from helpers.moe_families import SMALL as FAMILY_SMALL
from transformers import AutoConfig, AutoModelForCausalLM

from shardtune.distributed.exchange import Exchange
from shardtune.distributed.layout import Layout
from shardtune.model.moe.shared_experts import SharedExperts
from shardtune.model.moe.spread import spread_problems
from shardtune.planner.simulation.simulate import Step, fake_world, simulate
from shardtune.training.states.reshard import ReshardPolicy

SMALL = {"vocab_size": 16, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}


UNEVEN = {"num_local_experts": 9, "intermediate_size": 10}
# It also sends tokens to experts without parameters.
LONGCAT = {"num_hidden_layers": 2, "n_routed_experts": 4, "expert_ffn_hidden_size": 16}


@pytest.mark.parametrize(
    ("family", "settings", "degree", "problem"),
    [
        ("llama", {}, 1, None),
        ("llama", {}, 2, "llama has no experts - use parallel.expert=1"),
        ("mixtral", {"num_local_experts": 6}, 3, None),
        ("mixtral", UNEVEN, 3, "their width, 10, can be cut into 4 - use a larger parallel.repl"),
        ("mixtral", {"num_local_experts": 6}, 4, "does not divide the 6 experts of mixtral - "),
        ("longcat_flash", LONGCAT, 2, "longcat_flash has no plan to spread its experts"),
    ],
)
def test_experts_that_cannot_be_spread_are_named(family, settings, degree, problem):
    with torch.device("meta"):
        small = AutoConfig.for_model(family, **SMALL | settings)
        model = AutoModelForCausalLM.from_config(small)
    problems = list(spread_problems(model, degree, copies=4))
    assert len(problems) == (problem is not None)
    assert problem is None or problem in problems[0]


def small_step(family: str, *more: str) -> None:
    """Simulate a micro-batch of a rank of two that spread a small model's experts.

    Before it the model goes forward twice for its attention, once for its head and to evaluate.
    """
    model_config = AutoConfig.for_model(family, **FAMILY_SMALL | FAMILIES[family])
    config = configured("parallel.expert=2", "data.max_length=64", *more)
    with fake_world(Layout.of(config, 2), 2) as world:
        simulate(Step(config, ReshardPolicy(False, False), world), model_config)


@pytest.mark.parametrize(("family", "layers"), [("glm4_moe", 1), ("qwen3_moe", 2)])
def test_a_layer_that_is_computed_again_does_not_bring_outputs_back(family, layers, monkeypatch):
    """So tokens and their weights travel once more, and outputs do not. Shared experts of glm4_moe
    stand behind the exchange, and would make it wait for the outputs."""
    sent: Counter[int] = Counter()
    original = Exchange.begin

    def send(self: Any, to: Any, of: Any, rows: torch.Tensor) -> Any:
        sent[rows.shape[-1]] += 1
        return original(self, to, of, rows)

    monkeypatch.setattr(Exchange, "begin", send)
    for mode, again in (("none", 0), ("full", 1)):
        sent.clear()
        small_step(family, f"model.activation_checkpointing={mode}")
        # To the experts and back, and the gradients of both; weights, and their gradients.
        rows, weights = 4 * 2 + 4 + again, 4 * 1 + 2 + again
        assert sent == {32: rows * layers, 1: weights * layers}


def test_shared_experts_run_while_tokens_travel(monkeypatch):
    events: list[str] = []
    ran: set[SharedExperts] = set()
    send, run_ahead = Exchange.begin, SharedExperts.run_ahead

    def told_send(self: Any, to: Any, of: Any, rows: torch.Tensor) -> Any:
        what = "weights" if rows.shape[-1] == 1 else "rows"
        arrive = send(self, to, of, rows)
        events.append(f"send {what}")
        return lambda: (events.append(f"{what} arrive"), arrive())[1]

    def told_run(self: Any, tokens: torch.Tensor) -> None:
        events.append("shared")
        ran.add(self)
        run_ahead(self, tokens)

    monkeypatch.setattr(Exchange, "begin", told_send)
    monkeypatch.setattr(SharedExperts, "run_ahead", told_run)
    small_step("glm4_moe", "model.activation_checkpointing=full")
    weights, rows = (["send weights", "weights arrive"], ["send rows", "rows arrive"])
    around = [*weights, "send rows", "shared", "rows arrive"]
    forward = [*around, *rows]
    # The gradients of outputs, the layer that is computed again, and the gradients of its inputs.
    assert events == [*forward * 5, *rows, *around, *rows, *weights]
    assert ran and all(shared._ahead is None for shared in ran), "nothing is held after the step"


def test_shared_experts_run_ahead_where_they_come_behind_and_have_the_same_input():
    calls: list[torch.Size] = []

    class Plain(torch.nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            calls.append(hidden.shape)
            return hidden + 1

    hidden, others = torch.zeros(2, 3, 4), torch.ones(2, 3, 4)
    module = Plain()
    shared = SharedExperts(module)
    shared.run_ahead(hidden.view(-1, 4))
    assert torch.equal(module(hidden), others) and calls == [(6, 4)]
    shared.run_ahead(hidden.view(-1, 4))
    shared.forget()
    assert torch.equal(module(others), others + 1) and calls[1:] == [(6, 4), (2, 3, 4)]

    for given in (hidden, others):  # the module first: never ahead
        calls.clear()
        assert torch.equal(module(given), given + 1)
        shared.run_ahead(given.view(-1, 4))
        assert calls == [(2, 3, 4)]

    def with_another_input(given: torch.Tensor) -> None:
        """From then on they never run ahead."""
        assert torch.equal(module(given), given + 1)
        calls.clear()
        shared.run_ahead(hidden.view(-1, 4))
        assert not calls

    shared.run_ahead(hidden.view(-1, 4))
    with_another_input(others)
    shared = SharedExperts(module := Plain())
    shared.run_ahead(hidden.view(-1, 4))
    with_another_input(hidden.add_(1))
    shared = SharedExperts(module := Plain())
    shared.run_ahead(hidden[0])
    with_another_input(hidden[1])
