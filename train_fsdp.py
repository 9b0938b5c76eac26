#!/usr/bin/env python3
"""Fine-tune a HuggingFace causal language model with PyTorch FSDP.

torchrun --nproc_per_node=N train_fsdp.py [--config FILE] [section.key=value ...]

Every rank runs this script, and every function below is collective: all ranks call it together.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from transformers import PretrainedConfig, set_seed

from shardtune.checkpoint import Checkpoint, Saver, clear_leftovers, load_checkpoint
from shardtune.checkpoint.export.best import Best
from shardtune.checkpoint.export.write import write_final_model
from shardtune.config_io import read_run_arguments, write_config
from shardtune.data.batch import Batch
from shardtune.data.dataset import PreparedData
from shardtune.data.schedule import Schedule, Step
from shardtune.distributed.exit_code import run as run_and_exit
from shardtune.distributed.join import join_world
from shardtune.distributed.progress import Phase
from shardtune.distributed.signals import StopRequest, end_on_signal
from shardtune.errors import AGAIN, Preempted
from shardtune.log import logger
from shardtune.metrics_schema import SaveEntry
from shardtune.model.attention_check import choose_attention
from shardtune.model.build import build_model, compile_layers
from shardtune.model.flops import DevicePeak
from shardtune.model.loss import summed_loss, use_loss_head
from shardtune.planner.run_plan import RunPlan
from shardtune.training import optim, setup
from shardtune.training.context import Run, TrainContext
from shardtune.training.evaluate import evaluate
from shardtune.training.expert_balance import ExpertBalance
from shardtune.training.garbage_collection import collected_by_micro_batch, micro_batch_ended
from shardtune.training.metrics import Metrics, StepLog, StepStats, all_gather_step_stats
from shardtune.training.out_of_memory import step_fits, weights_fit
from shardtune.training.prefetch import prefetch
from shardtune.training.profiler import StepProfiler
from shardtune.training.reshard import choose_reshard_policy
from shardtune.training.sinks import open_sinks
from shardtune.training.states import state_bytes
from shardtune.training.stragglers import Stragglers


def main() -> None:
    config = read_run_arguments(sys.argv[1:], Path(__file__).resolve().parent / "config.yaml")
    world = join_world(config.distributed, config.parallel)
    setup.start_logging(config, world)
    setup.require_same_config(config, world)
    run = setup.open_run(config, world)  # its directory, and the checkpoint that it resumes from
    model_config, assets = setup.read_model_files(run)
    plan = RunPlan(run, model_config)  # made while data is tokenized
    data = setup.read_data(run, model_config)
    schedule = setup.make_schedule(run, data)
    pending_evaluation = setup.find_pending_evaluation(run, data, schedule)
    if run.resumed and run.resumed.step >= schedule.total_steps and pending_evaluation is None:
        last_checkpoint = run.resumed
        clear_leftovers(run.directory, run.resumed, world)
        logger.info(
            f"Finished: {run.resumed.name} is the last of {schedule.total_steps} steps. "
            "Nothing is left to train."
        )
    else:
        plan.require_fit()
        context = build_train_context(run, model_config, data, assets)
        with (
            context.metrics,
            collected_by_micro_batch(),
            step_fits(config),
            plan.compared(context.metrics),
        ):
            last_checkpoint = train(context, schedule, pending_evaluation, plan.device_peak)
    end_on_signal(
        f"after the last step was saved, while the final model was written - {AGAIN}", code=75
    )
    write_final_model(last_checkpoint, config, assets, run.directory, world)


def build_train_context(
    run: Run, model_config: PretrainedConfig, data: PreparedData, assets: Mapping[str, bytes]
) -> TrainContext:
    """Build the sharded model and its optimizer, and load the checkpoint that the run resumes from.

    Files of another run are moved aside once that checkpoint is loaded.
    """
    config, world, resumed = run.config, run.world, run.resumed
    world.progress.enter(Phase.LOADING)
    with weights_fit(config):
        model = world.run_on_all_ranks(lambda: build_model(config, model_config, world))
    optimizer = optim.build_optimizer(model, config)
    state = state_bytes(model, optimizer, config)
    setup.log_model(model, config, state)
    reshard = choose_reshard_policy(model, config, state, setup.saved_reshard_policy(run), world)
    set_seed((config.run.seed + world.rank) % 2**32)
    with step_fits(config):
        is_flat = choose_attention(model, config, data.longest, world)
    if logits := use_loss_head(model, world.device):
        logger.info(f"Loss: logits are made {logits}")
    if config.model.compile:
        compile_layers(model)
    if resumed:
        load_checkpoint(resumed, model, optimizer, config.run.seed, run.directory, world)
    clear_leftovers(run.directory, resumed, world)
    world.on_rank0(lambda: write_config(config, run.directory.path / "config.yaml"))
    sinks = partial(open_sinks, config, run.directory.path, resumed.step if resumed else None)
    metrics = Metrics(run.metrics_file, world, resumed.step if resumed else None, sinks)
    best = None
    if config.eval.keep_best and data.eval:
        best = Best(run.directory, config, model, assets, world)
        if resumed and (kept := best.undone_by(resumed)):
            metrics.write(kept)  # as the line that the resume has dropped
    if resumed:
        logger.info(f"Resumed from {resumed.name}")
    timeout_s = config.distributed.save_timeout_s
    return TrainContext(
        run=run,
        data=data,
        model=model,
        is_flat=is_flat,
        optimizer=optimizer,
        reshard=reshard,
        metrics=metrics,
        stragglers=Stragglers(model, metrics, world),
        expert_balance=ExpertBalance(model, metrics, world),
        saver=Saver(run.directory, config.checkpoint, timeout_s, model, optimizer, assets, world),
        best=best,
        run_state=setup.state_of_run(run, model_config, data, reshard),
    )


def train(
    context: TrainContext,
    schedule: Schedule,
    pending_evaluation: int | None,
    device_peak: DevicePeak,
) -> Checkpoint:
    """Take every step that is left and return the checkpoint of the last one.

    Raises:
        Preempted: a signal has stopped the run, and its last step is saved.
    """
    config, world, saver = context.run.config, context.run.world, context.saver
    context.metrics.write(setup.describe_start(context.run, context.data, schedule))
    every_steps = config.logging.every_steps
    step_log = StepLog(context.metrics, context.model, schedule, every_steps, device_peak, world)
    profiler = StepProfiler(context.run, context.metrics, schedule)
    if pending_evaluation is not None:
        evaluate(context, pending_evaluation)
    last_checkpoint, stop = context.run.resumed, StopRequest()
    step_log.start_clock()
    for step, micro_batches in prefetch(context, schedule):
        lr = optim.learning_rate(
            step.number, schedule.total_steps, config.optimizer.lr, config.scheduler
        )
        optim.set_learning_rate(context.optimizer, lr)
        profiler.step_begins(step.number)
        stats = train_step(context, step, micro_batches, stop)
        seconds_by_phase = context.stragglers.step_ended(step.number)
        world.limit_steps(config.distributed.step_timeout_s)  # the first one takes longer
        step_log.step_ended(step, stats, lr)
        is_due = schedule.is_due(step.number, every_steps)
        context.expert_balance.step_ended(step.number, stats.expert_tokens, is_due)
        profiler.step_ended(step.number, seconds_by_phase, stats.must_stop)

        # Before the save: a run that is killed between the two repeats the step and its evaluation.
        is_evaluated = True
        if context.data.eval and schedule.is_due(step.number, config.eval.every_steps):
            is_evaluated = not stats.must_stop and evaluate(context, step.number, stop)
        must_stop = stats.must_stop or not is_evaluated
        is_finished = step.number == schedule.total_steps and is_evaluated
        if must_stop or schedule.is_due(step.number, config.checkpoint.every_steps):
            save(context, step)
        if is_finished or must_stop:
            last_checkpoint = saver.finish()
        profiler.write_once()
        if must_stop and not is_finished:
            raise preempted(context, step.number, stop)
        step_log.start_clock()
    assert last_checkpoint
    return last_checkpoint


def train_step(
    context: TrainContext, step: Step, micro_batches: list[Batch], stop: StopRequest
) -> StepStats:
    """Take one optimizer step over the global batch, of which `micro_batches` are this rank's.

    Raises:
        RunFailed: the loss or the gradient norm is not finite; the weights are as before.
    """
    nll_sum = accumulate_gradients(context, step, micro_batches)
    stats = all_gather_step_stats(
        nll_sum,
        optim.squared_gradients(context.model),
        step.trained_tokens,
        stop.received is not None,
        context.expert_balance.take_counts(),
        context.run.world,
    )
    optim.require_finite(step.number, stats.loss, stats.grad_norm, context.model, context.run.world)
    update_weights(context, stats.grad_norm)
    return stats


def accumulate_gradients(
    context: TrainContext, step: Step, micro_batches: list[Batch]
) -> torch.Tensor:
    """Return the sum of this rank's negative log-likelihoods, a float64 scalar on its device."""
    world, model = context.run.world, context.model
    world.progress.enter(Phase.FORWARD_BACKWARD)
    nll_sum = torch.zeros((), dtype=torch.float64, device=world.device)
    # FSDP averages gradients over ranks; this makes them the sum over ranks per trained token.
    scale = world.size / max(1, step.trained_tokens)
    for number, micro_batch in enumerate(micro_batches, start=1):
        context.reshard.before_forward(model, is_last_micro_batch=number == len(micro_batches))
        micro_batch_sum = summed_loss(model, micro_batch)
        (micro_batch_sum * scale).backward()
        nll_sum += micro_batch_sum.detach()
        micro_batch_ended()
    return nll_sum


def update_weights(context: TrainContext, grad_norm: float) -> None:
    """Clip the gradients, update the weights and drop the gradients."""
    context.run.world.progress.enter(Phase.OPTIMIZER)
    max_grad_norm = context.run.config.train.max_grad_norm
    if max_grad_norm is not None:
        optim.clip_gradients(context.model, max_grad_norm, grad_norm)
    with weights_fit(context.run.config):  # the first update allocates the optimizer's state
        context.optimizer.step()
    context.optimizer.zero_grad()


def save(context: TrainContext, step: Step) -> None:
    """Start the checkpoint of this step."""
    context.run.world.progress.enter(Phase.SAVING)

    def committed(seconds: float, stall_seconds: float) -> None:
        context.metrics.write(
            SaveEntry(kind="save", step=step.number, seconds=seconds, stall_seconds=stall_seconds)
        )

    context.saver.save(vars(step.end) | context.run_state, context.metrics.sync, committed)


def preempted(context: TrainContext, step: int, stop: StopRequest) -> Preempted:
    """Name the signal that stopped the run: that of the first rank that received one."""
    cause = next(filter(None, context.run.world.all_gather_json(stop.received)))
    auto = "" if context.run.config.run.resume == "auto" else " with run.resume=auto"
    return Preempted(
        f"stopped by {cause} after saving step {step} - run the same command again{auto} to resume"
    )


if __name__ == "__main__":
    run_and_exit(main)
