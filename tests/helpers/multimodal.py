"""Tiny models that see, with layers of multi-token prediction in their files."""

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

from distTest.workloads.tiny import tiny_config
from helpers.plain_training import save_new_model, sharpen
from helpers.tiny_models import VOCABULARY

FAMILIES = (
    *("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "gemma3", "gemma4", "kimi_k25"),
    *("step3p7", "minimax_m3_vl", "llama4", "mistral_large4", "glm5_next", "muse_glimmer"),
    "mistral3",
)
_TEXT = {"vocab_size": VOCABULARY, "eos_token_id": 1, "pad_token_id": 2}
_WIDE = _TEXT | {"hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 512}
_WIDE |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
_WIDE |= {"head_dim": 16, "tie_word_embeddings": False}
_VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "patch_size": 4}
_VISION |= {"num_attention_heads": 2, "image_size": 16, "depth": 1, "num_heads": 2}
_VISION |= {"out_hidden_size": 32, "deepstack_visual_indexes": [0]}
_VISION |= {"projection_intermediate_size": 16}
# Of some the text and the whole, so large that rounding does not show.
_OF_FAMILY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3_5_moe": (
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        | {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2}
        | {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
        | {"shared_expert_intermediate_size": 16},
        {},
    ),
    "gemma3": (
        {"tie_word_embeddings": True, "query_pre_attn_scalar": 16, "sliding_window": 64},
        {"mm_tokens_per_image": 4},
    ),
    "glm5_next": (
        {"q_lora_rank": 8, "kv_lora_rank": 8, "num_key_value_heads": 4, "head_dim": 0}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        | {"qk_rope_head_dim": 0, "qk_nope_head_dim": 16, "v_head_dim": 16, "hc_mult": 2}
        | {"linear_num_heads": 2, "linear_head_dim": 8, "index_n_heads": 2, "index_head_dim": 16}
        | {"num_hidden_layers": 4},
        {},
    ),
}


def config_of(family: str) -> PreTrainedConfig:
    """Return the configuration of a tiny model of this family."""
    if family in _OF_FAMILY:
        text, settings = _OF_FAMILY[family]
        text = _WIDE | {"model_type": f"{family}_text"} | text
        return AutoConfig.for_model(family, text_config=text, vision_config=_VISION, **settings)
    config = tiny_config(family)
    text = config.get_text_config()
    for name, value in (_TEXT | {"index_topk": 512}).items():
        setattr(text, name, value)
    text.tie_word_embeddings = config.tie_word_embeddings = family == "gemma4"
    if family == "gemma4":  # which has no tower by default
        config.vision_config = tiny_config("gemma4_vision")
        text.vocab_size_per_layer_input = VOCABULARY
    return config


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
