"""Tiny models of any architecture in flat rows: with layers that keep a state, windows or sinks."""

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from distTest.workloads.tiny import tiny_config
from helpers.commands import REPOSITORY
from helpers.tiny_models import VOCABULARY
from shardtune.config_io import load_config
from shardtune.distributed.layout import Layout
from shardtune.model.documents.attention_choice import Attention, LogitsTrial, decide_attention


def config_of(family: str, **settings: Any) -> PreTrainedConfig:
    """Return the configuration of `tiny_config` with other settings."""
    given = tiny_config(family).to_dict() | {"vocab_size": VOCABULARY} | settings
    del given["model_type"]
    return CONFIG_MAPPING[family].from_dict(given)


def build(family: str, **settings: Any) -> Any:
    """Build a model of this family with random weights, float32."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(family, **settings), dtype=torch.float32)
    model.config.use_cache = False  # as in a run: in eval mode a cache would be changed in place
    return model


def decided(model: Any, *assignments: str) -> Attention:
    """Let a model on the CPU attend as a run would, after its trials."""
    given = ["model.path=unread", "data.max_length=128", *assignments]
    config, cpu = load_config(REPOSITORY / "examples/demo.yaml", given, {}), torch.device("cpu")
    model.config.use_cache = False
    return decide_attention(LogitsTrial(model, Layout.of(config), cpu), config.data.max_length)
