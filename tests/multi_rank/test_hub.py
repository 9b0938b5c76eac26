"""Nodes that read a model of the hub have one revision and all its weights before they read one."""

import json
import re
import shutil
import socket
from pathlib import Path
from subprocess import CompletedProcess

import huggingface_hub.constants
import pytest
from helpers.chats import chats, write_jsonl
from helpers.documented import refused
from helpers.ranks import run_script, train_on_nodes
from helpers.tiny_models import small_opt
from huggingface_hub import ModelCard
from safetensors.torch import load_file

HOST = socket.gethostname()


def train_offline(arguments: list[str]) -> None:
    """On a rank, whose hub cache is that of its node's folder."""
    huggingface_hub.constants.HF_HUB_CACHE = str(Path("hub").absolute())
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    run_script(arguments)


def start(nodes: list[Path], *options: str) -> CompletedProcess[str]:
    """Train a model of the hub, with a rank on each node."""
    for node in nodes:
        write_jsonl(node / "train.jsonl", chats(20))
    given = ["model.path=acme/tiny", "data.train=train.jsonl", "data.max_length=64", *options]
    return train_on_nodes([(node, 1) for node in nodes], *given, work=train_offline)


def cache(model: Path, node: Path, revision: str, without: str = "") -> None:
    folder = node / "hub/models--acme--tiny"
    shutil.copytree(model, folder / "snapshots" / revision, ignore=shutil.ignore_patterns(without))
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text(revision, encoding="utf-8")


A, B = "a" * 40, "b" * 40


@pytest.mark.parametrize(
    ("revision", "without", "options", "message"),
    [
        (A, "", [], ""),
        # Before the weights are fetched, which one node does not have.
        (
            A,
            "model.safetensors",
            ["lora.rank=4", "lora.targets=[q_prj]"],
            "lora.targets: q_prj means no layer of llama - use q_proj",
        ),
        (B, "", [], f'the hub\'s revision of \\S+ is "{A}" on {{0}} and "{B}" on {{1}} - '),
        (
            A,
            "model.safetensors",
            [],
            r"{1}: \S+/model\.safetensors: this file of weights is missing ",
        ),
        (A, "model.safetensors", ["model.init=random"], ""),
        (
            A,
            "config.json",
            [],
            r"{1}: model\.path=acme/tiny: neither a directory here nor in the hub's cache, .* "
            r"\(HF_HUB_OFFLINE is set\) - ",
        ),
    ],
)
def test_nodes_must_have_the_same_revision_and_its_weights(
    revision, without, options, message, models, tmp_path
):
    nodes = [tmp_path / "a", tmp_path / "b"]
    for node in nodes:
        node.mkdir()
    cache(models["llama"], nodes[0], A)
    cache(models["llama"], nodes[1], revision, without)
    done = start(nodes, "train.max_steps=1", *options)
    assert done.returncode == (2 if message else 0), done.stderr
    if message:
        names = [re.escape(f"node {number} ({HOST})") for number in (0, 1)]
        last = done.stderr.splitlines()[-1]
        assert re.match(f"ERROR: {message.format(*names)}", last), last
    elif not options:
        card = ModelCard.load(nodes[0] / "runs/config/model/README.md")
        assert card.data.base_model == "acme/tiny" and card.data.library_name == "transformers"


def write_opt(snapshot: Path, models: dict[str, Path]) -> None:
    small_opt().config.save_pretrained(snapshot)


def write_other_names(snapshot: Path, models: dict[str, Path]) -> None:
    names = load_file(models["llama"] / "model.safetensors").keys() - {"model.norm.weight"}
    index = {"weight_map": dict.fromkeys([*names, "model.normal.weight"], "one.safetensors")}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


@pytest.mark.parametrize(
    ("write", "problem"),
    [
        (write_opt, "opt lets a packed document see the one before it (the logits"),
        (write_other_names, "model.path=acme/tiny: its files have no model.norm.weight of shape"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_the_weights_are_fetched(
    write, problem, models, tmp_path
):
    cache(models["llama"], tmp_path, A, "*.safetensors")
    write(tmp_path / "hub/models--acme--tiny/snapshots" / A, models)
    assert refused(start([tmp_path], "model.attention=sdpa")).startswith(f"ERROR: {problem}")
