"""Small mixtures of experts of real architectures, beside a dense one or two."""

from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM

from helpers.tiny_models import VOCABULARY

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "num_experts_per_tok": 2,
}
_SHARED = {
    "n_routed_experts": 12,  # on two ranks with two copies: slices of three
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "glm4_moe": _SHARED,
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 16, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4},
    "deepseek_v3": _SHARED | _LATENT | {"n_routed_experts": 8},
    "gpt_oss": {  # transposed, with biases
        "num_local_experts": 4,
        "layer_types": ["full_attention"] * 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "gemma4_text": {  # heads that differ from layer to layer, and dense MLPs beside experts
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
    },
}


def build(family: str, **settings: Any) -> Any:
    """Build a model of this family, of FAMILIES or a dense one."""
    given = SMALL | FAMILIES.get(family, {}) | settings
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **given))
