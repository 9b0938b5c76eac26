"""Files of a hub model: which are fetched, and what a node does that cannot reach the hub."""

import json
import shutil
import socket
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import datasets
import pytest
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from shardtune import hub
from shardtune.checkpoint.export import model_files
from shardtune.config import ModelConfig
from shardtune.errors import UserError
from shardtune.model.source import files
from shardtune.model.source.weight_files import files_of_weights


@pytest.fixture
def deaf_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A hub that takes connections and never answers, and an empty cache."""
    for module in constants, datasets.config:
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "_TIMEOUT_S", 0.5)
    hub.hub_problem.cache_clear()
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield
    hub.hub_problem.cache_clear()


@pytest.mark.usefixtures("deaf_hub")
def test_where_the_hub_does_not_answer_its_cache_is_read(models, tmp_path):
    model, refusal = ModelConfig(path="acme/tiny"), rf"timed out.*\) - .* into {tmp_path}/cache, "
    for read in (
        lambda: files.read_model_config(model),
        lambda: files.fetch_weights(model, model_files.require_index),
    ):
        with pytest.raises(UserError, match=refusal):
            read()
    folder, commit = tmp_path / "cache/models--acme--tiny", "a" * 40
    shutil.copytree(models["llama"], folder / "snapshots" / commit)
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text(commit, encoding="utf-8")
    assert files.read_model_config(model).model_type == "llama"
    assert files.fetch_weights(model, model_files.require_index) == commit


def test_the_files_that_are_fetched_are_those_of_the_index(models, tmp_path, monkeypatch):
    """Whatever their names; the hub is a folder here, from which what is asked for is copied."""
    hub, here = tmp_path / "hub", tmp_path / "snapshots" / ("a" * 40)
    weights = load_file(models["llama"] / "model.safetensors")
    here.mkdir(parents=True)
    hub.mkdir()
    shards = {}
    for part in range(2):
        shard = f"model.safetensors-0000{1 + part}-of-00002.safetensors"
        shards |= dict.fromkeys([*weights][part::2], shard)
        save_file({name: weights[name] for name in [*weights][part::2]}, hub / shard)
    save_file({"other": weights["model.norm.weight"]}, hub / "consolidated.safetensors")
    index = "model.safetensors.index.json"
    (hub / index).write_text(json.dumps({"weight_map": shards}), encoding="utf-8")
    (hub / "README.md").touch()  # it names the licence

    def copy(path: str, revision: str, allow_patterns: list[str]) -> str:
        assert (path, revision) == ("acme/tiny", "a" * 40)
        for file in hub.iterdir():
            if any(fnmatch(file.name, pattern) for pattern in allow_patterns):
                shutil.copy(file, here)
        return str(here)

    monkeypatch.setattr(files, "snapshot_download", copy)
    monkeypatch.setattr(files, "cached_file", lambda path, name: str(here / name))
    assert files.fetch_weights(ModelConfig(path="acme/tiny"), lambda *_: None) == "a" * 40
    assert {file.name for file in here.iterdir()} == {index, "README.md", *shards.values()}
    shutil.copy(models["llama"] / "model.safetensors", hub)
    (here / index).unlink()
    assert files.fetch_weights(ModelConfig(path="acme/tiny"), lambda *_: None) == "a" * 40
    assert files_of_weights(here) == ["model.safetensors"], "it goes before an index"
    for folder in (hub, here):
        (folder / "model.safetensors").unlink()
    (hub / index).write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match="not a readable index of weights"):
        files.fetch_weights(ModelConfig(path="acme/tiny"), lambda *_: None)
