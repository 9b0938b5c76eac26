"""Perplexity over the evaluation set: each trained token counts once, on any number of ranks."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from shardtune.data.batch import build_batch
from shardtune.data.dataset import TokenDataset
from shardtune.data.packing import plan_rows
from shardtune.data.schedule import assign_rows
from shardtune.distributed.progress import Phase
from shardtune.distributed.signals import StopRequest
from shardtune.log import logger
from shardtune.model.build import forward_only
from shardtune.model.flops import cost_of
from shardtune.model.loss import summed_loss
from shardtune.training.context import TrainContext
from shardtune.training.garbage_collection import micro_batch_ended


def evaluate(context: TrainContext, step: int, stop: StopRequest | None = None) -> bool:
    """Log the perplexity over the evaluation data; step 0 is the baseline. Collective.

    Return False on every rank, and log nothing, if a signal on any rank cut the evaluation short.
    """
    dataset = context.data.eval
    assert dataset
    context.run.world.progress.enter(Phase.EVALUATING, step)
    nll_sum = _nll_sum(context, dataset, stop)
    if nll_sum is None:
        return False
    tokens = int(dataset.trained_counts.sum())
    loss = nll_sum.item() / tokens  # nats per token
    perplexity = math.inf if loss >= 709 else math.exp(loss)  # exp overflows a float there
    label, at_step = ("Baseline", "") if step == 0 else ("Eval", f" | Step: {step}")
    logger.info(
        f"{label} Perplexity: {perplexity:.4f} | Loss: {loss:.4f} | Tokens: {tokens}{at_step}"
    )
    context.metrics.write("eval", step=step, loss=loss, perplexity=perplexity, tokens=tokens)
    return True


def _nll_sum(
    context: TrainContext, dataset: TokenDataset, stop: StopRequest | None
) -> torch.Tensor | None:
    """Return the negative log-likelihoods of `dataset`, summed over all ranks: a float64 scalar.

    Return None on every rank if any has received a signal; they ask after each micro-batch.
    """
    config, world, model = context.run.config, context.run.world, context.model
    rows = plan_rows(dataset.lengths, config.data.max_length, config.data.packing, seed=0, epoch=0)
    costs = cost_of(model).per_row(
        rows, dataset.lengths[rows.members], dataset.trained_counts[rows.members]
    )
    micro_batches = assign_rows(rows, costs, world.rank, world.size, config.train.micro_batch_size)
    nll_sum = torch.zeros((), dtype=torch.float64, device=world.device)
    with forward_only(model):
        for sequences in micro_batches:
            batch = build_batch(dataset, sequences, context.is_flat).to(world.device)
            nll_sum += summed_loss(model, batch)
            micro_batch_ended()
            if stop and world.all_reduce_max(stop.received is not None)[0]:
                return None
    with world.progress.waiting():
        dist.all_reduce(nll_sum)
    return nll_sum
