"""Read an architecture's settings: experts in total and per token, and heads.

No other file names such a setting. It imports no torch.
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # a plan reads config.json first: torch's import takes seconds
    from transformers import PreTrainedModel

EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "moe_topk", "moe_top_k", "top_k_experts")
_HEADS = re.compile(r"num_(attention|query)_heads")  # some layers may have another number


class Heads(NamedTuple):
    """The heads of a layer, and the elements of one's key and of its value."""

    queries: int
    keys: int
    key_width: int
    value_width: int


def heads(settings: Any) -> Heads:
    """Return the heads of a layer, by its settings; zeros where these do not say them."""
    queries = number(settings, "num_attention_heads")
    width = number(settings, "head_dim") or number(settings, "hidden_size") // max(1, queries)
    if latent := number(settings, "qk_nope_head_dim"):
        width = latent + number(settings, "qk_rope_head_dim")
    keys = number(settings, "num_key_value_heads") or queries
    return Heads(queries, keys, width, number(settings, "v_head_dim") or width)


def numbers_of_heads(model: PreTrainedModel) -> list[int]:
    """Return how many heads layers have, each number once."""
    layers = model.config.get_text_config().per_layer_config
    settings = [each for layer in layers for each in layer.to_dict().items()]
    values = [value for name, value in settings if _HEADS.search(name)]
    lists = [value if isinstance(value, list) else [value] for value in values]
    return sorted({n for each in lists for n in each if isinstance(n, int)})


def number(settings: Any, *names: str) -> int:
    """Return the first of these settings that is a number, the same in all layers, or 0."""
    for name in names:
        # transformers raises this for a setting that differs from layer to layer.
        with contextlib.suppress(RuntimeError):
            value = getattr(settings, name, None)
            if isinstance(value, list) and value and value.count(value[0]) == len(value):
                value = value[0]  # of each layer
            if isinstance(value, int):
                return value
    return 0


def most_of_layers(model: PreTrainedModel, *names: str) -> int:
    """Return the largest value in any layer of the first of these settings that has one, or 0."""
    settings: Any = model.config.get_text_config()
    layers = settings.per_layer_config
    values = [[getattr(layer, name, None) for layer in layers] for name in names]
    # Hunyuan may have a list, with a number for each layer.
    lists = [[n for v in each for n in (v if isinstance(v, list) else [v])] for each in values]
    numbers = ([n for n in each if isinstance(n, int)] for each in lists)
    return max(next(filter(None, numbers), [0]))


def top_k(model: PreTrainedModel) -> int:
    """Return how many of the experts a token meets at most, in any layer; 1 without experts."""
    return most_of_layers(model, *TOP_K) or 1
