"""Perplexity over the evaluation set: a sum over its trained tokens, each counted exactly once on any ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from shardtune.data.batch import build_batch
from shardtune.data.dataset import TokenDataset
from shardtune.data.order import plan_rows
from shardtune.data.schedule import assign_rows
from shardtune.distributed.world import World
from shardtune.model.build import forward_only
from shardtune.model.flops import cost_of
from shardtune.model.loss import summed_loss
from shardtune.training.garbage_collection import micro_batch_ended

_ASKS_EVERY_S = 2.0


@dataclass(frozen=True)
class Evaluation:
    loss: float  # nats per token
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp(loss); infinity where that is beyond a float."""
        return math.inf if self.loss >= 709 else math.exp(self.loss)


def evaluate(
    model: PreTrainedModel,
    dataset: TokenDataset,
    world: World,
    *,
    max_length: int,
    packing: bool,
    is_flat: bool,
    rows_per_micro_batch: int,
    must_stop: Callable[[], bool],
) -> Evaluation | None:
    """The loss over `dataset`, summed in float64 over micro-batches and ranks.

    None on every rank if `must_stop` is true on any. They ask one another every few seconds, not after every
    micro-batch, and at those that the pace of the slowest chooses for all.
    """
    rows = plan_rows(dataset.lengths, max_length, packing, seed=0, epoch=0)
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    costs = cost_of(model).of_rows(
        rows, dataset.lengths[rows.members], dataset.trained_counts[rows.members]
    )
    dealt = assign_rows(rows, costs, world.rank, world.size, rows_per_micro_batch)
    started, ask_after = time.monotonic(), 1
    with forward_only(model):
        for number, sequences in enumerate(dealt, start=1):
            total += summed_loss(model, build_batch(dataset, sequences, is_flat).to(world.device))
            micro_batch_ended()
            if number == ask_after:
                is_asked, seconds = world.all_reduce_max(must_stop(), time.monotonic() - started)
                if is_asked:
                    return None
                ask_after += max(1, int(number / seconds * _ASKS_EVERY_S))
    with world.progress.waiting():
        dist.all_reduce(total)
    tokens = int(dataset.trained_counts.sum())
    return Evaluation(total.item() / tokens, tokens)
