"""Build a tiny model of any architecture of transformers from its default configuration.

Widths become small, and the first layer of each kind stays, so that windows, states and experts
stay, too. `_OF_KIND` has the settings that do not follow from names.
"""

import copy
import re
from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

VOCABULARY = 160
_HEADS, _KEY_HEADS, _WIDTH = 4, 2, 8
WINDOW = 8  # narrower than the longest document
# The largest value of a setting whose name matches; the first match counts.
_SIZES: tuple[tuple[str, int], ...] = (
    (r"(.*_)?vocab_size.*", VOCABULARY),
    (r"n_group|topk_group|num_nextn_predict_layers|mtp_num_hidden_layers|num_mtp_modules", 1),
    (r"(moe_)?num_shared_experts|n_shared_experts", 1),
    (r"(moe_)?(num|n)_(local_|routed_)?experts|moe_num_primary_experts|expert_num", 4),
    (r"(num_)?experts_per_tok(en)?|(moe_)?top_?k(_experts)?|moe_k", 2),
    (r"(.*_)?first_k_dense_replace|num_dense_layers|.*first_dense_layers", 1),
    (r"index_topk", 300),
    (r"(.*_)?index_n_heads|linear_num_key_heads", 2),
    (r"(.*_)?index_head_dim", 16),
    (r"(sliding|attention|local|block)_window(_size)?|window_size|attention_chunk_size", WINDOW),
    (r"(mamba_)?(chunk_size|block_size)", 16),
    (r".*(lora_rank|_rank|low_rank_dim)", 8),
    (r"(.*_)?(state_size|d_state|ssm_size|state_dim)", 8),
    (r"mamba_(d_head|head_dim|headdim)", 16),
    (r"(.*_)?(head_dim|head_size|d_head|head_width|kv_channels)|d_kv|dim_head", _WIDTH),
    (r"(.*_)?(num|n)_(key_value|kv)_heads|num_kv_heads|multi_query_group_num", _KEY_HEADS),
    (r"(.*_)?((num|n)_(attention_|linear_|value_|query_)?heads?|attention_heads)", _HEADS),
    (r"(shared_)?(expert_|moe_|router_).*(intermediate|hidden)_size", 16),
    (r"(.*_)?(intermediate_size(_\w+)?|ffn_dim|ffn_hidden_size|d_ff|n_inner|dim_ff)", 32),
    (r"(.*_)?(hidden_size|hidden_dim|d_model|n_embd|embed_dim|embedding_size|proj_dim)", 32),
    (r"(.*_)?(hidden_size_per_layer_input|width|lru_width|dim|embedding_dim)", 32),
    (r"(.*_)?(max_position_embeddings|n_positions|n_ctx|max_seq_len|seq_length)", 512),
)
_LAYERS = re.compile(r"(.*_)?(num_hidden_layers|n_layers?|num_layers|depth)|(en|de)coder_layers")
_LINEAR = ["linear_attention", "full_attention"]
_CONVOLUTIONS = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
_IMAGE_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_IMAGES = ["cosmos3_edge", "glm46v", "glm4v", "glm_ocr", "glmga", "hunyuan_vl", "paddleocr_vl"]
_IMAGES += ["qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_thinker"]
_INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8}
# Settings that do not follow from names, by type of model.
_OF_KIND: dict[str, dict[str, Any]] = {
    **{kind: {"rope_parameters": _IMAGE_ROPE} for kind in _IMAGES},
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm2_vl"), _CONVOLUTIONS),
    "bailing_hybrid": {"num_expert_group": 1},
    "bamba": {"attn_layer_indices": [1]},
    "chameleon": {"vocabulary_map": {"<image>": 150, "IMGIMGAZ": 152, "<|extra_200|>": 151}},
    "codegen": {"rotary_dim": 4},
    "cohere_compass": {"rope_parameters": {"full_attention": _IMAGE_ROPE}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _IMAGE_ROPE}},
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "index_topk": 3,
    },
    "dots1": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "glm4v_moe": {"rope_parameters": _IMAGE_ROPE | {"mrope_section": [1, 1, 0]}},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {"layer_types": _LINEAR},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "glm5_next": {"index_kpool": 4},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "longcat_flash": {"zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "n_groups": 2},
    "mistral4": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"n_groups": 2},
    "nemotron_h_omni": {"n_groups": 2},
    "nemo_speechlm": {
        "n_groups": 2,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    },
    "qwen4_exp": _INDEXER | {"indexer_budget": 64, "indexer_compress_ratio": 4},
    "qwen4_exp_text": _INDEXER | {"indexer_budget": 64, "indexer_compress_ratio": 4},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "step3p7": {
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": WINDOW,
    },
}


def tiny_config(kind: str) -> PreTrainedConfig:
    """Return the configuration of a tiny model of this type."""
    return tiny_like(CONFIG_MAPPING[kind]())


def tiny_like(source: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of a tiny model of the same architecture."""
    given, kind = _narrow(source.to_dict(), source), source.model_type
    text = given.get("text_config") or given
    for name, value in copy.deepcopy(_OF_KIND.get(kind, {})).items():
        section = given if name in given else text
        is_part = isinstance(value, dict) and isinstance(section.get(name), dict)
        section[name] = section[name] | value if is_part else value
    given.pop("model_type", None)
    return type(source).from_dict(given)


def _narrow(values: dict[str, Any], config: PreTrainedConfig) -> dict[str, Any]:
    """Return the settings of a configuration, and of those within it, with small sizes."""
    given: dict[str, Any] = {}
    for name, value in values.items():
        section = vars(config).get(name)
        if isinstance(section, PreTrainedConfig) and isinstance(value, dict):
            given[name] = _narrow(value, section)
        else:
            given[name] = _sized(name, value)
    _keep_equal_heads(given, values)
    if given.get("qk_head_dim"):
        given["qk_head_dim"] = given["qk_nope_head_dim"] + given["qk_rope_head_dim"]
    if "head_dim" in values and not values["head_dim"]:
        given["head_dim"] = given.get("qk_rope_head_dim") or _WIDTH
    _shorten_rope(given)
    return _with_fewer_layers(given, values)


def _shorten_rope(given: dict[str, Any]) -> None:
    """Divide the fewer frequencies of a shortened rope among the axes of an image."""
    rope = given.get("rope_parameters") or {}
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if not isinstance(part.get("mrope_section"), list):
            continue
        width = given.get("head_dim") or given["hidden_size"] // given["num_attention_heads"]
        frequencies = int(width * part.get("partial_rotary_factor", 1)) // 2
        others = len(part["mrope_section"]) - 1
        share = frequencies // (others + 1)
        part["mrope_section"] = [frequencies - share * others] + [share] * others


def _sized(name: str, value: Any) -> Any:
    if isinstance(value, float) and re.search("drop|jitter", name):
        return 0.0
    if re.fullmatch("initializer_range|init_std", name):
        return 0.1
    if name.endswith(("_token_id", "_token_index")):
        return _token(name, value)
    size = next((size for pattern, size in _SIZES if re.fullmatch(pattern, name)), None)
    if size is None:
        return value
    if isinstance(value, list):
        return [_sized(name, element) for element in value]
    return min(size, value) if type(value) is int else value


def _token(name: str, value: Any) -> Any:
    """Return the id of a special token: one of the first three of the vocabulary, or its last."""
    usual = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    if isinstance(value, list):
        return [_token(name, value[0])] if value else value
    return usual.get(name, min(VOCABULARY - 1, value)) if type(value) is int else value


def _with_fewer_layers(given: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Keep the first layer of each kind, at least two; a kind is a layer's values in all lists."""
    numbers = {n: v for n, v in values.items() if type(v) is int and _LAYERS.fullmatch(n)}
    if not numbers:
        return given
    whole = numbers.get("num_hidden_layers", max(numbers.values()))
    lists = {n: v for n, v in values.items() if isinstance(v, list) and len(v) == whole > 2}
    kinds: dict[str, int] = {}
    for layer in range(whole):
        kinds.setdefault(repr([values_[layer] for values_ in lists.values()]), layer)
    chosen = sorted(kinds.values())[:4]  # some have a number that differs in each layer
    if len(chosen) < 2:
        chosen = list(range(min(2, whole)))
    if per_layer := values.get("per_layer_config"):
        given["per_layer_config"] = {}
        for i, layer in enumerate(chosen):
            settings = per_layer.get(f"{layer:02d}", {})
            narrow = {name: _sized(name, value) for name, value in settings.items()}
            _keep_equal_heads(narrow, settings)
            if "qk_nope_head_dim" in narrow:  # layers with a window have wider heads
                rope = narrow.get("qk_rope_head_dim", given["qk_rope_head_dim"])
                narrow["head_dim"] = narrow["qk_nope_head_dim"] + rope
            given["per_layer_config"][f"{i:02d}"] = narrow
    for name, value in lists.items():
        given[name] = [_sized(name, value[layer]) for layer in chosen]
    return given | {n: min(v, len(chosen)) for n, v in numbers.items()}


def _keep_equal_heads(given: dict[str, Any], values: Mapping[str, Any]) -> None:
    heads, keys = (values.get(f"num_{kind}_heads") for kind in ("attention", "key_value"))
    if heads and heads == keys:
        given["num_key_value_heads"] = given["num_attention_heads"]
