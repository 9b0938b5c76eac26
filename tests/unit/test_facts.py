"""The facts of config.json are those of the model on meta, wherever both know a thing."""

import copy
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from distTest.workloads.tiny import tiny_config
from shardtune.model.facts.facts import Facts
from shardtune.model.facts.of_config import facts_of_config
from shardtune.model.facts.of_model import facts_of_model
from shardtune.model.source.text_model import build_text_model

KINDS = """
afmoe bamba bloom cohere2 deepseek_v3 ernie4_5_moe falcon_h1 gemma2 gemma3_text glm4_moe gpt2
gpt_neox gpt_oss granitemoehybrid hunyuan_v1_moe jamba llama llama4_text mamba2 minimax_m2 mixtral
nemotron_h olmoe phimoe qwen3 qwen3_5_moe qwen3_next step3p7
"""
# Their config.json names layers and heads in a way of its own.
OWN_NAMES = {"bloom", "gpt2", "mamba2"}


@pytest.mark.parametrize("kind", KINDS.split())
def test_config_json_says_what_the_model_is(kind, tmp_path: Path):
    model_config = tiny_config(kind)
    model_config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = build_text_model(copy.deepcopy(model_config))
    few, all_facts = facts_of_config(str(tmp_path)), facts_of_model(model, str(tmp_path))
    assert all_facts.numel() == model.num_parameters()
    known = {f.name: getattr(few, f.name) for f in fields(Facts) if getattr(few, f.name)}
    assert known["kind"] == kind and len(known) >= (2 if kind in OWN_NAMES else 4)
    assert known == {name: getattr(all_facts, name) for name in known}


def test_embeddings_that_are_named_as_a_layer_count_once():
    with torch.device("meta"):
        model = build_text_model(tiny_config("roberta"))
    assert facts_of_model(model).numel() == model.num_parameters()
