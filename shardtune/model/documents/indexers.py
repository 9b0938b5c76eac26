"""Attend densely where an indexer chooses all keys (DeepSeek sparse attention, arXiv 2512.02556).

An indexer scores every key for every query and leaves the best `index_topk` to attention. It has no
gradient. If no document has more than `index_topk` tokens, all keys are left, so that a flat row
needs neither scores nor a mask.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shardtune.model.traits import layer_types

_INDEXED = "indexed_attention"  # among the types of layers


def indexers(model: PreTrainedModel) -> list[Any]:
    return [m for m in model.modules() if hasattr(m, "index_topk") and hasattr(m, "wq_b")]


def dense_attention(model: PreTrainedModel, longest: int) -> DenseAttention | None:
    """Let a model attend densely if its indexers choose all keys of the longest document."""
    numbers = [indexer.index_topk for indexer in indexers(model)]
    chooses_all = numbers and longest <= min(numbers)
    return DenseAttention(model) if chooses_all else None


class DenseAttention:
    """Lets a model attend to all keys, until it is removed."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._indexers = indexers(model)
        # An empty tensor stands for choices and masks that attention does not read.
        nothing = torch.empty(1, 1, 0, 0, dtype=torch.bool)
        types = {*layer_types(model.config.get_text_config()), _INDEXED}
        masks = {kind: nothing if kind == _INDEXED else None for kind in types}
        for indexer in self._indexers:
            indexer.forward = partial(_choose_all, nothing)
        self._hook = model.register_forward_pre_hook(partial(_give_masks, masks), with_kwargs=True)

    def remove(self) -> None:
        self._hook.remove()
        for indexer in self._indexers:
            vars(indexer).pop("forward", None)


def _choose_all(nothing: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return nothing


def _give_masks(masks: Any, _: nn.Module, ordered: Any, named: dict[str, Any]) -> Any:
    return ordered, named | {"attention_mask": masks}


def describe_indexers(model: PreTrainedModel, longest: int) -> str | None:
    """Return the log's line on a model's indexers, or None without any."""
    numbers = [indexer.index_topk for indexer in indexers(model)]
    if not numbers:
        return None
    number = numbers[0]
    how = (
        f"attention is dense, since no document of the data has more than {number} tokens"
        if longest <= number
        else f"each token sees the {number} keys that they choose"
    )
    return f"Indexers: {len(numbers)}, which get no gradient; {how}"
