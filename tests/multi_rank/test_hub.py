"""A model that is a name of the hub: before weights are read its revision is one on all nodes, and they are there."""

from __future__ import annotations

import json
import re
import shutil
import socket
from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub.constants
import pytest
from helpers.chats import chats, write_jsonl
from helpers.ranks import on_nodes, run_script
from safetensors.torch import load_file, save_file

from shardtune.config import ModelConfig
from shardtune.errors import UserError
from shardtune.model import files as source

HOST = socket.gethostname()


def train_offline(arguments: list[str]) -> None:
    """On a rank, whose hub cache is that of its node's folder."""
    huggingface_hub.constants.HF_HUB_CACHE = str(Path("hub").absolute())
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    run_script(arguments)


def cache(model: Path, node: Path, revision: str, without: str = "") -> None:
    folder = node / "hub/models--acme--tiny"
    shutil.copytree(model, folder / "snapshots" / revision, ignore=shutil.ignore_patterns(without))
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text(revision, encoding="utf-8")


@pytest.mark.parametrize(
    ("revision", "without", "options", "said"),
    [
        ("a" * 40, "", [], ""),
        (
            "b" * 40,
            "",
            [],
            f"model.path=acme/tiny is the hub's revision {'a' * 40} on {{0}} and {'b' * 40} on {{1}} - .*",
        ),
        (
            "a" * 40,
            "model.safetensors",
            [],
            r"{1}: .*/snapshots/a+: no model\.safetensors and no .*, so no weights - .*",
        ),
        ("a" * 40, "model.safetensors", ["model.init=random"], ""),
        (
            "a" * 40,
            "config.json",
            [],
            r"{1}: model\.path=acme/tiny: no model configuration that .* - .*",
        ),
    ],
)
def test_the_model_of_two_nodes(
    revision: str,
    without: str,
    options: list[str],
    said: str,
    models: dict[str, Path],
    tmp_path: Path,
) -> None:
    nodes = [tmp_path / "a", tmp_path / "b"]
    for node in nodes:
        node.mkdir()
        write_jsonl(node / "train.jsonl", chats(20))
        (node / "config.yaml").touch()
    cache(models["llama"], nodes[0], "a" * 40)
    cache(models["llama"], nodes[1], revision, without)
    arguments = [
        "model.path=acme/tiny",
        "data.train=train.jsonl",
        "data.max_length=64",
        "train.max_steps=1",
        *options,
    ]
    done = on_nodes(
        [(node, 1) for node in nodes], train_offline, ["--config", "config.yaml", *arguments]
    )
    assert done.returncode == (2 if said else 0), done.stderr
    if said:
        names = [re.escape(f"node {number} ({HOST})") for number in (0, 1)]
        assert re.fullmatch(f"ERROR: {said.format(*names)}", done.stderr.splitlines()[-1]), (
            done.stderr
        )


def test_the_files_that_are_fetched_are_those_of_the_index(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever their names; the hub is a folder here, from which what is asked for is copied."""
    hub, here = tmp_path / "hub", tmp_path / "snapshots" / ("a" * 40)
    weights = load_file(models["llama"] / "model.safetensors")
    shards = {
        name: f"model.safetensors-0000{1 + number % 2}-of-00002.safetensors"
        for number, name in enumerate(weights)
    }
    here.mkdir(parents=True)
    hub.mkdir()
    for shard in set(shards.values()):
        save_file(
            {name: tensor for name, tensor in weights.items() if shards[name] == shard}, hub / shard
        )
    save_file({"other": weights["model.norm.weight"]}, hub / "consolidated.safetensors")
    (hub / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": shards}), encoding="utf-8"
    )

    def copy(path: str, revision: str, allow_patterns: list[str]) -> str:
        assert (path, revision) == ("acme/tiny", "a" * 40)
        for file in hub.iterdir():
            if any(fnmatch(file.name, pattern) for pattern in allow_patterns):
                shutil.copy(file, here)
        return str(here)

    monkeypatch.setattr(source, "snapshot_download", copy)
    monkeypatch.setattr(source, "cached_file", lambda path, name: str(here / name))
    assert source.fetch_weights(ModelConfig(path="acme/tiny")) == "a" * 40
    assert {file.name for file in here.iterdir()} == {
        "model.safetensors.index.json",
        *shards.values(),
    }
    (hub / "model.safetensors.index.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match="not a readable index of weights"):
        source.fetch_weights(ModelConfig(path="acme/tiny"))
