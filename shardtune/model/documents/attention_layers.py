"""Keep documents apart in layers whose attention is their own: one call for each document.

Layers with capped scores, with a bias, with compressed keys or with a mask that knows no documents
attend in code of their own. Such a layer takes the documents of a flat row one by one. The rest of
the model, experts among it, takes the whole row.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shardtune.model.documents.one_by_one import call_one_by_one, restore
from shardtune.model.documents.state_layers import state_mixers
from shardtune.model.traits import layer_types


class OneByOne:
    """Lets a model's attention take documents one by one, until it is removed."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._tables = position_tables(model)
        self._modules = [*attention_layers(model), *self._tables]
        for module in self._modules:
            call_one_by_one(module)
        self._hook = model.register_forward_pre_hook(self._hide_documents, with_kwargs=True)

    @property
    def is_used(self) -> bool:
        return bool(self._modules)

    def remove(self) -> None:
        self._hook.remove()
        for module in self._modules:
            restore(module)

    def _hide_documents(self, _: nn.Module, ordered: Any, named: dict[str, Any]) -> Any:
        """Let the model make the masks of a row without documents."""
        # If transformers gets a mask of tokens, it does not look for documents in the positions.
        # Learned tables of positions count tokens themselves. Some do not begin at 0.
        named = named | {"attention_mask": torch.ones_like(named["input_ids"])}
        if self._tables:
            named.pop("position_ids", None)
        return ordered, named


def attention_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules that attend under a mask and keep no state."""
    named_so = [m for m in model.modules() if "attention" in type(m).__name__.lower()]
    masked = [m for m in named_so if any("mask" in name for name in _takes(m))]
    inner = {m for module in masked for m in [*module.modules()][1:]}
    left_out = {*inner, *state_mixers(model)}
    return [module for module in masked if module not in left_out]


def position_tables(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules that count positions themselves and look them up."""
    counts = {"input_ids", "past_key_values_length"}
    modules = (m for m in model.modules() if not isinstance(m, PreTrainedModel))
    return [module for module in modules if counts <= _takes(module)]


def keeps_states_only(model: PreTrainedModel) -> bool:
    """Return whether every layer hands a state along the row instead of attending."""
    if types := layer_types(model.config.get_text_config()):
        return set(types) == {"linear_attention"}
    decoder: Any = model.get_decoder()
    return "position_ids" not in _takes(decoder) and not attention_layers(model)


def _takes(module: nn.Module) -> set[str]:
    return {*inspect.signature(type(module).forward).parameters}


_INDEXED = "indexed_attention"  # among the types of layers


def indexers(model: PreTrainedModel) -> list[Any]:
    return [m for m in model.modules() if hasattr(m, "index_topk") and hasattr(m, "wq_b")]


def dense_attention(model: PreTrainedModel, longest: int) -> DenseAttention | None:
    """Let a model attend densely if its indexers choose all keys of the longest document."""
    numbers = [indexer.index_topk for indexer in indexers(model)]
    chooses_all = numbers and longest <= min(numbers)
    return DenseAttention(model) if chooses_all else None


class DenseAttention:
    """Lets a model attend to all keys, until it is removed.

    An indexer of DeepSeek's sparse attention (arXiv 2512.02556) scores every key for every query
    and leaves the best `index_topk` to attention. It has no gradient. If no document has more
    tokens, all keys are left, so that a flat row needs neither scores nor a mask.
    """

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
