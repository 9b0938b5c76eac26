"""Refuse models whose rows ranks cannot share (`parallel.context`): their shapes are enough.

`attention_check` refuses models that attend under a mask.
"""

from __future__ import annotations

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
    if state_mixers(model):
        yield (
            f"{key}: layers of {kind} hand a state along the row, of which a rank has a slice - "
            "use parallel.context=1"
        )
    chosen = [indexer.index_topk for indexer in indexers(model)]
    if chosen and max_length > min(chosen):
        yield (
            f"{key}: indexers of {kind} choose {min(chosen)} keys of the row, of which a rank has "
            f"a slice - use parallel.context=1, or data.max_length={min(chosen)}"
        )
