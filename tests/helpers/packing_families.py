"""Tiny models with layers that keep a state, with windows or with sinks, in flat rows."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from helpers.commands import REPOSITORY
from helpers.tiny_models import VOCABULARY
from shardtune.config_io import load_config
from shardtune.model.attention_check import Attention, LogitsTrial, decide_attention

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.1,
}
_LINEAR = ["linear_attention", "full_attention"]
_SLIDING = ["sliding_attention", "full_attention"]
_DELTA = {
    "layer_types": _LINEAR,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
}
_KDA = _LATENT | _EXPERTS | {"layer_types": _LINEAR, "n_shared_experts": 1}
_MAMBA = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2}
_MAMBA2 = _MAMBA | {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_chunk_size": 16}
_WINDOW = {"sliding_window": 7, "layer_types": _SLIDING}

# Layers that keep a state.
STATES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 16},
    "qwen3_next": _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 16},
    "olmo_hybrid": _DELTA,
    "kimi_linear": _KDA
    | {"linear_head_dim": 8, "linear_num_heads": 4, "mlp_layer_types": ["dense", "sparse"]},
    "bailing_hybrid": _KDA | {"linear_head_dim": 8, "first_k_dense_replace": 1},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention"],
        "ssm_state_size": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "chunk_size": 16,
    },
    "granitemoehybrid": _MAMBA2
    | {"layer_types": _LINEAR, "num_local_experts": 4, "shared_intermediate_size": 16},
    "jamba": _MAMBA
    | {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "bamba": _MAMBA2 | {"attn_layer_indices": [1]},
    "falcon_h1": _MAMBA2 | {"mamba_d_ssm": 64},
    "minimax": {"layer_types": _LINEAR, "num_local_experts": 4, "block_size": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "lfm3": {"layer_types": ["conv", "full_attention"], "sliding_window": 7},
    "mamba": {"state_size": 4},
    "mamba2": {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 16},
    "falcon_mamba": {"state_size": 4},
    "zamba": _MAMBA
    | {"layers_block_type": ["mamba", "hybrid", "hybrid"], "mamba_dt_rank": 4}
    | {"num_hidden_layers": 3},
    "zamba2": _MAMBA
    | {"layers_block_type": ["mamba", "hybrid"], "n_mamba_heads": 4, "chunk_size": 16},
    "zaya": _EXPERTS | {"router_hidden_size": 16, "num_experts_per_tok": 1},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": 7},
}
# Windows narrower than documents, and sinks.
WINDOWS: dict[str, dict[str, Any]] = {
    "gpt_oss": _WINDOW
    | {"num_local_experts": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "gemma3_text": _WINDOW | {"query_pre_attn_scalar": 8},
    "gemma4_text": _WINDOW | {"hidden_size_per_layer_input": 0, "global_head_dim": 8},
    "olmo3": _WINDOW,
    "exaone4": _WINDOW,
    "exaone_moe": _WINDOW | _EXPERTS | {"mlp_layer_types": ["dense", "sparse"]},
    "cohere2": _WINDOW,
    "mimo_v2_flash": _WINDOW | _EXPERTS | {"v_head_dim": 8},
    "afmoe": _WINDOW | _EXPERTS | {"num_dense_layers": 1},
    "mistral": {"sliding_window": 7},
    "granitemoe_swa": _WINDOW | {"num_local_experts": 4},
}
# An indexer that chooses all keys of these documents.
_INDEXER = {"index_topk": 300, "index_n_heads": 2, "index_head_dim": 16, "q_lora_rank": 16}
_INDEXED = _LATENT | _INDEXER | {"n_routed_experts": 4, "num_experts_per_tok": 2}
INDEXED: dict[str, dict[str, Any]] = {
    "deepseek_v32": _INDEXED | {"moe_intermediate_size": 16, "first_k_dense_replace": 1},
    "glm_moe_dsa": _INDEXED
    | {"moe_intermediate_size": 16, "mlp_layer_types": ["dense", "sparse"]}
    | {"indexer_types": ["full", "shared"]},
}


def build(family: str, **settings: Any) -> Any:
    """Build a model of this family with random weights, float32."""
    torch.manual_seed(0)
    given = SMALL | (STATES | WINDOWS | INDEXED).get(family, {}) | settings
    config = AutoConfig.for_model(family, **given)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def decided(model: Any, *assignments: str) -> Attention:
    """Let a model on the CPU attend as a run would, after its trials."""
    given = ["model.path=unread", "data.max_length=128", *assignments]
    config, cpu = load_config(REPOSITORY / "examples/demo.yaml", given, {}), torch.device("cpu")
    trial = LogitsTrial(model, config, cpu, lambda leak: [leak])
    return decide_attention(model, config, config.data.max_length, cpu, trial)
