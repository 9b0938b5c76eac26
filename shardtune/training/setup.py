"""All that a run checks, reads and logs before it builds the model. Each function is collective."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from shardtune.checkpoint import agree_on_checkpoint
from shardtune.checkpoint.export import model_assets
from shardtune.checkpoint.resume_rules import (
    model_settings,
    require_allowed_settings,
    require_same_data,
    require_same_model,
)
from shardtune.checkpoint.run_dir import open_run_dir
from shardtune.config import Config, ModelConfig
from shardtune.config_io import changed_keys, remarks, to_dict
from shardtune.data.dataset import (
    PreparedData,
    build_encoder,
    find_sources,
    open_prepared,
    prepare_data,
)
from shardtune.data.schedule import Position, Schedule, make_schedule
from shardtune.distributed.join import describe
from shardtune.distributed.progress import Phase
from shardtune.distributed.tensors import dtype_name
from shardtune.distributed.world import World
from shardtune.errors import UserError, all_of
from shardtune.log import logger, node_logger, quiet_libraries, setup_logging
from shardtune.model.build import compute_dtype, local_bytes
from shardtune.model.files import fetch_weights, read_model_config
from shardtune.training.context import Run
from shardtune.training.memory import weights_fit
from shardtune.training.metrics import logged_kinds
from shardtune.training.optim import learning_rate, warmup_steps
from shardtune.training.reshard import ReshardPolicy

# Node 0's values hold for these, so nodes may differ in them.
_MAY_DIFFER_BY_NODE = ("run.dir", "distributed.join_timeout_s")


def start_logging(config: Config, world: World) -> None:
    """Log the `Training Configuration:` block, and every setting that has no effect."""
    setup_logging(world.is_main, world.is_node_main)
    quiet_libraries(world.is_main)
    node_logger.info(describe(world))
    for remark in remarks(config):
        logger.info(remark)


def require_same_config(config: Config, world: World) -> None:
    """Refuse a node that was started with another configuration than node 0.

    Raises:
        UserError: on every rank, with both values of every key that differs.
    """
    on_node0 = world.all_gather_json(to_dict(config))[0]
    allowed, forbidden = changed_keys(on_node0, config)
    problems = [
        f"{key} is {json.dumps(value_on_node0)} on node 0 and {json.dumps(value)} on node "
        f"{world.node_rank} - start every node with the same configuration"
        for key, value_on_node0, value in (*allowed, *forbidden)
        if key not in _MAY_DIFFER_BY_NODE
    ]
    if all_problems := dict.fromkeys(chain.from_iterable(world.all_gather_json(problems))):
        raise UserError(*all_problems)


def open_run(config: Config, world: World) -> Run:
    """Lock the run's directory, and choose the checkpoint to resume from.

    Raises:
        UserError: on every rank; the directory is in use, no checkpoint is whole, or a setting has
            changed that must not.
    """
    if config.parallel.replicate > 1:
        logger.info(_describe_mesh(world))
    directory = open_run_dir(Path(config.run.dir), world)
    resumed = agree_on_checkpoint(directory, config.run.resume, world)
    if resumed:
        require_allowed_settings(resumed, config, world)
    today = datetime.date.today().isoformat()
    date = world.on_rank0(lambda: resumed.state["date"] if resumed else today)
    return Run(config, world, directory, resumed, datetime.date.fromisoformat(date))


def read_model_files(run: Run) -> PretrainedConfig:
    """Read the model's configuration, and check that its weights are there. No weight is read.

    Raises:
        UserError: on every rank, with the problems of the model and the data that is missing.
    """
    config, world = run.config, run.world
    world.progress.enter(Phase.PREPARING_DATA)
    model_config, _ = world.run_on_all_ranks(
        lambda: all_of(
            weights_fit()(lambda: read_model_config(config.model, config.data.max_length)),
            lambda: find_sources(config.data) if world.is_node_main else None,
        )
    )
    _require_same_revision(config.model, world)
    return model_config


def _require_same_revision(model: ModelConfig, world: World) -> None:
    """Fetch the weights on each node, and refuse two revisions of the hub's model.

    Raises:
        UserError: with both revisions, or because a node lacks files.
    """
    revision = world.on_local_rank0(lambda: fetch_weights(model))
    revisions = dict(world.all_gather_json([world.node_name, revision]))
    (first_node, first), *others = revisions.items()
    for node, other in others:
        if other != first:
            raise UserError(
                f"model.path={model.path} is the hub's revision {first} on {first_node} and "
                f"{other} on {node} - fetch one revision on every node, or name a directory"
            )


def read_data(
    run: Run, model_config: PretrainedConfig
) -> tuple[PreparedData, PreTrainedTokenizerBase]:
    """Tokenize the data, or open its cache from an earlier run.

    Raises:
        UserError: on every rank; broken data, or other data than another node or the resumed
            checkpoint has.
    """
    config, world, resumed = run.config, run.world, run.resumed
    encoder = world.run_on_all_ranks(
        lambda: build_encoder(config.model.path, config.data, run.date)
    )
    folder = world.on_local_rank0(lambda: str(prepare_data(config.data, encoder)))
    data = open_prepared(Path(folder))
    vocabulary = model_config.get_text_config().vocab_size
    world.run_on_all_ranks(lambda: data.require_vocabulary(encoder.tokenizer, vocabulary))
    digests = world.all_gather_json(data.key)
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise UserError(
                f"the data of rank {rank} (digest {digest}) is not that of rank 0 ({digests[0]}) - "
                "copy the same data, model and code to every node"
            )
    if resumed:
        require_same_data(resumed, data.key)
    return data, encoder.tokenizer


def plan_schedule(run: Run, data: PreparedData) -> Schedule:
    """Plan all steps that are left, and log every number that follows from the configuration.

    Raises:
        UserError: on every rank; an epoch has fewer rows than the run has ranks.
    """
    config, world, resumed = run.config, run.world, run.resumed
    train = config.train
    start = Position()
    if resumed:
        start = Position(*(resumed.state[key] for key in ("step", "epoch", "row")))
    schedule = make_schedule(
        data.train,
        max_length=config.data.max_length,
        packing=config.data.packing,
        seed=config.run.seed,
        rows_per_step=train.micro_batch_size * train.gradient_accumulation_steps * world.size,
        epochs=train.epochs,
        max_steps=train.max_steps,
        start=start,
    )
    if schedule.rows_per_epoch < world.size:
        raise UserError(
            f"an epoch has {schedule.rows_per_epoch} rows and the run {world.size} ranks - "
            "add data, lower data.max_length, set data.packing=false, or use fewer ranks"
        )
    for line in (*data.lines(), *_describe_plan(config, data, schedule, world)):
        logger.info(line)
    return schedule


def _describe_plan(
    config: Config, data: PreparedData, schedule: Schedule, world: World
) -> list[str]:
    """Return a line for each number that the configuration and the data give, with its formula."""
    train, model, scheduler = config.train, config.model, config.scheduler
    total, rows = schedule.total_steps, schedule.rows_per_epoch
    tokens = data.train.lengths.sum(dtype="int64")
    dtype = dtype_name(compute_dtype(model.compute_dtype, world.device))
    warmup = warmup_steps(total, scheduler)
    shape = {"cosine": "as a cosine", "linear": "linearly", "constant": ""}[scheduler.name]
    last_lr = learning_rate(total, total, config.optimizer.lr, scheduler)
    decay = f"falls {shape} to {last_lr:.3g} at step {total}" if shape else "stays there"
    lines = [
        f"Precision: {dtype} in forward and backward (model.compute_dtype={model.compute_dtype}), "
        f"{model.master_dtype} weights and updates, gradients reduced in {model.reduce_dtype}",
        f"Rows per epoch: {rows} of up to {config.data.max_length} tokens, "
        f"{tokens / (rows * config.data.max_length):.1%} full",
    ]
    if data.eval is None:
        lines.insert(
            0, "Evaluation is skipped: neither data.eval nor data.eval_fraction names any data"
        )
    if config.data.packing:
        ratio = schedule.unpacked_steps_per_epoch / schedule.steps_per_epoch
        lines.append(
            f"Packing: rows hold {_rounded(schedule.records_per_row)} records, so a step trains as "
            f"many as {_rounded(ratio)} steps with data.packing=false: {schedule.steps_per_epoch} "
            f"steps an epoch instead of {schedule.unpacked_steps_per_epoch}"
        )
    return [
        *lines,
        f"Learning rate: rises to {config.optimizer.lr:g} in {_steps(warmup)} "
        f"({scheduler.warmup_ratio:g} x {total}, rounded up), then {decay}",
        f"Effective batch size: {train.micro_batch_size} (micro-batch) x "
        f"{train.gradient_accumulation_steps} (accumulation) x {world.size} (ranks) = "
        f"{schedule.rows_per_step}",
        f"Steps per epoch: {schedule.steps_per_epoch} | Total steps: {total} | "
        f"Records: {data.train_summary.records} | "
        f"Trained tokens: {data.train.trained_counts.sum(dtype='int64')}",
    ]


def _rounded(number: float) -> str:
    return f"{number:.1f}" if number < 9.95 else f"{number:.0f}"


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def read_model_assets(
    run: Run, model_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> dict[str, bytes]:
    """Read the files that a model has beside its weights: configuration and tokenizer.

    Raises:
        UserError: on every rank, with every setting in which the model is not the checkpoint's.
    """
    assets = run.world.run_on_all_ranks(
        lambda: model_assets(model_config, run.config.model.path, tokenizer)
    )
    if run.resumed:
        require_same_model(run.resumed, assets)
    return assets


def find_pending_evaluation(run: Run, data: PreparedData) -> int | None:
    """Return the step whose evaluation comes before the first step, if there is one.

    That is step 0, the baseline, or the step of the checkpoint where a signal cut its evaluation
    short: it was due, and metrics.jsonl has the step and not the evaluation.
    """
    if data.eval is None:
        return None
    if run.resumed is None:
        return 0 if run.config.eval.baseline else None
    step, state = run.resumed.step, run.resumed.state
    saved = state["config"]  # this run's may differ
    every_steps, train = saved["eval"]["every_steps"], saved["train"]
    was_last = state["epoch"] >= train["epochs"] or step == train["max_steps"]
    if not was_last and (every_steps == 0 or step % every_steps):
        return None
    kinds = run.world.on_rank0(lambda: sorted(logged_kinds(run.metrics_file, step)))
    return step if "step" in kinds and "eval" not in kinds else None


def saved_reshard_policy(run: Run) -> ReshardPolicy | None:
    """Return the decision of the resumed run, or None where its grounds have changed."""
    resumed = run.resumed
    if resumed is None or resumed.world_size != run.world.size or "residency" not in resumed.state:
        return None
    allowed, _ = changed_keys(resumed.state["config"], run.config)
    changed = {key for key, _, _ in allowed}
    if changed & {"train.gradient_accumulation_steps", "parallel.replicate", "model.reduce_dtype"}:
        return None
    return ReshardPolicy(*resumed.state["residency"])


def state_of_run(
    run: Run, data: PreparedData, assets: Mapping[str, bytes], reshard: ReshardPolicy
) -> dict[str, Any]:
    """Return the state that each checkpoint of the run holds beside its tensors and position."""
    return {
        "date": run.date.isoformat(),
        "data": data.key,
        "config": to_dict(run.config),
        "model": model_settings(assets),
        "residency": list(vars(reshard).values()),  # the key that older checkpoints have, too
    }


def _describe_mesh(world: World) -> str:
    """Say how many copies of the model there are, and whether each has a node to itself."""
    shards = world.mesh["shard"].size()
    nodes = world.all_gather_json(world.node_rank)
    crosses = any(
        len(set(nodes[start : start + shards])) > 1 for start in range(0, world.size, shards)
    )
    place = (
        "across nodes, so that the network carries the sharding too"
        if crosses
        else "each within one node"
    )
    return f"Mesh: {world.replicas} (replicas) x {shards} (shards) = {world.size} ranks, {place}"


def describe_state(model: PreTrainedModel) -> str:
    """Say how many parameters there are, and how much memory a rank needs to train them."""
    total = sum(p.numel() for p in model.parameters())
    local = local_bytes(model) / 1e9
    return (
        f"Parameters: {total:,} | Per rank: {4 * local:.2f} GB = {local:.2f} GB weights + "
        f"{local:.2f} GB gradients + {2 * local:.2f} GB optimizer"
    )
