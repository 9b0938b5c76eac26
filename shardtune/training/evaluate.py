"""Perplexity over the evaluation set: each trained token counts once, on any number of ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from shardtune.config import Config
from shardtune.data.batch import build_batch
from shardtune.data.dataset import TokenDataset
from shardtune.data.order import plan_rows
from shardtune.data.schedule import assign_rows
from shardtune.distributed.progress import Phase
from shardtune.distributed.signals import StopRequest
from shardtune.distributed.world import World
from shardtune.log import logger
from shardtune.model.build import forward_only
from shardtune.model.flops import cost_of
from shardtune.model.loss import summed_loss
from shardtune.training.context import TrainContext
from shardtune.training.garbage_collection import micro_batch_ended

_ASK_TO_STOP_EVERY_S = 2.0


@dataclass(frozen=True)
class Evaluation:
    loss: float  # nats per token
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp(loss); infinity where that is beyond a float."""
        return math.inf if self.loss >= 709 else math.exp(self.loss)


def evaluate_and_log(context: TrainContext, step: int, stop: StopRequest | None = None) -> bool:
    """Log the perplexity over the evaluation data; step 0 is the baseline. Collective.

    Return False on every rank, and log nothing, if a signal on any rank cut the evaluation short.
    """
    assert context.data.eval
    context.run.world.progress.enter(Phase.EVALUATING, step)
    evaluation = evaluate(
        context.model,
        context.data.eval,
        context.run.config,
        context.is_flat,
        context.run.world,
        lambda: stop is not None and stop.received is not None,
    )
    if evaluation is None:
        return False
    label, at_step = ("Baseline", "") if step == 0 else ("Eval", f" | Step: {step}")
    logger.info(
        f"{label} Perplexity: {evaluation.perplexity:.4f} | Loss: {evaluation.loss:.4f} | "
        f"Tokens: {evaluation.tokens}{at_step}"
    )
    context.metrics.write(
        "eval",
        step=step,
        loss=evaluation.loss,
        perplexity=evaluation.perplexity,
        tokens=evaluation.tokens,
    )
    return True


def evaluate(
    model: PreTrainedModel,
    dataset: TokenDataset,
    config: Config,
    is_flat: bool,
    world: World,
    must_stop: Callable[[], bool],
) -> Evaluation | None:
    """Return the loss over `dataset`, summed in float64 over micro-batches and ranks. Collective.

    Return None on every rank if `must_stop` is true on any. Ranks ask one another after the same
    micro-batches, some seconds apart by the pace of the slowest.
    """
    rows = plan_rows(dataset.lengths, config.data.max_length, config.data.packing, seed=0, epoch=0)
    costs = cost_of(model).per_row(
        rows, dataset.lengths[rows.members], dataset.trained_counts[rows.members]
    )
    micro_batches = assign_rows(rows, costs, world.rank, world.size, config.train.micro_batch_size)
    nll_sum = torch.zeros((), dtype=torch.float64, device=world.device)
    started, ask_after = time.monotonic(), 1
    with forward_only(model):
        for number, sequences in enumerate(micro_batches, start=1):
            batch = build_batch(dataset, sequences, is_flat).to(world.device)
            nll_sum += summed_loss(model, batch)
            micro_batch_ended()
            if number == ask_after:
                must_stop_somewhere, seconds = world.all_reduce_max(
                    must_stop(), time.monotonic() - started
                )
                if must_stop_somewhere:
                    return None
                ask_after += max(1, int(number / seconds * _ASK_TO_STOP_EVERY_S))
    with world.progress.waiting():
        dist.all_reduce(nll_sum)
    tokens = int(dataset.trained_counts.sum())
    return Evaluation(nll_sum.item() / tokens, tokens)
