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
    "head_dim": 8,
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
    "gemma4": (
        {"tie_word_embeddings": True, "sliding_window": 64, "global_head_dim": 16}
        | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY},
        _VISION | {"model_type": "gemma4_vision", "head_dim": 8, "num_key_value_heads": 2},
        {},
    ),
    "kimi_k25": (
        _LATENT
        | {"model_type": "deepseek_v3", "n_routed_experts": 4, "moe_intermediate_size": 16}
        | {"num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
        _VISION | {"pos_emb_height": 4, "pos_emb_width": 4},
        {"projection_hidden_size": 16},
    ),
    "step3p7": (
        {"model_type": "step3p5", "n_routed_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 16, "share_expert_dim": 16, "sliding_window": 64}
        | {"layer_types": ["full_attention", "sliding_attention"], "query_pre_attn_scalar": 16}
        | {"mlp_layer_types": ["dense", "sparse"], "num_sliding_attention_heads": 4},
        _VISION | {"model_type": "step3p5_vision"},
        {},
    ),
    "minimax_m3_vl": (
        {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8}
        | {"dense_intermediate_size": 32, "shared_intermediate_size": 16}
        | {"mlp_layer_types": ["dense", "sparse"], "layer_types": ["full_attention"] * 2},
        _VISION,
        {"projector_hidden_size": 16, "merged_hidden_size": 64},
    ),
    "llama4": (
        {"num_local_experts": 4, "intermediate_size_mlp": 32, "moe_layers": [1]}
        | {"no_rope_layers": [1, 0], "layer_types": None, "pad_token_id": 2},
        _VISION | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
        {},
    ),
    "mistral_large4": (
        _LATENT
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        | {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 512},
        _VISION | {"model_type": "pixtral", "head_dim": 8},
        {},
    ),
    "glm5_next": (
        _LATENT
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        | {"qk_rope_head_dim": 0, "qk_nope_head_dim": 16, "v_head_dim": 16, "head_dim": 0}
        | {"linear_num_heads": 2, "linear_head_dim": 8, "index_n_heads": 2, "index_head_dim": 16}
        | {"num_hidden_layers": 4, "hc_mult": 2},
        _QWEN_VISION | {"image_size": 16, "projection_intermediate_size": 16},
        {},
    ),
    "muse_glimmer": (
        {"sliding_window": 64, "layer_types": None, "layer_rope_theta": None},
        _VISION | {"pos_emb_height": 4, "pos_emb_width": 4, "layer_types": ["full_attention"]},
        {"out_hidden_size": 32, "projector_hidden_size": 16},
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
