"""The gradient norm over ranks, clipping by it, and the tensors that are not finite."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from helpers.commands import finish
from helpers.ranks import config_for, on_ranks
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM

from shardtune.config import Config
from shardtune.distributed.join import join_world
from shardtune.model.build import build_model
from shardtune.training.optim import (
    build_optimizer,
    clip_gradients,
    first_non_finite,
    squared_gradients,
)
from shardtune.training.states.replica_shards import OwnedParameters


def measure_norm(config: Config, gradients: Path, out: Path) -> None:
    """Give the sharded model these gradients; clip by two norms; make two values not finite."""
    world = join_world(config)
    model = build_model(config, AutoConfig.from_pretrained(config.model.path), world)
    given = load_file(gradients)
    owned = OwnedParameters(model, world)
    parameters, optimizer = owned.by_name.values(), build_optimizer(owned, config)
    for name, parameter in owned.by_name.items():
        parameter.grad = distribute_tensor(given[name], parameter.device_mesh, parameter.placements)
    norm = world.all_gather_scalars(squared_gradients(parameters)).sum().sqrt().item()
    seen = [norm]
    for max_norm in (1.0, 2 * norm):
        clip_gradients(optimizer, max_norm, norm)
        seen.append(optimizer.gradient_factor)
    if world.rank == 1:
        owned.by_name["model.norm.weight"].grad.to_local()[3] = math.inf
        model.get_parameter("lm_head.weight").detach().to_local()[0, 3] = math.nan
    seen.append(first_non_finite(model, owned.by_name))
    out.with_suffix(f".{world.rank}").write_text(json.dumps(seen), encoding="utf-8")


def test_the_norm_over_ranks_is_that_of_one_process(models, tmp_path):
    """Two replicas divide the gradients of three shards each, unevenly."""
    plain = AutoModelForCausalLM.from_pretrained(models["llama"])
    torch.manual_seed(1)
    for parameter in plain.parameters():
        parameter.grad = torch.randn_like(parameter)
    save_file(
        {name: p.grad for name, p in plain.named_parameters()}, tmp_path / "gradients.safetensors"
    )
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), math.inf).item()
    finish(
        on_ranks(
            6,
            measure_norm,
            config_for(models["llama"], tmp_path, "parallel.replicate=2"),
            tmp_path / "gradients.safetensors",
            tmp_path / "seen",
            cwd=tmp_path,
        )
    )
    for rank in range(6):
        norm, clipped, unchanged, first = json.loads(
            (tmp_path / f"seen.{rank}").read_text(encoding="utf-8")
        )
        assert norm == pytest.approx(expected, rel=1e-6)
        assert clipped * norm == pytest.approx(1.0, rel=1e-5) and unchanged == 1
        assert first == ([False, 0, "the weight model.embed_tokens.weight"] if rank == 1 else None)
