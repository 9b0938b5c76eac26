"""The data of a run, the steps that it is divided into, and the batches of the coming ones."""

import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from queue import Queue

import numpy as np
import torch
from transformers import PretrainedConfig

from shardtune.checkpoint import resume_rules
from shardtune.config import Config, SchedulerConfig
from shardtune.data import dataset
from shardtune.data.batch import Batch, build_batch
from shardtune.data.chat_encoder import ChatEncoder
from shardtune.data.dataset import PreparedData, added_tokens
from shardtune.data.schedule import Position, Schedule, Step, source_weights
from shardtune.distributed.progress import Phase
from shardtune.distributed.world import World
from shardtune.errors import UserError, counted, first_few
from shardtune.log import logger
from shardtune.new_tokens import NewTokens
from shardtune.training.context import TrainContext
from shardtune.training.optim import learning_rate, warmup_steps
from shardtune.training.run import Run

StepBatches = tuple[Step, list[Batch]]


def read_encoder(run: Run) -> ChatEncoder:
    """Read the tokenizer and the chat template. Refuses a model without, and unknown options."""
    return run.world.run_on_all_ranks(
        lambda: dataset.build_encoder(run.config.model, run.config.data, run.date)
    )


def read_data(run: Run, model_config: PretrainedConfig, encoder: ChatEncoder) -> PreparedData:
    """Tokenize the data, or open its cache.

    Refuses broken data, and data or a model that differ from another node's or the checkpoint's.
    """
    config, world, resumed = run.config, run.world, run.resumed
    folder = world.on_local_rank0(lambda: str(dataset.prepare_data(config.data, encoder)))
    data = dataset.open_prepared(Path(folder))
    vocabulary = model_config.get_text_config().vocab_size
    world.run_on_all_ranks(lambda: data.require_vocabulary(encoder.tokenizer, vocabulary))
    lora = config.lora
    listed = NewTokens.of(model_config).pieces if lora.rows == "new" else {}
    untrained = [i for i in added_tokens(encoder.tokenizer) if i not in listed]
    is_tied = getattr(model_config.get_text_config(), "tie_word_embeddings", False)
    trains_all = not world.layout.is_lora or len(lora.whole) == 2 or (lora.whole and is_tied)
    if not trains_all and (met := data.train.present(untrained)):
        names = first_few(encoder.tokenizer.convert_ids_to_tokens(met), 5)
        logger.warning(
            f"LoRA does not train all rows of the added tokens {names}, which data.train has - "
            "if they are new to the model, name them in model.new_tokens, with lora.rows=new"
        )
    remedy = "copy the same data, model and code to every node"
    world.require_same({"the digest of the tokenized data": data.key}, remedy)
    if resumed:
        resume_rules.require_same_data(resumed, data.key)
        resume_rules.require_same_model(resumed, model_config)
    return data


def make_schedule(run: Run, data: PreparedData) -> Schedule:
    """Lay out all steps that are left, and log every number that follows from the configuration.

    Refuses an epoch with fewer rows than the run has ranks.
    """
    # Every rank computes the same schedule from (seed, epoch, lengths), and begins at the saved
    # position: ranks exchange no indices.
    config, world, train = run.config, run.world, run.config.train
    state = run.resumed.state if run.resumed else vars(Position())
    schedule = Schedule(
        data.train,
        max_length=config.data.max_length,
        packing=config.data.packing,
        seed=config.run.seed,
        rows_per_step=world.layout.rows_per_step,
        epochs=train.epochs,
        max_steps=train.max_steps,
        start=Position(state["step"], state["epoch"], state["row"]),
        weights=source_weights(config.data),
    )
    if schedule.rows_per_epoch < world.layout.data_ranks:
        raise UserError(
            f"an epoch has {counted(schedule.rows_per_epoch, 'row')} and the run "
            f"{counted(world.layout.data_ranks, 'data rank')} - add data or weight, lower "
            "data.max_length, set data.packing=false, use fewer ranks, or let more of them share "
            "each row (parallel.context)"
        )
    described = _describe_schedule(config, data, schedule, world)
    for line in (*data.lines, *described, *changed_rate(run, schedule)):
        logger.info(line)
    return schedule


def changed_rate(run: Run, schedule: Schedule) -> Iterator[str]:
    """Yield a line where a resume changes the learning rate of its first step by 5% or more."""
    resumed, config = run.resumed, run.config
    if resumed is None or resumed.step >= schedule.total_steps:
        return
    saved, step = resumed.state["config"], resumed.step + 1
    then = {name: saved["train"][name] for name in ("epochs", "max_steps")}
    then["rows_per_step"] = resume_rules.saved_rows_per_step(resumed)
    total = replace(schedule, **then).total_steps
    peak, scheduler = saved["optimizer"]["lr"], SchedulerConfig(**saved["scheduler"])
    old = learning_rate(min(step, total), total, peak, scheduler)
    new = learning_rate(step, schedule.total_steps, config.optimizer.lr, config.scheduler)
    if not math.isclose(old, new, rel_tol=0.05):
        steps = f"{total} steps in all became {schedule.total_steps}"
        yield f"Learning rate (LR): {old:.3g} becomes {new:.3g} at step {step}, as {steps}"


def _describe_schedule(
    config: Config, data: PreparedData, schedule: Schedule, world: World
) -> Iterator[str]:
    """Yield a line for each number that the configuration and the data give, with its formula."""
    layout, scheduler = world.layout, config.scheduler
    total, rows = schedule.total_steps, schedule.rows_per_epoch
    yield from describe_sources(config, data, schedule)
    if not data.eval:
        yield "Evaluation is skipped: neither data.eval nor data.eval_fraction names any data"
    yield (
        f"Precision: {layout.compute_dtype} in forward and backward "
        f"(model.compute_dtype={config.model.compute_dtype}), {layout.master_dtype} weights and "
        f"updates, gradients reduced in {layout.reduce_dtype}"
    )
    tokens = schedule.sum_by_source(data.train.lengths).sum()
    fill = tokens / (rows * config.data.max_length)
    packed = ""
    if config.data.packing:
        unpacked = -(-len(schedule.first_epoch) // schedule.rows_per_step)
        packed = (
            f" | Packing: rows hold {schedule.records_per_row:.1f} records, so a step trains as "
            f"many as {unpacked / schedule.steps_per_epoch:.1f} steps with data.packing=false: "
            f"{schedule.steps_per_epoch} steps an epoch instead of {unpacked}"
        )
    row = f"up to {config.data.max_length} tokens, {fill:.1%} full"
    yield f"Rows per epoch: {rows} of {row}{packed}"
    last_lr = learning_rate(total, total, config.optimizer.lr, scheduler)
    yield (
        f"Learning rate: rises to {config.optimizer.lr:g} until step "
        f"{warmup_steps(total, scheduler)} ({scheduler.warmup_ratio:g} x {total}, rounded up), "
        f"then {scheduler.name}: {last_lr:.3g} at step {total}"
    )
    yield (
        f"Effective batch size: {layout.micro_batch_size} (micro-batch) x "
        f"{layout.micro_batches} (accumulation) x {layout.data_ranks} "
        f"({'ranks' if layout.data_ranks == layout.ranks else 'data ranks'}) = "
        f"{schedule.rows_per_step}"
    )
    yield (
        f"Steps per epoch: {schedule.steps_per_epoch} | Total steps: {total} | "
        f"Records: {schedule.sum_by_source(data.train.begins_record).sum()} | "
        f"Trained tokens: {schedule.sum_by_source(data.train.trained_counts).sum()}"
    )


def describe_sources(config: Config, data: PreparedData, schedule: Schedule) -> Iterator[str]:
    """Yield a line for each source of a list: its records and trained tokens in the first epoch."""
    if isinstance(config.data.train, str):
        return
    in_data = np.bincount(data.train.source[data.train.begins_record])
    records = schedule.sum_by_source(data.train.begins_record)
    trained = schedule.sum_by_source(data.train.trained_counts)
    for i, source in enumerate(config.data.train):
        yield (
            f"Source {source.label}: {in_data[i]} records | Weight: {source.weight:g} | "
            f"Records per epoch: {records[i]} ({records[i] / records.sum():.1%}) | "
            f"Trained tokens per epoch: {trained[i]} ({trained[i] / trained.sum():.1%})"
        )


def prefetch(context: TrainContext, schedule: Schedule) -> Iterator[StepBatches]:
    """Yield each step that is left, with this rank's micro-batches on `world.device`."""
    # The thread is at most two steps ahead, since its batches take memory. Its exception is raised,
    # with its traceback, where the loop takes the next step. The thread ends with the process.
    queue: Queue[StepBatches | BaseException] = Queue(maxsize=1)  # and the thread holds one more
    world, rows = context.run.world, context.run.world.layout.micro_batch_size
    cost, dataset = context.row_cost, schedule.dataset

    def make_batches() -> None:
        try:
            if world.device.type == "cuda":
                torch.cuda.set_device(world.device)  # each thread has its own
            # The schedule is the same on every rank, so no rank sends another one an index.
            for step in schedule.steps():
                shares = step.micro_batches(cost, world.data_rank, world.layout.data_ranks, rows)
                batches = [
                    build_batch(dataset, sequences, context.is_flat, world.share).to(world.device)
                    for sequences in shares
                ]
                queue.put((step, batches))
        except BaseException as error:  # without this the loop would wait for ever
            queue.put(error)

    thread = threading.Thread(target=make_batches, name="prefetch", daemon=True)
    thread.start()
    # By number, since the progress must name the awaited step before the thread has made it.
    for number in range(schedule.start.step + 1, schedule.total_steps + 1):
        world.progress.enter(Phase.DATA, number)
        with world.progress.working_in(thread):
            step_batches = queue.get()
        if isinstance(step_batches, BaseException):
            raise step_batches
        yield step_batches
