"""Models whose rows ranks cannot share (`parallel.context`), and why: their shapes are enough.

`attention_check` sees those that attend under a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from shardtune.distributed.world import World
from shardtune.errors import UserError
from shardtune.model.config_json import undivided_heads
from shardtune.model.indexers import indexers
from shardtune.model.stages import require_composable, stage_problems
from shardtune.model.state_layers import state_mixers
from shardtune.model.traits import numbers_of_heads


def context_problems(
    model: PreTrainedModel,
    degree: int,
    max_length: int,
    instead: Callable[[], str] = lambda: "parallel.context=1",
) -> Iterator[str]:
    """Yield why so many ranks cannot share the rows of a model.

    `instead` names the keys of a run without shared rows.
    """
    kind, key = model.config.model_type, f"parallel.context={degree}"
    if degree == 1:
        return
    for heads in numbers_of_heads(model):
        if problem := undivided_heads(degree, heads, kind):
            yield problem
    if state_mixers(model):
        yield (
            f"{key}: layers of {kind} hand a state along the row, of which a rank has a slice - "
            f"use {instead()}"
        )
    of_indexers: list[Any] = indexers(model)
    chosen = [indexer.index_topk for indexer in of_indexers]
    if chosen and max_length > min(chosen):
        yield (
            f"{key}: indexers of {kind} choose {min(chosen)} keys of the row, of which a rank has "
            f"a slice - use parallel.context=1, or data.max_length={min(chosen)}"
        )


def without_context(model: PreTrainedModel, world: World) -> str:
    """Return the keys of a run without shared rows: in stages, where these can be cut.

    As many data ranks are left, so that the batch stays the same.
    """
    alone, layout = "parallel.context=1", world.layout
    stages = layout.stages * layout.context
    accumulation = max(layout.micro_batches, stages)
    other = replace(layout, context=1, stages=stages, micro_batches=accumulation)
    nodes = [rank // world.local_size for rank in range(world.size)]
    if other.problems(nodes) or [*stage_problems(model, other)]:
        return alone
    try:
        require_composable(other, model.config)
    except UserError:
        return alone
    steps = f" train.gradient_accumulation_steps={accumulation}"
    more = steps * (accumulation > layout.micro_batches)
    return f"{alone} parallel.stages={stages}{more}"
