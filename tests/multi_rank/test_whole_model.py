"""A run gives its source back: its tensors by name, shape and dtype, and the files beside them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers import small_runs
from helpers.chats import chats, write_jsonl
from helpers.commands import finish
from helpers.ranks import train
from helpers.small_runs import checkpoint, digests, flip_bit, tensors_of
from safetensors.torch import load_file, save_file

from shardtune.__main__ import run

EXTRA = "model.layers.3."
FLOAT32 = ("norm.weight", "e_score_correction_bias", "experts.2.up_proj.weight", "enorm.weight")
SETTINGS = (
    *small_runs.SETTINGS,
    "model.path=source",
    "scheduler.warmup_ratio=0",
    "optimizer.lr=1e-2",
    "train.max_steps=2",
)


def publish(model: Path, source: Path) -> None:
    """Publish a model with a layer of multi-token prediction, as GLM-4.5-Air's is, in two files.

    Some of its tensors are float32; config.json has names of older versions and an unknown one.
    """
    shutil.copytree(model, source)
    tensors = load_file(source / "model.safetensors")
    last = {name: t for name, t in tensors.items() if name.startswith("model.layers.2.")}
    extra = {name.replace(".2.", ".3.", 1): t for name, t in last.items()} | {
        f"{EXTRA}eh_proj.weight": torch.randn(32, 64),
        f"{EXTRA}enorm.weight": torch.randn(32),
        f"{EXTRA}hnorm.weight": torch.randn(32),
        f"{EXTRA}shared_head.norm.weight": torch.randn(32),
        f"{EXTRA}shared_head.head.weight": torch.randn(331, 32),
    }
    (source / "model.safetensors").unlink()
    places = {}
    for file, part in (("one.safetensors", tensors), ("two.safetensors", extra)):
        save_file(
            {n: t if n.endswith(FLOAT32) else t.bfloat16() for n, t in part.items()}, source / file
        )
        places |= dict.fromkeys(part, file)
    index = json.dumps({"metadata": {}, "weight_map": places})
    (source / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config |= {"num_nextn_predict_layers": 1, "of_the_maker": {"a": [1.5, None]}}
    del config["dtype"], config["rope_parameters"]
    config |= {"rope_theta": 10000.0, "rope_scaling": None, "partial_rotary_factor": 0.5}
    config |= {"torch_dtype": "bfloat16", "_name_or_path": "/home/of/the/maker"}
    (source / "config.json").write_text(json.dumps(config), encoding="utf-8")


def kinds(tensors: dict[str, torch.Tensor]) -> dict[str, object]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def read_config(folder: Path) -> dict[str, object]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Path:
    """The folder of a run of two steps on two ranks, for reading only."""
    folder = tmp_path_factory.mktemp("whole")
    publish(models["glm"], folder / "source")
    write_jsonl(folder / "train.jsonl", chats(20))
    said = finish(train(2, *SETTINGS, cwd=folder))
    extra = [t for name, t in tensors_of(folder / "source").items() if name.startswith(EXTRA)]
    copied = f"Copied from {folder / 'source'}: {len(extra)} tensors that training does not load ("
    assert f"{copied}{EXTRA[:-1]} ..., " in said
    return folder


def test_every_tensor_of_the_source_comes_back(folder):
    source, written = tensors_of(folder / "source"), tensors_of(folder / "runs/config/model")
    assert kinds(written) == kinds(source)
    assert len({tensor.dtype for tensor in source.values()}) == 2
    moved = {name for name, tensor in source.items() if not torch.equal(written[name], tensor)}
    assert not any(name.startswith(EXTRA) for name in moved)
    assert {"lm_head.weight", "model.layers.2.mlp.gate.weight", "model.norm.weight"} <= moved


def test_every_file_beside_the_weights_comes_back(folder):
    """But config.json does not say where its maker had it."""
    source, model = folder / "source", folder / "runs/config/model"
    expected = read_config(source)
    del expected["_name_or_path"]
    assert read_config(model) == expected
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (model / file).read_bytes() == (source / file).read_bytes(), file


def test_an_export_without_the_source_says_what_it_leaves_out(folder, tmp_path, capsys):
    saved = str(checkpoint(folder / "runs/config", 2))
    assert run(["export", saved, str(tmp_path / "with")]) == 0
    assert digests(tmp_path / "with") == digests(folder / "runs/config/model")
    assert run(["export", saved, str(tmp_path / "half"), "--dtype", "float16"]) == 0
    half, plain = tensors_of(tmp_path / "half"), tensors_of(tmp_path / "with")
    assert (
        half.keys() == plain.keys() and read_config(tmp_path / "half")["torch_dtype"] == "float16"
    )
    for name, tensor in half.items():
        is_exact = name.endswith("e_score_correction_bias")
        assert tensor.dtype == (torch.float32 if is_exact else torch.float16), name
        if name.startswith(EXTRA):
            assert torch.equal(tensor, plain[name].to(tensor.dtype)), name

    (folder / "source").rename(folder / "elsewhere")
    capsys.readouterr()
    assert run(["export", saved, str(tmp_path / "without")]) == 0
    (folder / "elsewhere").rename(folder / "source")
    said = capsys.readouterr().out
    assert f"which {folder / 'source'} now lacks" in said
    assert said.count("; config.json now has num_nextn_predict_layers = 0\n") == 1
    without = tensors_of(tmp_path / "without")
    assert without.keys() == {name for name in plain if not name.startswith(EXTRA)}
    assert all(torch.equal(tensor, plain[name]) for name, tensor in without.items())
    config = read_config(tmp_path / "with") | {"num_nextn_predict_layers": 0}
    assert read_config(tmp_path / "without") == config


def test_verify_names_the_damaged_file_of_a_model(folder, tmp_path, capsys):
    """Next to a checkpoint, whose parts are named in the same line."""
    model = Path(shutil.copytree(folder / "runs/config/model", tmp_path / "model"))
    both = ["verify", str(checkpoint(folder / "runs/config", 2)), str(model)]
    assert run(both) == 0
    assert capsys.readouterr().out.count(": intact, ") == 2
    for file in sorted(path.name for path in model.iterdir()):
        flip_bit(model / file)
        assert run(both) == 1
        assert capsys.readouterr().err.startswith(f"ERROR: {model / file}: is damaged - ")
        flip_bit(model / file)
    (model / "tokenizer.json").unlink()
    assert run(both) == 1
    assert capsys.readouterr().err.startswith(f"ERROR: {model}/tokenizer.json: is missing - ")


def test_tied_weights_that_the_source_has_twice(tmp_path, models):
    """And without the prefix that transformers gives them."""
    source = Path(shutil.copytree(models["llama"], tmp_path / "source"))
    tensors = load_file(source / "model.safetensors")
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    tensors["lm_head.weight"] = tensors["embed_tokens.weight"].clone()
    save_file(tensors, source / "model.safetensors")
    write_jsonl(tmp_path / "train.jsonl", chats(20))
    finish(train(1, *SETTINGS, cwd=tmp_path))
    written = tensors_of(tmp_path / "runs/config/model")
    assert kinds(written) == kinds(tensors)
    assert torch.equal(written["lm_head.weight"], written["embed_tokens.weight"])
    assert not torch.equal(written["lm_head.weight"], tensors["lm_head.weight"])
    tensors["lm_head.weight"][-1] += 1
    save_file(tensors, source / "model.safetensors")
    done = train(1, *SETTINGS, "run.dir=other", cwd=tmp_path)
    assert done.returncode == 2 and "Parameters:" not in done.stdout
    ties = "its config.json ties embed_tokens.weight and lm_head.weight, which differ in its files"
    assert done.stderr.startswith(f"ERROR: model.path={source}: {ties} - ")


def test_names_that_fit_nothing_are_refused(tmp_path, models, capsys):
    """Before a weight is read, and by the plan."""
    source = Path(shutil.copytree(models["llama"], tmp_path / "source"))
    tensors = load_file(source / "model.safetensors")
    tensors["model.normal.weight"] = tensors.pop("model.norm.weight")
    save_file(tensors, source / "model.safetensors")
    write_jsonl(tmp_path / "train.jsonl", chats(20))
    done = train(1, *SETTINGS, cwd=tmp_path)
    assert done.returncode == 2 and "Parameters:" not in done.stdout
    lacks = "its files have no model.norm.weight of shape [32] (1 tensors in all)"
    assert done.stderr.startswith(f"ERROR: model.path={source}: {lacks}")
    (tmp_path / "config.yaml").touch()
    given = [*SETTINGS, f"model.path={source}", f"data.train={tmp_path}/train.jsonl"]
    assert run(["plan", f"--config={tmp_path}/config.yaml", *given]) == 2
    assert capsys.readouterr().err.splitlines(keepends=True)[-1] == done.stderr
