"""A model of the configured architecture, small enough for two cores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast

from distTest.workloads.small_models import make_tokenizer, save_untrained, token_settings
from shardtune.errors import first_line
from shardtune.model.traits import EXPERTS

_SHIPPED = "zai-org/GLM-4.5-Air"  # its architecture needs no hub

_LAYERS = 3
# The largest values of keys that end so; each architecture has some of these keys.
_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "head_dim": 8,
    "lora_rank": 16,
    "_group": 1,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 2,
}
_HEADS, _KV_HEADS = "num_attention_heads", "num_key_value_heads"


def make_model(path: str, ranks: int, out: Path) -> str:
    """Write configuration and tokenizer of a tiny model of `path`'s architecture to `out`.

    `path` is a directory or a hub id. Return a line that describes the model, and why another
    architecture stands in for one that cannot be read or made small.
    """
    is_shipped = path == _SHIPPED
    tokenizer = make_tokenizer()
    try:
        source = (
            AutoConfig.for_model("glm4_moe") if is_shipped else AutoConfig.from_pretrained(path)
        )
        config = _scale_down(source, ranks, tokenizer)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # each configuration class reads its own fields
        if is_shipped:
            raise
        why = f"{path} cannot be had here, {type(error).__name__}: {first_line(error)}"
        return f"{make_model(_SHIPPED, ranks, out)}, because {why}"
    save_untrained(out, config, tokenizer)
    size = f"{config.num_hidden_layers} layers, {model.num_parameters()} random parameters"
    return f"{config.model_type}, {size}, as {path}"


def _scale_down(
    source: PreTrainedConfig, ranks: int, tokenizer: PreTrainedTokenizerFast
) -> PreTrainedConfig:
    """Keep the first layers of an architecture, at least one of each kind, and narrow them."""
    values = source.to_dict()
    depth = values["num_hidden_layers"]
    per_layer = {
        key: value
        for key, value in values.items()
        if isinstance(value, list | tuple) and len(value) == depth
    }
    kinds = list(zip(*per_layer.values(), strict=True))
    layers = max(min(depth, _LAYERS), *(1 + kinds.index(kind) for kind in kinds), 1)
    small: dict[str, Any] = {key: value[:layers] for key, value in per_layer.items()}
    small["num_hidden_layers"] = layers
    for end, most in _SMALL.items():
        small |= {key: min(n, most) for key, n in values.items() if n and key.endswith(end)}
    if values.get(_HEADS):
        small[_HEADS] = 4
    if heads := values.get(_KV_HEADS):
        # The source has one key head per query head, per group of query heads, or for all: so has
        # the tiny model.
        small[_KV_HEADS] = 4 if heads == values[_HEADS] else min(heads, 2)
    # A multiple of the ranks, so that each rank has an expert.
    small |= {key: ranks * -(-4 // ranks) for key in EXPERTS if values.get(key) is not None}
    return type(source).from_dict(values | small | token_settings(tokenizer))
