"""Refuse models whose rows ranks cannot share: their shapes are enough.

`attention_check` refuses models that attend under a mask.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from transformers import PreTrainedModel

from shardtune.model.documents.indexers import indexers
from shardtune.model.documents.state_layers import state_mixers
from shardtune.model.source.config_json import undivided_heads
from shardtune.model.traits import numbers_of_heads


def context_problems(model: PreTrainedModel, degree: int, max_length: int) -> Iterator[str]:
    """Yield why `degree` ranks cannot share the rows of a model."""
    kind, key = model.config.model_type, f"parallel.context={degree}"
    if degree == 1:
        return
    for heads in numbers_of_heads(model):
        if problem := undivided_heads(degree, heads, kind):
            yield problem
    yield from row_problems(model, key, max_length)


def row_problems(model: PreTrainedModel, key: str, max_length: int = sys.maxsize) -> Iterator[str]:
    """Yield what a rank with a slice of a row cannot compute. `key`: a key with its value."""
    kind, alone = model.config.model_type, f"{key.partition('=')[0]}=1"
    if state_mixers(model):
        yield (
            f"{key}: layers of {kind} hand a state along the row, of which a rank has a slice - "
            f"use {alone}"
        )
    chosen = [indexer.index_topk for indexer in indexers(model)]
    if chosen and max_length > min(chosen):
        shorter = f", or data.max_length={min(chosen)}" * (max_length < sys.maxsize)
        yield (
            f"{key}: indexers of {kind} choose {min(chosen)} keys of the row, of which a rank has "
            f"a slice - use {alone}{shorter}"
        )
