"""Perplexity over the evaluation set: a sum over its trained tokens, each counted exactly once on any ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from .dataset import TokenDataset
from .loss import summed_loss
from .model import forward_only
from .packing import build_batch, cost_of, deal, plan_rows
from .world import World


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
) -> Evaluation:
    """The loss over `dataset`, summed in float64 over micro-batches and ranks."""
    rows = plan_rows(dataset.lengths, max_length, packing, seed=0, epoch=0)
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    lengths = dataset.lengths[rows.members]
    with forward_only(model):
        for sequences in deal(rows, lengths, cost_of(model), world.rank, world.size, rows_per_micro_batch):
            total += summed_loss(model, build_batch(dataset, sequences, is_flat).to(world.device))
    with world.progress.waiting():
        dist.all_reduce(total)
    tokens = int(dataset.trained_counts.sum())
    return Evaluation(total.item() / tokens, tokens)
