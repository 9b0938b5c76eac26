"""The optimizer's groups, the schedule's values and the norm of a large gradient."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from helpers.configs import load
from torch import nn
from torch._inductor import config as inductor
from transformers import AutoModelForCausalLM

from shardtune.checkpoint.resume_rules import log_kinds
from shardtune.config import OptimizerConfig, SchedulerConfig
from shardtune.distributed.layout import Layout
from shardtune.errors import RunFailed
from shardtune.optimizers.rules import RULES, AdamW8bit, FusedAdamW, find_rule
from shardtune.training.optim import (
    build_optimizer,
    clip_gradients,
    compile_update,
    first_non_finite,
    learning_rate,
    set_learning_rate,
    squared_gradients,
)
from shardtune.training.states.replica_shards import OwnedParameters
from shardtune.training.states.sharded_optimizer import ShardedOptimizer

# 12 steps, of which ceil(0.3 x 12) = 4 warm up, then 8 fall from 8e-4 to a tenth of that.
HALF_COSINE = [(1 + math.cos(math.pi * eighths / 8)) / 2 for eighths in range(1, 9)]
FALLING = {
    "constant": [8e-4] * 8,
    "linear": [7.1e-4, 6.2e-4, 5.3e-4, 4.4e-4, 3.5e-4, 2.6e-4, 1.7e-4, 8e-5],
    "cosine": [8e-5 + 7.2e-4 * share for share in HALF_COSINE],
}


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_the_rate_warms_up_and_falls_to_its_minimum_at_the_last_step(name):
    config = SchedulerConfig(name=name, warmup_ratio=0.3, min_lr_ratio=0.1)
    rates = [learning_rate(step, 12, 8e-4, config) for step in range(1, 13)]
    assert rates == pytest.approx([2e-4, 4e-4, 6e-4, 8e-4, *FALLING[name]], rel=1e-12)


@pytest.mark.parametrize(
    ("name", "warmup", "total", "first", "last"),
    [
        ("constant", 0.0, 1, 1.0, 1.0),
        ("cosine", 0.0, 1, 0.1, 0.1),
        ("linear", 0.0, 1, 0.1, 0.1),
        ("cosine", 1.0, 4, 0.25, 1.0),
        ("linear", 0.03, 1, 1.0, 1.0),
    ],
)
def test_the_rate_of_a_run_of_few_steps_still_ends_at_its_minimum(name, warmup, total, first, last):
    config = SchedulerConfig(name=name, warmup_ratio=warmup, min_lr_ratio=0.1)
    assert learning_rate(1, total, 1.0, config) == pytest.approx(first)
    assert learning_rate(total, total, 1.0, config) == pytest.approx(last)


def test_each_name_that_a_configuration_may_have_is_an_optimizer_of_each_dtype():
    names = get_args(OptimizerConfig.model_fields["name"].annotation)
    assert {rule.name for rule in RULES} == set(names)
    found = [find_rule(name, dtype) for name in names for dtype in ("float32", "bfloat16")]
    assert set(found) == set(RULES)


def test_decay_reaches_matrices_and_neither_norms_nor_biases(models, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(models["qwen3"])
    given = ["lr=1e-3", "betas=[0.5,0.75]", "eps=1e-3", "weight_decay=0.2"]
    config = load(tmp_path, *(f"optimizer.{each}" for each in given))
    alone: Any = SimpleNamespace(layout=Layout.of(config))
    optimizer = build_optimizer(OwnedParameters(model, alone), config)
    names = {p: name for name, p in model.named_parameters()}
    matrices, norms = (
        {names[p] for p in group["params"]}
        for group in sorted(optimizer.param_groups, key=lambda group: -group["weight_decay"])
    )
    assert norms == {name for name in names.values() if "norm" in name}
    assert matrices | norms == set(names.values()) and not matrices & norms
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0]
    assert {(group["betas"], group["eps"], group["lr"]) for group in optimizer.param_groups} == {
        ((0.5, 0.75), 1e-3, 1e-3)
    }
    set_learning_rate(optimizer, 0.125)
    assert {group["lr"] for group in optimizer.param_groups} == {0.125}


def test_the_norm_of_a_large_gradient_is_exact():
    """The float32 norm of PyTorch on a CPU is off by 0.2% here."""
    large = nn.Linear(5000, 6000, bias=False)
    large.weight.grad = 1 + torch.rand(6000, 5000)
    exact = sum(row.double().square().sum().item() for row in large.weight.grad)
    assert squared_gradients(large.parameters()).item() == pytest.approx(exact, rel=1e-12)


def test_a_weight_that_is_not_finite_is_named_before_all_gradients():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].weight.grad = torch.full((2, 2), float("nan"))
    parameters = dict(model.named_parameters())
    assert first_non_finite(model, parameters)[2] == "the gradient of 0.weight"
    with torch.no_grad():
        model[1].bias[0] = float("inf")
    assert first_non_finite(model, parameters)[2] == "the weight 1.bias"


def weights_and_optimizer(rule: Any, dtype: torch.dtype) -> tuple[list[torch.Tensor], Any]:
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(8, 300)), nn.Parameter(torch.randn(300))]
    given: Any = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    for weight in weights:
        weight.grad_dtype = dtype
        weight.grad = torch.randn(weight.shape).to(dtype)
    if rule is torch.optim.AdamW:
        return weights, rule(weights, fused=True, **given)
    group = {"params": [(f"w{i}", weight) for i, weight in enumerate(weights)]}
    return weights, ShardedOptimizer([group], rule, seed=1, **given)


@pytest.mark.parametrize(
    ("rule", "oracle"), [(FusedAdamW, torch.optim.AdamW), (AdamW8bit, AdamW8bit)]
)
@pytest.mark.parametrize("share", [0.01, 0.5, 0.7, 0.99, 20.0])
def test_a_clipped_update_is_that_of_gradients_which_pytorch_clips(rule, oracle, share):
    """To the bit; moments of 8 bits and the next step see the clipped gradients alone."""
    expected, plain = weights_and_optimizer(oracle, torch.float32)
    weights, optimizer = weights_and_optimizer(rule, torch.float32)
    for _ in range(2):
        norm = math.sqrt(squared_gradients(weights).item())
        max_norm = share * norm
        torch.nn.utils.clip_grads_with_norm_(expected, max_norm, torch.tensor(norm))
        plain.step()
        clip_gradients(optimizer, max_norm, norm)
        optimizer.step()
        assert all(map(torch.equal, weights, expected))
        for before, after in zip(expected, weights, strict=True):
            before.grad = torch.randn(before.shape)
            after.grad = before.grad.clone()


def test_gradients_of_bfloat16_are_clipped_in_float32_and_not_rewritten():
    """Written back, each would be rounded once more."""
    weights, optimizer = weights_and_optimizer(AdamW8bit, torch.bfloat16)
    exact, in_float32 = weights_and_optimizer(AdamW8bit, torch.float32)
    for weight, other in zip(weights, exact, strict=True):
        other.grad = weight.grad.float()
    before = [weight.grad.clone() for weight in weights]
    norm = math.sqrt(squared_gradients(weights).item())
    clip_gradients(optimizer, 0.3, norm)
    optimizer.step()
    torch.nn.utils.clip_grads_with_norm_(exact, 0.3, torch.tensor(norm))
    in_float32.step()
    assert all(map(torch.equal, weights, exact))
    assert all(torch.equal(weight.grad, old) for weight, old in zip(weights, before, strict=True))


@pytest.mark.full
def test_a_compile_that_was_asked_for_and_fails_names_the_optimizer(tmp_path):
    _, optimizer = weights_and_optimizer(AdamW8bit, torch.float32)
    alone: Any = SimpleNamespace(device=torch.device("cpu"), all_gather_json=lambda value: [value])
    compile_update(optimizer, load(tmp_path), alone)
    assert not optimizer.is_compiled
    config = load(tmp_path, "model.compile=true")
    with (
        inductor.patch({"cpp.cxx": ("/nowhere/c++",), "force_disable_caches": True}),
        pytest.raises(RunFailed, match=r"^model\.compile=true: the optimizer cannot be .+ - "),
    ):
        compile_update(optimizer, config, alone)
    assert not optimizer.is_compiled


def test_a_resume_names_all_that_it_computes_in_another_way_in_a_line(caplog):
    """An older checkpoint knows the update alone; one of a CPU, whose bits do not change, nothing.

    What a run has not used is not compared.
    """
    update = "the update of the weights"
    cases = [
        ({"update": "eager"}, {update: "compiled", "the loss": "eager"}),
        ({"update": "eager"}, {update: "eager"}),
        ({}, {update: "compiled"}),
        ({"kinds": {}}, {update: "compiled"}),
        ({"kinds": {update: "eager", "layers": "eager"}}, {}),
        (
            {"kinds": {update: "eager", "the loss": "compiled", "layers": "compiled"}},
            {update: "eager", "the loss": "eager", "layers": "eager"},
        ),
    ]
    with caplog.at_level(logging.INFO, "shardtune"):
        for state, kinds in cases:
            resumed: Any = SimpleNamespace(name="step-7", state=state)
            log_kinds(resumed, kinds)
    older, newer = caplog.messages
    assert "step-7" in older and f"{update} was eager, is compiled" in older
    assert "the loss was compiled, is eager, layers was compiled, is eager" in newer
    assert "loss" not in older and update not in newer
