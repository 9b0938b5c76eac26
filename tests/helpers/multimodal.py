"""Tiny models that see, with layers of multi-token prediction in their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

from helpers.plain_training import save_new_model, sharpen
from helpers.tiny_models import VOCABULARY

_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
_VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "patch_size": 4}
_VISION |= {"num_attention_heads": 2, "image_size": 16}
_QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2}
_QWEN_VISION |= {"out_hidden_size": 32, "patch_size": 4, "deepstack_visual_indexes": [0]}

# Of each architecture, the settings of its text, of its tower and of the whole.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen3_5": (_DELTA, _QWEN_VISION, {}),
    "qwen3_5_moe": (
        _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 16},
        _QWEN_VISION,
        {},
    ),
    "qwen3_vl": ({}, _QWEN_VISION, {}),
    "qwen3_vl_moe": (_EXPERTS | {"moe_intermediate_size": 24}, _QWEN_VISION, {}),
    "gemma3": (
        {"tie_word_embeddings": True, "query_pre_attn_scalar": 16, "sliding_window": 64},
        _VISION,
        {"mm_tokens_per_image": 4},
    ),
    "mistral3": ({"model_type": "ministral3"}, _VISION | {"model_type": "pixtral"}, {}),
}


def config_of(family: str) -> PreTrainedConfig:
    text, vision, settings = FAMILIES[family]
    text = _TEXT | {"model_type": f"{family}_text"} | text
    return AutoConfig.for_model(family, text_config=text, vision_config=vision, **settings)


def save_seeing_model(family: str, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    """Save a model of this family, with `mtp.*` and a file of its image processor beside it."""
    config = config_of(family)
    save_new_model(
        lambda: AutoModelForImageTextToText.from_config(config), tokenizer, folder, sharpen
    )
    tensors = load_file(folder / "model.safetensors")
    tensors |= {
        "mtp.fc.weight": torch.randn(32, 64),
        "mtp.layers.0.mlp.down_proj.weight": torch.randn(32, 64).bfloat16(),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    processor = {"image_processor_type": "PixtralImageProcessor", "patch_size": 4}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    return folder
