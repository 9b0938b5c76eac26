"""The shipped recipes train tiny models of their architectures with every key as shipped."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers import moe_families
from helpers.chats import chats, write_jsonl
from helpers.commands import REPOSITORY, finish, read_metrics
from helpers.plain_lora import loss_of
from helpers.plain_training import encode, save_new_model, sharpen
from helpers.ranks import on_ranks, run_script
from transformers import AutoConfig, AutoModelForCausalLM

from shardtune.config_io import changed_keys, load_config, remarks, to_dict

SMALL = moe_families.SMALL | {"intermediate_size": 64, "num_experts_per_tok": 8}
SMALL |= {"dtype": torch.bfloat16}
# Two ranks share two experts, so that each stores a whole one, as with the large model.
GLM = (
    "glm4_moe",
    {"n_routed_experts": 16, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
)
QWEN = ("qwen3_moe", {"num_experts": 8, "moe_intermediate_size": 16})


def with_heads(family: tuple[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Return a family with as many heads as ranks that share a row."""
    kind, settings = family
    return kind, settings | {"num_attention_heads": 8}


# The architecture, and the ranks: as many as the recipe is for, but fewer of dense models.
RECIPES: dict[str, tuple[tuple[str, dict[str, Any]], int]] = {
    "config": (GLM, 16),
    "glm-4.5-air-full-141gb": (GLM, 16),
    "glm-4.5-air-lora": (GLM, 16),
    "qwen3-30b-a3b": (QWEN, 8),
    "llama-3-8b": (("llama", {}), 2),
    "long-rows-glm-4.5-air": (with_heads(GLM), 16),
    "long-rows-glm-4.5-air-lora": (with_heads(GLM), 16),
    "long-rows-qwen3-30b-a3b": (with_heads(QWEN), 8),
    "long-rows-llama-3.1-8b": (with_heads(("llama", {})), 8),
}
BY_DEFAULT = "llama-3-8b"  # the fewest ranks
CHANGED = ["glm-4.5-air-full-141gb", "glm-4.5-air-lora"]  # the shipped configuration with a change


def file_of(name: str) -> Path:
    return REPOSITORY / ("config.yaml" if name == "config" else f"examples/{name}.yaml")


def test_every_recipe_is_rehearsed_and_names_its_command():
    recipes = {path.stem for path in (REPOSITORY / "examples").glob("*.yaml")}
    recipes -= {"demo", "kubernetes", "skypilot"}
    assert {"config", *recipes} == RECIPES.keys()
    for name in recipes:
        text = file_of(name).read_text(encoding="utf-8")
        assert re.search(rf"^#   \S.* --config examples/{name}\.yaml", text, re.MULTILINE)
        assert text.startswith("# yaml-language-server: $schema=../docs/config.schema.json\n")


@pytest.mark.parametrize("name", CHANGED)
def test_a_glm_recipe_is_the_shipped_configuration_with_the_change_that_it_names(name):
    text = re.sub(r"\n#\s+", " ", file_of(name).read_text(encoding="utf-8"))
    (change,) = re.findall(r"as \./launch_node0\.sh (.+) makes it", text)
    recipe, changed = (
        load_config(file, assignments, {})
        for file, assignments in ((file_of(name), []), (file_of("config"), change.split()))
    )
    switched_off = {remark.partition(" = ")[0] for remark in remarks(changed)}
    differing = {key for key, _, _ in changed_keys(to_dict(recipe), changed)}
    assert differing - switched_off == {"run.dir"}


@pytest.mark.parametrize(
    "name",
    [
        name if name == BY_DEFAULT else pytest.param(name, marks=pytest.mark.full)
        for name in RECIPES
        if name not in CHANGED
    ],
)
def test_a_recipe_trains(name, tokenizer, tmp_path):
    (kind, more), ranks = RECIPES[name]
    recipe = file_of(name)
    config = AutoConfig.for_model(kind, **SMALL | more)
    new = partial(AutoModelForCausalLM.from_config, config, dtype=torch.bfloat16)
    model = save_new_model(new, tokenizer, tmp_path / "model", sharpen)
    records = [record for record in chats(64) if len(encode(tokenizer, record)[0]) <= 128]
    arguments = [
        f"--config={recipe}",
        f"model.path={model}",
        f"data.train={write_jsonl(tmp_path / 'train.jsonl', records)}",
        f"data.eval={write_jsonl(tmp_path / 'eval.jsonl', records[:8])}",
        f"run.dir={tmp_path / 'run'}",
        "train.max_steps=2",
        "data.max_length=128",
    ]
    said = finish(on_ranks(ranks, run_script, arguments, cwd=tmp_path))

    baseline, last = read_metrics(tmp_path / "run", "eval")
    plain, trained = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (model, tmp_path / "run/model")
    )
    encoded = [encode(tokenizer, record) for record in records[:8]]
    assert baseline["tokens"] == sum(sum(flags[1:]) for _, flags in encoded)
    for entry, opened in ((baseline, plain), (last, trained)):  # in bfloat16 on some CPUs
        assert entry["loss"] == pytest.approx(loss_of(opened, encoded), rel=2e-2)
    assert [step["step"] for step in read_metrics(tmp_path / "run", "step")] == [1, 2]
    weights = dict(plain.named_parameters())
    assert any(not torch.equal(p, weights[key]) for key, p in trained.named_parameters())
    given = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    has_adapters = given.get("lora", {}).get("rank") is not None
    assert (tmp_path / "run/adapter").is_dir() == has_adapters
    assert "Checkpoint staging" in said
