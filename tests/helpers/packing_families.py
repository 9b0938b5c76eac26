"""Tiny models with layers that keep a state, with windows or with sinks, in flat rows."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from helpers.commands import REPOSITORY
from helpers.tiny_models import VOCABULARY
from shardtune.config_io import load_config
from shardtune.distributed.layout import Layout
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
# Attention of their own, called once per document. Keys of DeepSeek V4 are compressed from 4 and 8
# tokens, and an indexer leaves some of them out; and from 128, which some documents lack.
_COMPRESSED = ["sliding_attention", *["compressed_sparse_attention"] * 2]
_COMPRESSED += ["heavily_compressed_attention"]
_FEW = {"n_head": 4, "n_layer": 2}
_NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
ONE_BY_ONE: dict[str, dict[str, Any]] = {
    "deepseek_v4": _EXPERTS
    | {"layer_types": _COMPRESSED, "compress_rate_hca": 128}
    | {"num_hidden_layers": 4, "n_routed_experts": 4, "sliding_window": 7, "index_topk": 3}
    | {"q_lora_rank": 16, "o_groups": 2, "o_lora_rank": 8, "index_n_heads": 2}
    | {"head_dim": 16, "num_key_value_heads": 1, "index_head_dim": 16, "partial_rotary_factor": 0.5}
    | {"mlp_layer_types": ["hash_moe", "moe", "moe", "moe"]},
    "bloom": _FEW,
    "falcon": {
        "head_dim": None,
        "alibi": True,
        "num_kv_heads": 4,
        "new_decoder_architecture": False,
    },
    "gptj": _FEW | {"n_embd": 32, "rotary_dim": 4, "n_positions": 512},
    "openai-gpt": _FEW | _NO_DROPOUT | {"n_embd": 32, "n_positions": 512},
    "xglm": {"d_model": 32, "ffn_dim": 32, "num_layers": 2, "attention_heads": 4}
    | {"dropout": 0.0, "attention_dropout": 0.0},
    "trocr": {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4} | {"dropout": 0.0},
    "gemma2": _WINDOW | {"query_pre_attn_scalar": 8},
}


def build(family: str, **settings: Any) -> Any:
    """Build a model of this family with random weights, float32."""
    torch.manual_seed(0)
    given = SMALL | (STATES | WINDOWS | INDEXED | ONE_BY_ONE).get(family, {}) | settings
    known = {name: value for name, value in given.items() if value is not None}
    config = AutoConfig.for_model(family, **known)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.config.use_cache = False  # as in a run: in eval mode a cache would be changed in place
    return model


def decided(model: Any, *assignments: str) -> Attention:
    """Let a model on the CPU attend as a run would, after its trials."""
    given = ["model.path=unread", "data.max_length=128", *assignments]
    config, cpu = load_config(REPOSITORY / "examples/demo.yaml", given, {}), torch.device("cpu")
    model.config.use_cache = False
    return decide_attention(LogitsTrial(model, Layout.of(config), cpu), config.data.max_length)
