"""Plan an architecture that transformers does not know, by one of the same shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

from shardtune.data.model_type import type_by_another_name
from shardtune.errors import UserError, first_line

_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def stand_in(path: str) -> tuple[PreTrainedConfig, str] | None:
    """Return a known architecture with the numbers of a directory's config.json, and why; or None
    where transformers knows the architecture, or the file is missing.

    The stand-in has every layer's dense product and all of its experts, so it is hardly smaller.

    Raises:
        UserError: the file lacks a number that it takes.
    """
    try:
        given = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
        kind = given.get("model_type")
    except (OSError, ValueError, AttributeError):
        return None
    if not isinstance(kind, str) or kind in CONFIG_MAPPING or type_by_another_name(given):
        return None
    text = given.get("text_config")
    given |= text if isinstance(text, dict) else {}
    if missing := [name for name in _NEEDED if not isinstance(given.get(name), int)]:
        raise UserError(
            f"model.path={path}: transformers does not know the architecture {kind}, and its "
            f"config.json lacks {', '.join(missing)} for a bound - plan a model of like shapes"
        )
    try:
        return _of_known_shapes(given, kind)
    except Exception as error:  # whatever transformers raises of odd numbers
        raise UserError(
            f"model.path={path}: transformers does not know the architecture {kind}, and its "
            f"config.json has no shapes for a bound ({first_line(error)}) - plan a model of like "
            "shapes"
        ) from error


def _of_known_shapes(given: dict[str, Any], kind: str) -> tuple[PreTrainedConfig, str]:
    hidden, experts = given["hidden_size"], next((given[n] for n in _EXPERTS if given.get(n)), 0)
    shapes: dict[str, Any] = {name: given[name] for name in _NEEDED} | {
        "intermediate_size": given.get("intermediate_size") or 4 * hidden,
        "num_key_value_heads": given.get("num_key_value_heads") or given["num_attention_heads"],
        "head_dim": given.get("head_dim") or hidden // given["num_attention_heads"],
        "max_position_embeddings": given.get("max_position_embeddings") or 1 << 20,
        "tie_word_embeddings": bool(given.get("tie_word_embeddings")),
    }
    reason = f"transformers does not know {kind}, and a run of it is refused"
    if not experts:
        return LlamaConfig(**shapes), f"{reason}; its shapes are taken for those of Llama"
    config = Qwen3MoeConfig(
        **shapes,
        num_experts=experts,
        num_experts_per_tok=given.get("num_experts_per_tok") or 1,
        moe_intermediate_size=given.get("moe_intermediate_size") or shapes["intermediate_size"],
    )
    return config, f"{reason}; its shapes are taken for those of Qwen3-MoE"
