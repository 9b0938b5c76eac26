"""Perplexity over the evaluation set: each trained token counts once, on any number of ranks."""

from __future__ import annotations

import math
from itertools import chain

import torch
import torch.distributed as dist

from shardtune.data.batch import build_batch
from shardtune.data.dataset import PreparedData, TokenDataset
from shardtune.data.order import lay_out_rows
from shardtune.data.schedule import Schedule, assign_rows
from shardtune.distributed.progress import Phase
from shardtune.distributed.signals import StopRequest
from shardtune.log import logger
from shardtune.metrics_schema import EvalEntry
from shardtune.model.fsdp_groups import forward_only
from shardtune.training.context import TrainContext
from shardtune.training.garbage_collection import collect_if_due
from shardtune.training.observers.metrics import read_entries
from shardtune.training.run import Run


def evaluate(context: TrainContext, step: int, stop: StopRequest | None = None) -> bool:
    """Log the perplexity over all evaluation data, then of each named set. Collective.

    Step 0 is the baseline. Return False on every rank, and log nothing, if a signal on any rank cut
    the evaluation short.
    """
    context.run.world.progress.enter(Phase.EVALUATING, step)
    sums: dict[str, tuple[float, int]] = {}
    for name, dataset in context.data.eval.items():
        nll_sum = _nll_sum(context, dataset, stop)
        if nll_sum is None:
            return False
        sums[name] = nll_sum.item(), int(dataset.trained_counts.sum())
    nll_sums, token_counts = zip(*sums.values(), strict=True)
    entries = [_entry(step, sum(nll_sums), sum(token_counts))]
    entries += [_entry(step, *sums[name]) | {"set": name} for name in sums if name]
    label, at_step = ("Baseline", "") if step == 0 else ("Eval", f" | Step: {step}")
    for entry in entries:
        # A set's line must not match the patterns by which others find steps and the baseline.
        what = f"Perplexity of {entry['set']}" if "set" in entry else f"{label} Perplexity"
        logger.info(
            f"{what}: {entry['perplexity']:.4f} | Loss: {entry['loss']:.4f} | "
            f"Tokens: {entry['tokens']}{at_step}"
        )
    context.metrics.write(*entries)
    if context.best and (best := context.best.offer(entries[0])):
        context.metrics.write(best)
    return True


def _entry(step: int, nll_sum: float, tokens: int) -> EvalEntry:
    loss = nll_sum / tokens  # nats per token
    perplexity = math.inf if loss >= 709 else math.exp(loss)  # exp overflows a float there
    return EvalEntry(kind="eval", step=step, loss=loss, perplexity=perplexity, tokens=tokens)


def _nll_sum(
    context: TrainContext, dataset: TokenDataset, stop: StopRequest | None
) -> torch.Tensor | None:
    """Return the negative log-likelihoods of `dataset`, summed over all ranks: a float64 scalar.

    Return None on every rank if a rank has received a signal.
    """
    config, world, model = context.run.config, context.run.world, context.model
    # Rows are the same at every evaluation, so that two losses differ by the weights alone.
    rows = lay_out_rows(
        dataset.lengths, config.data.max_length, config.data.packing, seed=0, epoch=0
    )
    costs = context.row_cost.per_row(
        rows, dataset.lengths[rows.members], dataset.trained_counts[rows.members]
    )
    micro_batches = assign_rows(
        rows, costs, world.data_rank, world.layout.data_ranks, world.layout.micro_batch_size
    )
    nll_sum = torch.zeros((), dtype=torch.float64, device=world.device)
    with forward_only(model):
        for number, sequences in enumerate(micro_batches):
            batch = build_batch(dataset, sequences, context.is_flat, world.share)
            nll_sum += context.stage.forward(batch.to(world.device))
            collect_if_due()
            # A rank that stopped alone would leave other ranks waiting in a collective: so all ask
            # for signals after the same micro-batch. To ask drains a pipeline: stages ask seldom.
            asks = stop and number % (4 * world.layout.stages - 3) == 0
            if stop and asks and world.all_reduce_max(stop.received is not None)[0]:
                context.stage.finish()
                return None
        context.stage.finish()
    world.progress.meet()
    with world.progress.waiting():
        dist.all_reduce(nll_sum)
    return nll_sum


def find_pending_evaluation(run: Run, data: PreparedData, schedule: Schedule) -> int | None:
    """Return the step whose evaluation must come before the first step, or None.

    It is step 0 for the baseline, or the checkpoint's step if a signal cut its evaluation short.
    """
    # Then the evaluation is due, and metrics.jsonl has the step and no evaluation.
    config, resumed = run.config.eval, run.resumed
    if not data.eval:
        return None
    if resumed is None:
        return 0 if config.baseline else None
    is_leader = run.directory.is_leader(run.world)
    entries = read_entries(run.metrics_file, resumed.step) if is_leader else ()
    here = [entry["kind"] for entry, _ in entries if entry["step"] == resumed.step]
    kinds = set(chain(*run.world.all_gather_json(here)))  # another disk may have been node 0's
    is_missing = "step" in kinds and "eval" not in kinds
    return (
        resumed.step if is_missing and schedule.is_due(resumed.step, config.every_steps) else None
    )
