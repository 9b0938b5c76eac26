#!/usr/bin/env python3
"""Fine-tune a HuggingFace causal language model with PyTorch FSDP.

torchrun --nproc_per_node=N train_fsdp.py [--config FILE] [section.key=value ...]
"""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig, set_seed

from shardtune import checkpoint
from shardtune.checkpoint.export import model_assets, write_final_model
from shardtune.checkpoint.run_dir import RunDir, open_run_dir
from shardtune.config import Config
from shardtune.config_io import read_run_arguments, remarks, to_dict, write_config
from shardtune.data.batch import Batch
from shardtune.data.dataset import (
    PreparedData,
    build_encoder,
    find_sources,
    open_prepared,
    prepare_data,
)
from shardtune.data.schedule import Schedule, Step
from shardtune.distributed.signals import StopRequest, end_on_signal
from shardtune.distributed.world import World, describe, join_world, run
from shardtune.errors import AGAIN, Preempted, all_of
from shardtune.log import logger, node_logger, quiet_libraries, setup_logging
from shardtune.model.attention import choose_attention
from shardtune.model.build import build_model, compile_layers, compute_dtype
from shardtune.model.files import read_model_config
from shardtune.model.flops import MfuMeter
from shardtune.model.loss import summed_loss, use_loss_head
from shardtune.training.evaluate import evaluate
from shardtune.training.garbage_collection import collected_by_micro_batch, micro_batch_ended
from shardtune.training.memory import memory_suffices, weights_fit
from shardtune.training.metrics import Metrics, StepLines, peak_memory_bytes
from shardtune.training.optim import (
    build_optimizer,
    clip_gradients,
    learning_rate,
    require_finite,
    set_learning_rate,
    squared_gradients,
)
from shardtune.training.prefetch import Fed, feed
from shardtune.training.reshard import ReshardPolicy, choose_reshard_policy
from shardtune.training.setup import (
    choose_checkpoint,
    describe_mesh,
    describe_state,
    model_settings,
    owed_evaluation,
    plan_steps,
    require_same_config,
    require_same_model,
    require_same_revision,
    saved_reshard_policy,
)
from shardtune.training.stragglers import Stragglers


def main() -> None:
    config = read_run_arguments(sys.argv[1:], Path(__file__).resolve().parent / "config.yaml")
    world = join_world(config.distributed, config.parallel.replicate)
    setup_logging(world.is_main, world.is_node_main)
    quiet_libraries(world.is_main)
    node_logger.info(describe(world))
    for remark in remarks(config):
        logger.info(remark)

    require_same_config(config, world)
    if config.parallel.replicate > 1:
        logger.info(describe_mesh(world))
    run_dir = open_run_dir(Path(config.run.dir), world)
    resumed = choose_checkpoint(config, run_dir, world)
    date = world.on_rank0(
        lambda: resumed.state["date"] if resumed else datetime.date.today().isoformat()
    )
    world.progress.enter("preparing the data")
    model_config, _ = world.run_on_all_ranks(
        lambda: all_of(
            weights_fit()(lambda: read_model_config(config.model, config.data.max_length)),
            lambda: find_sources(config.data) if world.is_node_main else None,
        )
    )
    require_same_revision(config.model, world)
    encoder = world.run_on_all_ranks(
        lambda: build_encoder(config.model.path, config.data, datetime.date.fromisoformat(date))
    )
    data = open_prepared(
        Path(world.on_local_rank0(lambda: str(prepare_data(config.data, encoder))))
    )
    world.run_on_all_ranks(
        lambda: data.require_vocabulary(
            encoder.tokenizer, model_config.get_text_config().vocab_size
        )
    )
    schedule = plan_steps(config, data, resumed, world)

    assets = world.run_on_all_ranks(
        lambda: model_assets(model_config, config.model.path, encoder.tokenizer)
    )
    if resumed:
        require_same_model(resumed, assets)
    checkpoint.delete_unfinished(run_dir, resumed, world)
    owed = owed_evaluation(config, resumed, run_dir, world)
    if resumed and resumed.step >= schedule.total_steps and owed is None:
        write_final_model(resumed, config.export, assets, run_dir, world)
        logger.info(
            f"Finished: {resumed.name} is the last of {schedule.total_steps} steps. Nothing is left to do."
        )
        return
    job = build_train_context(config, model_config, data, run_dir, resumed, world)
    if resumed:
        logger.info(f"Resumed from {resumed.name}")
    saver = checkpoint.Saver(
        run_dir,
        config.checkpoint,
        config.distributed.save_timeout_s,
        job.model,
        job.optimizer,
        assets,
        world,
    )
    fixed = {
        "date": date,
        "data": data.key,
        "config": to_dict(config),
        "model": model_settings(assets),
    }
    fixed["residency"] = list(vars(job.residency).values())
    feeding = feed(schedule, job.model, config.train.micro_batch_size, job.is_flat, world)
    with (
        collected_by_micro_batch(),
        memory_suffices(config, lambda: resumed or saver.has_saved),
        feeding as steps,
    ):
        last = train(job, schedule, steps, saver, fixed, resumed, owed)
    end_on_signal(
        f"after the last step was saved, while the final model was written - {AGAIN}", code=75
    )
    write_final_model(last, config.export, assets, run_dir, world)


@dataclass(frozen=True)
class TrainContext:
    """What the loop works with. `is_flat`: the rows of a batch stand one behind the other, without padding."""

    config: Config
    world: World
    data: PreparedData
    model: Any
    is_flat: bool
    residency: ReshardPolicy
    optimizer: torch.optim.Optimizer
    metrics: Metrics


def build_train_context(
    config: Config,
    model_config: PretrainedConfig,
    data: PreparedData,
    run_dir: RunDir,
    resumed: checkpoint.Checkpoint | None,
    world: World,
) -> TrainContext:
    """The sharded model and its optimizer, with the weights and states of `resumed` if there is one.

    What the run directory holds of another run is set aside once they are loaded, and it gets the configuration.
    """
    world.progress.enter("loading the model")
    model = world.run_on_all_ranks(weights_fit()(lambda: build_model(config, model_config, world)))
    optimizer = build_optimizer(model, config.optimizer)
    logger.info(describe_state(model))
    residency = choose_reshard_policy(
        model, config, saved_reshard_policy(resumed, config, world), world
    )
    set_seed((config.run.seed + world.rank) % 2**32)
    with memory_suffices(config, lambda: resumed):
        is_flat = choose_attention(model, config, data.longest, world)
    if which := use_loss_head(model, world.device):
        logger.info(f"Loss: logits are made {which}")
    if config.model.compile:
        compile_layers(model, config, world)
    if resumed:
        checkpoint.load_checkpoint(resumed, model, optimizer, config.run.seed, run_dir, world)
    checkpoint.set_aside(run_dir, resumed, world)
    world.on_rank0(lambda: write_config(config, run_dir.path / "config.yaml"))
    metrics = Metrics(run_dir.path / "metrics.jsonl", world, resumed.step if resumed else None)
    return TrainContext(config, world, data, model, is_flat, residency, optimizer, metrics)


def train(
    job: TrainContext,
    schedule: Schedule,
    steps: Iterator[Fed],
    saver: checkpoint.Saver,
    fixed: dict[str, Any],
    last: checkpoint.Checkpoint | None,
    owed: int | None,
) -> checkpoint.Checkpoint:
    """All the steps that are left after `last`, with their evaluations and checkpoints; the last checkpoint."""
    config, world = job.config, job.world
    lines = StepLines(world, schedule.total_steps, config.logging.every_steps)
    stragglers = Stragglers(job.model, job.metrics, world)
    utilisation = MfuMeter(
        job.model, compute_dtype(config.model.compute_dtype, world.device), world
    )
    if owed is not None:
        evaluate_at(owed, job, lambda: False)
    stop = StopRequest()
    step_ended = time.perf_counter()
    for step, batches in steps:
        lr = learning_rate(step.number, schedule.total_steps, config.optimizer.lr, config.scheduler)
        set_learning_rate(job.optimizer, lr)
        done = train_step(job, step, batches, stop, stragglers.owed)
        must_stop = done.must_stop
        stragglers.step_ended(step.number, done.owed)
        world.limit_steps(config.distributed.step_timeout_s)

        seconds = time.perf_counter() - step_ended
        mfu = utilisation.of_step(step.lengths, step.trained_tokens, seconds)
        told: dict[str, Any] = {
            "loss": done.loss,
            "grad_norm": done.grad_norm,
            "lr": lr,
            "tokens": step.tokens,
        }
        told |= {
            "trained_tokens": step.trained_tokens,
            "tokens_per_second": step.tokens / seconds,
            "seconds": seconds,
        }
        told |= {
            "mfu": mfu,
            "memory_bytes": int(done.memory_bytes),
            "data_seconds": done.data_seconds,
        }
        job.metrics.write("step", step=step.number, epoch=step.epoch, **told)
        lines.step_ended(step.number, told)
        is_last = step.number == schedule.total_steps
        # Before the save: a run that ends between the two repeats the step, and so has every evaluation.
        is_owed = job.data.eval is not None and (
            is_last or is_due(step.number, config.eval.every_steps)
        )
        if is_owed and not must_stop:
            is_owed = not evaluate_at(step.number, job, lambda: bool(stop.received))
            must_stop = is_owed or world.all_reduce_max(stop.received is not None)[0]
        saver.log_if_ended()
        world.progress.enter("saving")
        if is_last or must_stop or is_due(step.number, config.checkpoint.every_steps):
            saver.save(vars(step.end) | {"owes_evaluation": is_owed} | fixed, job.metrics.sync)
        if is_last or must_stop:
            last = saver.finish()
        if must_stop and (is_owed or not is_last):
            cause = next(filter(None, [stop.received, *world.all_gather_json(stop.received)]))
            raise Preempted(
                f"stopped by {cause} after saving step {step.number} - run the "
                f"same command again{'' if config.run.resume == 'auto' else ' with run.resume=auto'} to resume"
            )
        step_ended = time.perf_counter()
    assert last
    return last


def evaluate_at(step: int, job: TrainContext, must_stop: Callable[[], bool]) -> bool:
    """The perplexity over the evaluation data, if there is any, said and written; step 0 is the baseline.

    False on every rank, and nothing said or written, if `must_stop` has cut it short.
    """
    if job.data.eval is None:
        return True
    job.world.progress.enter("evaluation", step)
    found = evaluate(
        job.model,
        job.data.eval,
        job.world,
        max_length=job.config.data.max_length,
        packing=job.config.data.packing,
        is_flat=job.is_flat,
        rows_per_micro_batch=job.config.train.micro_batch_size,
        must_stop=must_stop,
    )
    if found is None:
        return False
    label, tail = ("Baseline", "") if step == 0 else ("Eval", f" | Step: {step}")
    logger.info(
        f"{label} Perplexity: {found.perplexity:.4f} | Loss: {found.loss:.4f} | Tokens: {found.tokens}{tail}"
    )
    job.metrics.write(
        "eval", step=step, loss=found.loss, perplexity=found.perplexity, tokens=found.tokens
    )
    return True


class StepStats(NamedTuple):
    """What all ranks know of a step. It comes to the host together, which waits for a GPU once a step."""

    loss: float  # exact, per trained token
    grad_norm: float  # the global one
    must_stop: float  # whether any rank was asked to
    memory_bytes: float  # the peak of the rank with the most, before the first update without the optimizer's state
    data_seconds: float  # for which the rank that waited longest waited for its batches
    owed: list[float]  # of each rank in turn


def train_step(
    job: TrainContext, step: Step, batches: list[Batch], stop: StopRequest, owed: list[float]
) -> StepStats:
    """One optimizer step over its global batch, of which `batches` are this rank's, which brings what it `owed`.

    Raises:
        RunFailed: on every rank and before the update, if either is not finite.
    """
    config, model, world = job.config.train, job.model, job.world
    loss_sum = torch.zeros((), dtype=torch.float64, device=world.device)
    world.progress.enter("forward and backward")
    for number, batch in enumerate(batches, start=1):
        job.residency.before_forward(model, is_last=number == len(batches))
        micro_batch_sum = summed_loss(model, batch)
        # FSDP2 averages gradients over ranks; the factor turns that into the sum over ranks per trained token.
        (micro_batch_sum * (world.size / max(1, step.trained_tokens))).backward()
        loss_sum += micro_batch_sum.detach()
        micro_batch_ended()
    memory = peak_memory_bytes(world.device)
    told = (stop.received is not None, memory, world.progress.seconds_in("data"))
    of_ranks = world.all_gather_scalars(loss_sum, squared_gradients(model), *told, *owed)
    nll_sum, squared_norm = of_ranks[:, :2].sum(0)
    norm = (squared_norm / world.replicas).sqrt()
    exact = torch.stack([nll_sum / max(1, step.trained_tokens), norm])
    shared = torch.cat([exact, of_ranks[:, 2:5].amax(0), of_ranks[:, 5:].flatten()])
    loss, grad_norm, must_stop, memory_bytes, data_seconds, *owed = shared.tolist()
    require_finite(step.number, loss, grad_norm, model, world)
    world.progress.enter("optimizer")
    if config.max_grad_norm is not None:
        clip_gradients(model, config.max_grad_norm, norm.float())
    with weights_fit():  # the optimizer's state comes with its first step
        job.optimizer.step()
    job.optimizer.zero_grad()
    return StepStats(loss, grad_norm, must_stop, memory_bytes, data_seconds, owed)


def is_due(step: int, every_steps: int) -> bool:
    return every_steps > 0 and step % every_steps == 0


if __name__ == "__main__":
    run(main)
