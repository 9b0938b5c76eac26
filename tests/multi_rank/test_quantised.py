"""Quantised models: loaded as transformers dequantises them, and exported in bfloat16."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.built import build_model
from helpers.chats import chats, write_jsonl
from helpers.commands import finish
from helpers.exact import BFLOAT16
from helpers.multimodal import save_seeing_model
from helpers.pretended import needs_compiler, train_on_gpus
from helpers.quantised_models import RAGGED, quantise_in_fp8, save_deepseek_v3, save_gpt_oss, spread
from helpers.ranks import config_for, on_ranks, train, type_command
from helpers.small_runs import SETTINGS, assert_same_tensors, digests, tensors_of
from helpers.usage import Usage
from peft import PeftModel
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from shardtune.config import Config
from shardtune.distributed.join import join_world
from shardtune.distributed.tensors import to_local
from shardtune.model.source.files import read_model_config

GIVEN = (*SETTINGS, "train.max_steps=2", "data.packing=false")
STILL = (*GIVEN, "optimizer.lr=0")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("quantised")
    return {
        "fp8": save_deepseek_v3(root / "fp8", tokenizer),
        "mxfp4": save_gpt_oss(root / "mxfp4", tokenizer),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "train.jsonl", chats(6))
    return tmp_path


def load(config: Config) -> None:
    """On a rank: build the model, and compare it with what transformers makes of the files."""
    world = join_world(config)
    model = build_model(config, read_model_config(config.model), world)
    frozen = [p for p in model.parameters() if not p.requires_grad]
    dtype = (frozen or list(model.parameters()))[0].dtype
    plain = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=dtype)
    expected = dict(plain.named_parameters())
    loaded = {name: p for name, p in model.named_parameters() if name in expected}
    for name, parameter in loaded.items():
        is_sharded = isinstance(parameter, DTensor)  # alone, a rank keeps float32 weights plain
        assert (is_sharded or world.layout.stage_ranks == 1) and parameter.dtype == dtype
        whole = parameter.full_tensor() if is_sharded else parameter
        assert torch.equal(whole, expected[name]), name
    assert world.layout.stages > 1 or loaded.keys() == expected.keys()


LORA = ("lora.rank=2", "lora.targets=all-linear")


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "ranks", "assignments"),
    [
        ("mxfp4", 1, (BFLOAT16,)),
        ("fp8", 3, ()),
        ("mxfp4", 3, ()),
        ("fp8", 4, ("parallel.expert=2",)),
        ("mxfp4", 4, ("parallel.expert=2",)),
        ("fp8", 2, ("parallel.stages=2",)),
        ("mxfp4", 2, (*LORA, "model.compute_dtype=bfloat16")),
    ],
)
def test_each_rank_has_its_slices_of_what_transformers_dequantises(
    name, ranks, assignments, sources, folder
):
    config = config_for(sources[name], folder, *assignments)
    finish(on_ranks(ranks, load, config, cwd=folder))


@pytest.mark.parametrize("name", ["fp8", "mxfp4"])
def test_a_run_that_learns_nothing_exports_what_transformers_dequantises(name, sources, folder):
    source, out = sources[name], folder / "runs/config/model"
    said = finish(train(2, *STILL, f"model.path={source}", cwd=folder))
    assert said.count("Source: quantised") == 1

    exported = AutoModelForCausalLM.from_pretrained(out)
    assert exported.dtype == torch.bfloat16 and not hasattr(exported.config, "quantization_config")
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).state_dict()
    assert plain.keys() == exported.state_dict().keys()
    for key, tensor in exported.state_dict().items():
        assert torch.equal(tensor, plain[key]), key

    before, after = tensors_of(source), tensors_of(out)
    if name == "fp8":
        shapes = {k: t.shape for k, t in before.items() if not k.endswith("_scale_inv")}
        assert {key: tensor.shape for key, tensor in after.items()} == shapes
    else:
        assert after["model.layers.0.mlp.experts.gate_up_proj"].shape == (4, 32, 64)
    for key, tensor in after.items():
        stored = before.get(key, tensor)
        expected = torch.bfloat16 if stored.dtype == torch.float8_e4m3fn else stored.dtype
        assert tensor.dtype == expected, key
    assert "quantization_config" not in (out / "config.json").read_text(encoding="utf-8")


@pytest.mark.full
@needs_compiler
@pytest.mark.parametrize("name", ["fp8", "mxfp4"])
def test_pretended_gpus_have_the_same_weights(name, sources, folder):
    settings = (*STILL, f"model.path={sources[name]}")
    finish(train(2, *settings, "run.dir=cpu", cwd=folder))
    train_on_gpus(2, *settings, "run.dir=gpu", cwd=folder)
    gpu, cpu = (digests(folder / device / "model") for device in ("gpu", "cpu"))
    assert gpu["model.safetensors"] == cpu["model.safetensors"]


@pytest.mark.full
def test_layers_that_training_does_not_load_are_dequantised_too(tokenizer, folder):
    source = save_deepseek_v3(folder / "source", tokenizer, RAGGED, with_mtp=True)
    finish(train(2, *STILL, f"model.path={source}", cwd=folder))
    require_dequantised(source, folder / "runs/config/model")


def require_dequantised(source: Path, exported: Path) -> None:
    """Expect the products of values and scales, and else the tensors of the source."""
    before = tensors_of(source)
    for key, tensor in tensors_of(exported).items():
        expected = before[key]
        if f"{key}_scale_inv" in before:
            factors = spread(before[f"{key}_scale_inv"], tensor.shape, RAGGED)
            expected = (expected.float() * factors).bfloat16()
        assert tensor.dtype == expected.dtype and torch.equal(tensor, expected), key


@pytest.mark.full
@pytest.mark.parametrize("name", ["fp8"])
def test_adapters_on_a_quantised_model_resume_and_are_merged_with_its_weights(
    name, sources, folder
):
    given = [*GIVEN, f"model.path={sources[name]}", "lora.rank=2", "scheduler.name=constant"]
    given += ["model.compute_dtype=bfloat16", "optimizer.lr=1e-2", "checkpoint.every_steps=1"]
    finish(train(2, *given, "train.max_steps=1", cwd=folder))
    said = finish(train(2, *given, "train.max_steps=2", cwd=folder))
    assert "Resumed from checkpoint_0000001" in said
    run_dir = folder / "runs/config"
    adapter = json.loads((run_dir / "adapter/adapter_config.json").read_text(encoding="utf-8"))
    assert adapter["base_model_name_or_path"] == str(sources[name])

    plain = AutoModelForCausalLM.from_pretrained(sources[name], dtype=torch.bfloat16).float()
    merged = PeftModel.from_pretrained(plain, run_dir / "adapter").merge_and_unload().state_dict()
    exported = AutoModelForCausalLM.from_pretrained(run_dir / "model").state_dict()
    assert exported.keys() == merged.keys()
    for key, tensor in exported.items():
        # The sums are equal to float32's rounding, which may be half of bfloat16's away.
        rounded = merged[key].to(tensor.dtype)
        torch.testing.assert_close(tensor, rounded, atol=1e-6, rtol=2**-7, msg=key)
        assert (tensor == rounded).float().mean() > 0.99, key

    last = run_dir / "checkpoints/checkpoint_0000002"
    for written in (last, run_dir / "model", run_dir / "adapter"):
        assert type_command("verify", written, cwd=folder).returncode == 0
    assert type_command("export", last, folder / "out", cwd=folder).returncode == 0
    assert_same_tensors(folder / "out", run_dir / "model")


@pytest.mark.full
def test_random_weights_and_a_plan_need_the_config_alone(sources, folder):
    for name, source in sources.items():
        settings = (*STILL, "model.init=random", f"model.path={source}", f"run.dir=runs/{name}")
        finish(train(2, *settings, cwd=folder))
        exported = AutoModelForCausalLM.from_pretrained(folder / "runs" / name / "model")
        assert exported.dtype == torch.bfloat16

        machine = ("--nodes", 1, "--gpus-per-node", 2)
        plan = type_command("plan", "--config", "config.yaml", *machine, *settings, cwd=folder)
        assert plan.returncode == 0, plan.stderr
        parameters = sum(p.numel() for p in exported.parameters())
        assert f"Parameters: {parameters:,} | Trained: all" in plan.stdout
        assert "A bound from shapes" not in plan.stdout
        assert plan.stdout.count("Source: quantised (") == 1 and "GB of files" in plan.stdout


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_5_moe"])
def test_the_text_of_a_model_that_sees_is_dequantised(family, tokenizer, folder):
    source = save_seeing_model(family, tokenizer, folder / "source")
    before = tensors_of(source)
    quantise_in_fp8(source, re.compile(r"language_model.*(self_attn|mlp)\..*_proj\.weight"), RAGGED)
    finish(train(2, *STILL, f"model.path={source}", cwd=folder))
    model = folder / "runs/config/model"
    assert tensors_of(model).keys() == before.keys()
    require_dequantised(source, model)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"


LARGE = {
    # 67 million values in a matrix: in float32 they alone are 268 MB
    "fp8": {"hidden_size": 2048, "intermediate_size": 32768, "moe_intermediate_size": 1024},
    "mxfp4": {"hidden_size": 1024, "intermediate_size": 1024, "num_local_experts": 32},
}


def load_large(config: Config, small: Config) -> None:
    """On a rank: load a small model, and then the large one in a little more than its share."""
    world = join_world(config)
    build_model(small, read_model_config(small.model), world)
    model_config = read_model_config(config.model)
    torch.distributed.barrier()
    with Usage() as usage:
        model = build_model(config, model_config, world)
    share = sum(to_local(p).nbytes for p in model.parameters())
    assert usage.growth < share + 200e6, (usage.growth, share)
    assert share > 300e6


@pytest.mark.full
@pytest.mark.parametrize("name", LARGE)
def test_reading_takes_a_ranks_share_and_less_than_200_mb(name, sources, tokenizer, folder):
    if name == "fp8":
        source = save_deepseek_v3(folder / "large", tokenizer, (128, 128), **LARGE[name])
    else:
        source = save_gpt_oss(folder / "large", tokenizer, **LARGE[name])
    for ranks, dtype in ((1, "bfloat16"), (2, "float32")):
        small, large = (
            config_for(path, folder, f"model.master_dtype={dtype}")
            for path in (sources[name], source)
        )
        finish(on_ranks(ranks, load_large, large, small, cwd=folder))
