"""The type of a model, by which transformers reads its configuration and its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

# Names that models have for a type of transformers. Any other is refused: its code may differ.
_SAME_AS = {"kimi_k2": "deepseek_v3"}


def read_config_json(path: str) -> PreTrainedConfig:
    """Read a config.json, also one that has a name of its own for a type of transformers.

    Raises:
        ValueError: transformers knows neither.
    """
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(path)
    except ValueError:
        given, _ = PreTrainedConfig.get_config_dict(path)
        kind = type_by_another_name(given)
        if kind is None:
            raise
        config = CONFIG_MAPPING[kind].from_dict(given | {"model_type": kind}, name_or_path=path)
    return config


def type_by_another_name(given: Mapping[str, Any]) -> str | None:
    """Return transformers' type of a model of another name for it, else None."""
    return _SAME_AS.get(given.get("model_type", ""))
