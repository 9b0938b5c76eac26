"""The sharded model against plain transformers: what it loads, what it draws, what it holds."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.built import build_model
from helpers.commands import finish
from helpers.ranks import as_configured, config_for, on_ranks
from helpers.usage import Usage
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from shardtune.config import Config
from shardtune.distributed.join import join_world
from shardtune.distributed.tensors import to_local

Tensors = dict[str, torch.Tensor]


def every_tensor(model: Any) -> Tensors:
    """Parameters under all of their names, and buffers, those that no file holds included; none
    shares storage."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)
        .detach()
        .clone()
        .contiguous()
        for name, tensor in named
    }


def report_models(configs: dict[str, Config], out: Path) -> None:
    """On a rank: build each model, and write its whole tensors and what is left of it on this
    rank."""
    world = join_world(next(iter(configs.values())))
    for name, config in configs.items():
        source = AutoConfig.from_pretrained(config.model.path)
        model = build_model(config, source, as_configured(world, config))
        parameters = list(model.parameters())
        report = {
            "tied": model.get_output_embeddings().weight is model.get_input_embeddings().weight,
            "sharded": all(isinstance(parameter, DTensor) for parameter in parameters),
            "held": sum(to_local(parameter).numel() for parameter in parameters),
            "empty_experts": sum(p.dim() == 3 and not to_local(p).numel() for p in parameters),
            "training": model.training,
            "use_cache": model.config.use_cache,
        }
        (out / f"{name}.{world.rank}.json").write_text(json.dumps(report), encoding="utf-8")
        save_file(every_tensor(model), out / f"{name}.{world.rank}.safetensors")


def built(
    configs: dict[str, Config], ranks: int, folder: Path
) -> dict[str, list[tuple[Tensors, dict[str, Any]]]]:
    """Of each configuration, what `report_models` wrote on each rank."""
    folder.mkdir()
    finish(on_ranks(ranks, report_models, configs, folder, cwd=folder))
    return {
        name: [
            (
                load_file(folder / f"{name}.{rank}.safetensors"),
                json.loads((folder / f"{name}.{rank}.json").read_text(encoding="utf-8")),
            )
            for rank in range(ranks)
        ]
        for name in configs
    }


def assert_identical(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.fixture(scope="module")
def sources(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The models, and `narrow`: the mixture of experts in files of bfloat16."""
    narrow = tmp_path_factory.mktemp("narrow")
    AutoModelForCausalLM.from_pretrained(models["glm"], dtype=torch.bfloat16).save_pretrained(
        narrow
    )
    stored = load_file(narrow / "model.safetensors")
    assert stored["model.layers.1.mlp.experts.5.gate_proj.weight"].dtype == torch.bfloat16
    return {**models, "narrow": narrow}


@pytest.mark.parametrize("ranks", [1, 4])
def test_loading_gives_every_bit_of_plain_from_pretrained(ranks, sources, tmp_path):
    """Alone, a rank would keep weights plain that it computes with as they are."""
    other = "model.compute_dtype=bfloat16"
    configs = {name: config_for(path, tmp_path, other) for name, path in sources.items()}
    for name, reports in built(configs, ranks, tmp_path / "out").items():
        plain = AutoModelForCausalLM.from_pretrained(sources[name], dtype=torch.float32)
        total = sum(parameter.numel() for parameter in plain.parameters())
        for found, report in reports:
            assert_identical(found, every_tensor(plain))
            assert report["tied"] == (name == "llama")
            assert report["sharded"]
            assert report["training"]
            assert not report["use_cache"]
            assert not report["empty_experts"]
            assert report["held"] < 1.15 * total / ranks
        assert sum(report["held"] for _, report in reports) == total


def test_random_weights_are_the_same_on_any_ranks_and_drawn_as_the_architecture_draws_them(
    models, tmp_path
):
    configs = {
        f"{name}{seed}": config_for(models[name], tmp_path, "model.init=random", f"run.seed={seed}")
        for name in ("llama", "glm")
        for seed in (1, 2)
    }
    alone = {name: reports[0][0] for name, reports in built(configs, 1, tmp_path / "1").items()}
    for ranks in 3, 4:
        for name, reports in built(configs, ranks, tmp_path / str(ranks)).items():
            for found, report in reports:
                assert_identical(found, alone[name])
                assert report["tied"] == name.startswith("llama")
    for family in "llama", "glm":
        torch.manual_seed(1)
        plain = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(models[family]), dtype=torch.float32
        )
        one, other = alone[f"{family}1"], alone[f"{family}2"]
        expected = every_tensor(plain)
        assert one.keys() == expected.keys()
        is_drawn = {
            name: bool(tensor.std() > 0)
            and name in dict(plain.named_parameters(remove_duplicate=False))
            for name, tensor in expected.items()
        }
        for name, tensor in expected.items():
            if is_drawn[name]:
                assert not torch.equal(one[name], other[name]), name
                # Standard errors of n numbers: std / sqrt(n) for the mean, 1 / sqrt(n) for two std.
                error = 5 / tensor.numel() ** 0.5
                assert one[name].std() == pytest.approx(tensor.std().item(), rel=error), name
                assert one[name].mean().abs() < error * tensor.std(), name
            else:
                assert torch.equal(one[name], tensor), name
                assert torch.equal(other[name], tensor), name
        assert sum(is_drawn.values()) > 10
        assert not torch.equal(
            *(one[f"model.layers.{layer}.self_attn.q_proj.weight"] for layer in (0, 1))
        )
        assert one["model.rotary_emb.inv_freq"].std() > 0


def report_memory(configs: list[Config], out: Path) -> None:
    """On a rank: the most memory that building each model took, the first to warm up."""
    world = join_world(configs[0])
    sources = [AutoConfig.from_pretrained(config.model.path) for config in configs]
    grown, kept = [], []
    for config, source in zip(configs, sources, strict=True):
        with Usage() as usage:
            kept.append(build_model(config, source, world))
        grown.append(usage.growth)
    (out / f"{world.rank}.json").write_text(json.dumps(grown), encoding="utf-8")


def test_no_rank_holds_the_whole_model_while_building(models, tmp_path):
    shape = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 12}
    shape |= {"num_attention_heads": 8, "vocab_size": 4001, "tie_word_embeddings": True}
    model = LlamaForCausalLM(LlamaConfig(**shape))
    total_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    # In bfloat16, because tensors that need no cast stay in the file until somebody writes to them.
    model.bfloat16().save_pretrained(tmp_path / "large")
    configs = [
        config_for(models["llama"], tmp_path),
        config_for(tmp_path / "large", tmp_path),
        config_for(tmp_path / "large", tmp_path, "model.init=random"),
    ]
    finish(on_ranks(4, report_memory, configs, tmp_path, cwd=tmp_path))
    for rank in range(4):
        _, loaded, drawn = json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8"))
        assert 0.2 * total_bytes < loaded < 0.5 * total_bytes
        assert 0.2 * total_bytes < drawn < 0.5 * total_bytes
