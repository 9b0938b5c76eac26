#!/usr/bin/env python3
"""Fine-tune a HuggingFace causal language model with PyTorch FSDP.

torchrun --nproc_per_node=N train_fsdp.py [--config FILE] [section.key=value ...]

A run is `main`, its steps are `train`, and one of them is `train_step`.
"""

import sys
import time
from contextlib import ExitStack
from enum import Enum, auto
from pathlib import Path

from shardtune.garbage_collection import imports_without_gc

with imports_without_gc():  # else each start takes a second longer
    import torch

    from shardtune.checkpoint import Checkpoint, clear_leftovers
    from shardtune.checkpoint.export.write import write_final_model
    from shardtune.config_io import read_run_arguments
    from shardtune.data.batch import Batch
    from shardtune.data.schedule import Step
    from shardtune.distributed.exit_code import run as run_and_exit
    from shardtune.distributed.join import join_world
    from shardtune.distributed.progress import Phase
    from shardtune.distributed.signals import StopRequest, end_on_signal
    from shardtune.errors import AGAIN, Preempted
    from shardtune.garbage_collection import collect_if_due, collected_by_micro_batch
    from shardtune.log import logger
    from shardtune.planner.run_plan import RunPlan
    from shardtune.training import optim
    from shardtune.training.build_context import build_train_context, find_pending_model
    from shardtune.training.context import TrainContext
    from shardtune.training.data_and_schedule import (
        make_schedule,
        prefetch,
        read_data,
        read_encoder,
    )
    from shardtune.training.evaluate import evaluate, find_pending_evaluation
    from shardtune.training.observers.metrics import StepEnded, StepStats, all_gather_step_stats
    from shardtune.training.out_of_memory import step_fits, weights_fit
    from shardtune.training.read_model import read_assets, read_model_files
    from shardtune.training.run import open_run
    from shardtune.training.start_log import describe_start, start_logging


def main() -> None:
    """Prepare a run, train it and write its final model. The order is a contract.

    Every rank runs this script, and every function of it is collective: all ranks call it at the
    same place, or they wait for each other without end. All refusals come before the weights are
    read, and quick ones come before slow ones. The plan simulates a step while data is tokenized.
    """
    config = read_run_arguments(sys.argv[1:], Path(__file__).resolve().parent / "config.yaml")
    world = join_world(config)
    start_logging(config, world)
    run = open_run(config, world)  # its directory, and the checkpoint that it resumes from
    model_config, facts = read_model_files(run)
    encoder = read_encoder(run)
    assets = read_assets(run, model_config, encoder)
    plan = RunPlan(run, model_config)
    data = read_data(run, model_config, encoder)
    schedule = make_schedule(run, data)
    pending_evaluation = find_pending_evaluation(run, data, schedule)
    pending_model = find_pending_model(run, schedule)
    is_pending = pending_evaluation is not None or pending_model is not None
    context: TrainContext | None = None
    with ExitStack() as ending:
        if run.resumed and run.resumed.step >= schedule.total_steps and not is_pending:
            last_checkpoint = run.resumed
            clear_leftovers(run.directory, run.resumed, world)
            logger.info(
                f"Finished: {run.resumed.name} is the last of {schedule.total_steps} steps. "
                "Nothing is left to train."
            )
        else:
            prediction = plan.require_fit()
            context = build_train_context(
                run, model_config, facts, data, assets, schedule, prediction, plan.device_peak
            )
            ending.enter_context(context.metrics)  # closes its files and trackers
            ending.enter_context(context.command)  # waits for export.command, or ends it
            with (
                collected_by_micro_batch(),  # all ranks collect garbage at the same places
                step_fits(world.layout),  # says which keys to change where memory runs out
                plan.compared(context.metrics),  # writes predicted and measured memory and time
            ):
                last_checkpoint = train(context, pending_evaluation, pending_model)
        # Every trained step is saved: from here on a rank may end without other ranks.
        end_on_signal(
            f"after the last step was saved, while the final model was written or scored - {AGAIN}",
            code=75,
        )
        model = write_final_model(last_checkpoint, config, assets, run.directory, world)
        if model and context:
            logger.info(f"Ask it: shardtune ask {run.directory.path}")
            context.command.start(model, last_checkpoint.step)


def train(
    context: TrainContext, pending_evaluation: int | None, pending_model: int | None
) -> Checkpoint:
    """Take every step that is left and return the checkpoint of the last one.

    Raises:
        Preempted: a signal has stopped the run, and its last step is saved.
    """
    config, schedule, observers = context.run.config, context.schedule, context.observers
    context.metrics.write(describe_start(context.run, context.data, schedule, context.row_cost))
    if pending_evaluation is not None:
        evaluate(context, pending_evaluation)
    if pending_model is not None:
        context.step_export.write(pending_model)
    last_checkpoint, stop = context.run.resumed, StopRequest()
    began = time.perf_counter()
    for step, micro_batches in prefetch(context, schedule):
        lr = optim.learning_rate(
            step.number, schedule.total_steps, config.optimizer.lr, config.scheduler
        )
        optim.set_learning_rate(context.optimizer, lr)
        for observer in observers:
            observer.step_begins(step.number)
        stats = train_step(context, step, micro_batches, stop)
        report(context, step, stats, lr, began)
        status = evaluate_if_due(context, step, stats, stop)

        # The save comes after the evaluation: a run that is killed between them repeats the step,
        # and makes the evaluation again.
        is_due = schedule.is_due(step.number, config.checkpoint.every_steps)
        if is_due or status is RunStatus.STOPPED:
            save(context, step)
        if status is not RunStatus.GOES_ON:
            # A thread writes the checkpoint, and the run may not end before it.
            last_checkpoint = context.saver.finish()
        for observer in observers:
            observer.between_steps()
        if status is RunStatus.STOPPED:
            raise preempted(context, step.number, stop)
        began = time.perf_counter()  # neither evaluations nor saves are time of a step
    if stop.received:  # amid the last step, so that nothing is left to stop but the command
        context.command.give_up()
    assert last_checkpoint  # from the last step, or from the resume of a run without steps left
    return last_checkpoint


class RunStatus(Enum):
    """How a run stands after a step, the same on all ranks."""

    GOES_ON = auto()
    FINISHED = auto()  # the last step is made and evaluated
    STOPPED = auto()  # by a signal, and the same command resumes it


def evaluate_if_due(
    context: TrainContext, step: Step, stats: StepStats, stop: StopRequest
) -> RunStatus:
    """Evaluate the model after a step if that is due, and decide whether the run goes on.

    An evaluation that a signal skips or cuts short is made by the resumed run. A run whose last
    step is not evaluated is not finished.
    """
    every_steps = context.run.config.eval.every_steps
    is_due = context.data.eval and context.schedule.is_due(step.number, every_steps)
    if is_due and (stats.must_stop or not evaluate(context, step.number, stop)):
        return RunStatus.STOPPED
    if step.number == context.schedule.total_steps:
        return RunStatus.FINISHED  # even if a signal came: it has nothing left to stop
    return RunStatus.STOPPED if stats.must_stop else RunStatus.GOES_ON


def report(context: TrainContext, step: Step, stats: StepStats, lr: float, began: float) -> None:
    """Tell every observer of a step that has ended. `began`: when its clock did."""
    config, world = context.run.config, context.run.world
    seconds_by_phase = world.progress.take_seconds()
    world.progress.enter(Phase.REPORTING)
    # Read after the phases, so that their sum is at most the seconds of the step.
    seconds = time.perf_counter() - began
    is_due = context.schedule.is_due(step.number, config.logging.every_steps)
    ended = StepEnded(step, stats, lr, seconds, seconds_by_phase, is_due)
    for observer in context.observers:
        observer.step_ended(ended)
    world.limit_steps(config.distributed.step_timeout_s)  # the first one takes longer


def train_step(
    context: TrainContext, step: Step, micro_batches: list[Batch], stop: StopRequest
) -> StepStats:
    """Take one optimizer step over the global batch. `micro_batches`: this rank's part of it.

    Raises:
        RunFailed: the loss or the gradient norm is not finite; the weights are as before.
    """
    nll_sum, squared_gradients = accumulate_gradients(context, step, micro_batches)
    # A signal reaches each rank at another time, and a rank that left alone would leave all other
    # ranks waiting. So the wish to stop travels with the loss, and all leave after the same step.
    stats = all_gather_step_stats(
        nll_sum,
        squared_gradients,
        step.trained_weight,
        stop.received is not None,
        context.expert_balance.take_counts(),
        context.run.world,
    )
    # All ranks have the same loss and norm, so all refuse, before a NaN reaches any weight.
    optim.require_finite(context, step.number, stats)
    update_weights(context, stats.grad_norm)
    return stats


def accumulate_gradients(
    context: TrainContext, step: Step, micro_batches: list[Batch]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums of this rank's negative log-likelihoods and of its gradients' squares.

    Both are float64 scalars on its device.
    """
    world, model = context.run.world, context.model
    world.progress.enter(Phase.FORWARD_BACKWARD)
    nll_sum = torch.zeros((), dtype=torch.float64, device=world.device)
    # A batch's loss is the sum over its tokens, and FSDP averages gradients over ranks. The scale
    # undoes that average and divides by the trained tokens of the global batch (where the data has
    # weights, by their sum), so that each token weighs the same, in any micro-batch of any rank.
    scale = world.layout.stage_ranks / (step.trained_weight or 1)
    for batch, backwards in context.stage.passes(micro_batches):
        nll_sum += context.stage.forward(batch)
        # Without stages only the backward of this batch is due. A stage of a pipeline runs ahead:
        # no backward is due after its first forwards, and several are due after its last one.
        for index in backwards:
            # The last backward of a step reduces and frees all tensors that earlier ones have kept.
            context.reshard.before_backward(model, index == len(micro_batches) - 1)
            context.stage.backward(micro_batches[index], scale)
            collect_if_due()
    context.stage.finish()
    return nll_sum, optim.squared_gradients(context.stage.own_parameters(), context.host)


def update_weights(context: TrainContext, grad_norm: float) -> None:
    """Clip the gradients, update the weights and drop the gradients."""
    context.run.world.progress.enter(Phase.OPTIMIZER)
    max_grad_norm = context.run.config.train.max_grad_norm
    if max_grad_norm is not None:
        optim.clip_gradients(context.optimizer, max_grad_norm, grad_norm)
    with weights_fit(context.run.world.layout):  # the first update allocates the optimizer's state
        context.optimizer.step()
    context.optimizer.zero_grad()


def save(context: TrainContext, step: Step) -> None:
    """Start the checkpoint of this step."""
    context.run.world.progress.enter(Phase.SAVING)
    best = {"best": context.best.lowest} if context.best else {}
    state = vars(step.end) | context.run_state | best
    # The metrics reach the disk first: a run that resumes from here has the lines of its steps.
    context.saver.save(state, context.metrics.sync, context.metrics.write)


def preempted(context: TrainContext, step: int, stop: StopRequest) -> Preempted:
    """Name the signal that stopped the run: that of the first rank that received one."""
    cause = next(filter(None, context.run.world.all_gather_json(stop.received)))
    auto = " with run.resume=auto" if context.run.config.run.resume == "never" else ""
    return Preempted(
        f"stopped by {cause} after saving step {step} - run the same command again{auto} to resume"
    )


if __name__ == "__main__":
    run_and_exit(main)
