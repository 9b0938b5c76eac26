"""Tokens per expert are those that plain transformers routes, whatever the mesh."""

import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.commands import read_metrics
from helpers.exact import APART, FULL, SELECTIVE, Mesh
from helpers.plain_training import encode, on_uneven_chats, sharpen, uneven_chats, with_weights
from helpers.ranks import train_each, world_of
from transformers import AutoModelForCausalLM

from shardtune.log import setup_logging
from shardtune.training.observers.expert_balance import ExpertBalance, balance
from shardtune.training.observers.metrics import StepEnded

# One rank; spread experts, layers computed again; sharded experts, layers computed again in part.
MESHES = [(Mesh(1), []), (Mesh(2, 2), [FULL]), (Mesh(2), [APART, SELECTIVE])]
EVERY_OTHER = ["logging.every_steps=2", "export.final=false"]
LAYERS = ("model.layers.1.mlp.experts", "model.layers.2.mlp.experts")


@torch.no_grad()
def routed(path: Path, records: list[Any]) -> dict[str, list[int]]:
    """Count the tokens that plain transformers sends to each of six experts."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    counts = {name: [0] * 6 for name in LAYERS}

    def count(name: str) -> Any:
        def hook(module: Any, inputs: Any) -> None:
            for expert in inputs[1].flatten().tolist():
                counts[name][expert] += 1

        return hook

    for name in LAYERS:
        model.get_submodule(name).register_forward_pre_hook(count(name))
    for ids, _ in records:
        model(input_ids=torch.tensor([ids]))
    return counts


@pytest.mark.full
def test_counts_are_those_of_plain_routing_with_and_without_spread_experts(
    models, tokenizer, tmp_path
):
    """Layers that are computed again and evaluations count nothing; a line is logged and metrics
    are written every second step."""

    def never_choose_the_first(model: Any) -> None:
        sharpen(model)
        for layer in model.model.layers[1:]:
            layer.mlp.gate.e_score_correction_bias[0] = -9

    path = with_weights(models["glm"], tmp_path / "model", never_choose_the_first)
    given = [f"data.eval={tmp_path}/train.jsonl", "eval.every_steps=1", "train.epochs=4"]
    given += ["optimizer.lr=0", *EVERY_OTHER]
    runs = []
    for number, (mesh, more) in enumerate(MESHES):
        own = [*given, *mesh.assignments(*more)]
        runs.append((mesh.ranks, on_uneven_chats(path, tmp_path, *own, run=f"run{number}")))
    train_each(runs, tmp_path)
    counts = routed(path, [encode(tokenizer, record) for record in uneven_chats()])
    assert all(tokens[0] == 0 for tokens in counts.values())
    for number, (mesh, _) in enumerate(MESHES):
        steps = read_metrics(tmp_path / f"run{number}", "experts")
        assert [step["step"] for step in steps] == [2, 4]
        for step in steps:
            assert [layer["layer"] for layer in step["layers"]] == list(LAYERS)
            for layer in step["layers"]:
                tokens = counts[layer["layer"]]
                # A score on the edge may fall to another expert in other arithmetic.
                assert np.abs(np.subtract(layer["tokens"], tokens)).sum() <= 0.002 * sum(tokens)
                share = [n / sum(layer["tokens"]) for n in layer["tokens"] if n]
                entropy = -sum(p * math.log(p) for p in share) / math.log(6)
                assert layer["entropy"] == pytest.approx(entropy)
                assert layer["without_tokens"] == layer["tokens"].count(0) == 1
                assert ("rank_imbalance" in layer) == (mesh.expert == 2)
                if "rank_imbalance" in layer:
                    ranks = sum(layer["tokens"][:3]), sum(layer["tokens"][3:])
                    assert layer["rank_imbalance"] == pytest.approx(2 * max(ranks) / sum(ranks))
        said = (tmp_path / f"run{number}.out").read_text(encoding="utf-8")
        lines = [line for line in said.splitlines() if line.startswith("Router entropy ")]
        assert len(lines) == 2
        assert all(" | 2 of 12 experts without tokens" in line for line in lines)
        assert not any(re.search("Step.*Loss", line) for line in lines)


def test_imbalance_is_that_of_the_worst_group():
    """Two groups of two ranks with two experts each."""
    values = balance("experts", np.array([[1, 1, 1, 1], [4, 2, 0, 2]]), degree=2)
    assert values["tokens"] == [5, 3, 1, 3]
    assert values["rank_imbalance"] == pytest.approx(6 / 4)


def test_a_dense_model_has_no_counts_of_experts_and_they_are_on_its_device():
    """They are gathered with the other numbers of a step; here the device is `meta`."""
    world = replace(world_of(0, 1, dist.HashStore()), device=torch.device("meta"))
    dense: Any = torch.nn.Linear(1, 1)
    counts = ExpertBalance(dense, dense, cast(Any, None), world).take_counts()
    assert counts.device.type == "meta" and len(counts) == 0 and counts.dtype == torch.float64


def ended(number: int, expert_tokens: np.ndarray) -> Any:
    """A step that is not due, with these tokens."""
    stats = SimpleNamespace(expert_tokens=expert_tokens)
    return StepEnded(cast(Any, SimpleNamespace(number=number)), cast(Any, stats), 0, 0, {}, False)


def test_an_expert_that_starves_is_named_once(capsys):
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = torch.nn.Parameter(torch.zeros(3, 1, 1))

        def forward(self, tokens: Any, top_k_index: Any, top_k_weights: Any) -> Any: ...

    world = world_of(0, 1, dist.HashStore())
    model: Any = torch.nn.ModuleDict({"experts": Layer()})
    experts = ExpertBalance(model, model, cast(Any, None), world)
    setup_logging(True, True)
    for step in range(1, 301):
        tokens = [step % 2, 0, int(step in (50, 250))]
        experts.step_ended(ended(step, np.array([tokens])))
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("WARNING: 1 experts have had no tokens for 100 steps, first expert 1 ")
    assert "expert 2 of experts" in second
