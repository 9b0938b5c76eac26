"""Loading reads each byte once per copy of the model, into little more memory than it keeps."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.built import build_model
from helpers.commands import finish
from helpers.packing_families import build
from helpers.ranks import config_for, on_ranks
from helpers.usage import Usage
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from shardtune.config import Config
from shardtune.distributed.join import join_world
from shardtune.distributed.tensors import to_local


def save_glm(folder: Path, shape: dict[str, int]) -> Path:
    """Save random weights in files of bfloat16, one tensor for each expert."""
    width = shape["hidden_size"]
    more = {"intermediate_size": width, "moe_intermediate_size": width // 2, "head_dim": width // 8}
    more |= {"num_attention_heads": 8, "num_key_value_heads": 8, "tie_word_embeddings": True}
    with torch.device("meta"):
        model = build("glm4_moe", **shape, **more).bfloat16()
    model.to_empty(device="cpu").tie_weights()
    pattern = torch.randn(1 << 20)
    for tensor in [*model.parameters(), *model.buffers()]:
        values = pattern[torch.randint(len(pattern) - 1, ()) :]
        nn.init.zeros_(tensor)
        flat = tensor.detach().view(-1)
        for begin in range(0, len(flat), len(values)):
            part = flat[begin : begin + len(values)]
            part.copy_(values[: len(part)])
    model.save_pretrained(folder, max_shard_size="200MB")
    return folder


def load(config: Config, tiny: Config, out: Path, is_compared: bool) -> None:
    """On a rank: build the model, and report what that took.

    A tiny one before it imports the modules that both need.
    """
    world = join_world(config)
    build_model(tiny, AutoConfig.from_pretrained(tiny.model.path), world)
    model_config = AutoConfig.from_pretrained(config.model.path)
    torch.distributed.barrier()
    with Usage() as usage:
        model = build_model(config, model_config, world)
    share = sum(to_local(p).nbytes for p in model.parameters())
    report = {"read": usage.bytes_read, "growth": usage.growth, "share": share}
    (out / f"{world.rank}.json").write_text(json.dumps(report), encoding="utf-8")
    torch.distributed.barrier()
    if is_compared:
        require_loaded(model, config.model.path)


def require_loaded(model: Any, path: str) -> None:
    """Expect every parameter and buffer of transformers."""
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    expected = dict(chain(plain.named_parameters(), plain.named_buffers()))
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(whole, expected[name]), name


def compare_loaded(config: Config) -> None:
    world = join_world(config)
    loaded = build_model(config, AutoConfig.from_pretrained(config.model.path), world)
    require_loaded(loaded, config.model.path)


@pytest.mark.parametrize(
    "family",
    [
        "olmo_hybrid",  # stores three convolutions that are one in the model
        "falcon_h1",  # fills the buffers of other modules
    ],
)
def test_every_tensor_is_that_of_transformers(family, tmp_path):
    build(family).save_pretrained(tmp_path / "model")
    config = config_for(tmp_path / "model", tmp_path, "model.compute_dtype=float32")
    finish(on_ranks(2, compare_loaded, config, cwd=tmp_path))


SMALL = {"vocab_size": 40_000, "hidden_size": 512, "num_hidden_layers": 2, "n_routed_experts": 6}
LARGE = {"vocab_size": 32_000, "hidden_size": 2048, "num_hidden_layers": 5, "n_routed_experts": 32}


@pytest.mark.parametrize(
    ("shape", "ranks", "replicate", "expert"),
    [
        (SMALL, 4, 1, 1),  # each rank holds columns of every expert
        (SMALL, 4, 2, 2),
        pytest.param(LARGE, 8, 1, 2, marks=pytest.mark.full),
    ],
)
def test_each_byte_is_read_once_per_copy_into_memory_that_is_kept(
    shape, ranks, replicate, expert, models, tmp_path
):
    model = save_glm(tmp_path / "model", shape)
    stored = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    parallel = [f"parallel.replicate={replicate}", f"parallel.expert={expert}"]
    config = config_for(model, tmp_path, *parallel)
    tiny = config_for(models["glm"], tmp_path, *parallel)
    finish(on_ranks(ranks, load, config, tiny, tmp_path, shape is SMALL, cwd=tmp_path))
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    assert sum(report["read"] for report in reports) < 1.05 * replicate * stored
    allowed = 40e6 if shape is SMALL else 300e6
    for report in reports:
        assert report["growth"] < report["share"] + allowed
