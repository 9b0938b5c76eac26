"""All that a run checks, reads and logs before it builds the model.

Each function is collective, and raises UserError on every rank where one refuses.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel

from shardtune.checkpoint import agree_on_checkpoint, resume_rules
from shardtune.checkpoint.assets import SOURCE, links_out_of, list_source, model_assets
from shardtune.checkpoint.export.model_files import require_exportable, require_index
from shardtune.checkpoint.run_dir import open_run_dir
from shardtune.config import Config
from shardtune.config_io import changed_keys, remarks, shared_settings, to_dict
from shardtune.data import dataset
from shardtune.data.dataset import PreparedData, read_chat_template
from shardtune.data.schedule import Cost, Position, Schedule, source_weights
from shardtune.distributed.join import describe
from shardtune.distributed.layout import Layout
from shardtune.distributed.older_torch import untried_versions
from shardtune.distributed.progress import Phase
from shardtune.distributed.world import World
from shardtune.errors import UserError, all_of, counted
from shardtune.log import logger, node_logger, quiet_libraries, setup_logging
from shardtune.metrics_schema import Change, StartEntry
from shardtune.model.build import require_trainable
from shardtune.model.documents.attention_check import require_documents_apart
from shardtune.model.lora import describe_adapters
from shardtune.model.source.files import fetch_weights, model_folder, read_model_config
from shardtune.model.source.quantised import describe_quantised
from shardtune.model.source.text_model import describe_type
from shardtune.model.source.weight_files import weights_digest
from shardtune.model.stages import layers_of_stages, require_composable
from shardtune.model.support import router_noise
from shardtune.training.context import Run
from shardtune.training.observers.metrics import read_entries
from shardtune.training.observers.sinks import require_packages
from shardtune.training.optim import learning_rate, warmup_steps
from shardtune.training.out_of_memory import weights_fit
from shardtune.training.pipeline import idle_share
from shardtune.training.states.reshard import ReshardPolicy
from shardtune.training.states.state_bytes import StateBytes
from shardtune.units import gb

# Of each stage: from here on the bubble hardly counts (GPipe, arXiv 1811.06965).
_ENOUGH_MICRO_BATCHES = 4


def start_logging(config: Config, world: World) -> None:
    """Log the `Training Configuration:` block, what GPUs have in use before the run has allocated
    anything, and every setting that has no effect."""
    setup_logging(world.is_main, world.is_node_main)
    quiet_libraries(world.is_main)
    node_logger.info(describe(world))
    if world.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(world.device)
        beside = max(world.all_gather_json(total - free - torch.cuda.memory_reserved(world.device)))
        ranks = f", the most of {world.size} ranks" if world.size > 1 else ""
        logger.info(
            f"GPU memory: {gb(beside, 2)} GB in use beside PyTorch's (CUDA's context, NCCL, "
            f"other processes{ranks})"
        )
    for remark in (*untried_versions(), *remarks(config)):
        logger.info(remark)
    if config.optimizer.offload and not world.layout.is_gpu:
        logger.info("optimizer.offload=true moves nothing: a CPU has no other memory")


def require_same_config(config: Config, world: World) -> None:
    """Refuse a node that was started with another configuration than node 0."""
    remedy = "start every node with the same configuration"
    _require_same(shared_settings(config), remedy, world)


def _require_same(values: Mapping[str, Any], remedy: str, world: World) -> None:
    """Refuse values that are not node 0's, with both. They are JSON-able, with keys alike."""
    (node0, expected), *others = world.all_gather_json([world.node_name, dict(values)])
    problems = [
        f"{name} is {json.dumps(expected[name])} on {node0} and {json.dumps(value)} on {node} - "
        f"{remedy}"
        for node, found in others
        for name, value in sorted(found.items())
        if value != expected[name]
    ]
    if problems:
        raise UserError(*dict.fromkeys(problems))


def open_run(config: Config, world: World) -> Run:
    """Lock the run's directory, and choose the checkpoint to resume from.

    Refuses a directory in use, and a setting that must not change.
    """
    directory = open_run_dir(Path(config.run.dir), world)
    require_settings = partial(resume_rules.require_allowed_settings, config=config)
    resumed = agree_on_checkpoint(directory, config.run.resume, world, require_settings)
    if resumed:
        resume_rules.log_changes(resumed, config, world)
    today = datetime.date.today().isoformat()
    date = world.on_rank0(lambda: resumed.state["date"] if resumed else today)
    return Run(config, world, directory, resumed, datetime.date.fromisoformat(date))


def read_model_files(run: Run) -> tuple[PretrainedConfig, dict[str, bytes]]:
    """Read the model's configuration, fetch its weights, and read the files beside them.

    No weight is read. Refuses a model that cannot be trained as configured, before its weights are
    fetched, or exported, data that is missing, and two revisions of the model.
    """
    config, world = run.config, run.world
    world.progress.enter(Phase.PREPARING_DATA)
    with weights_fit(world.layout):
        model_config, *_ = world.run_on_all_ranks(
            lambda: all_of(
                lambda: _read_trainable(config, world),
                lambda: dataset.find_sources(config.data) if world.is_node_main else None,
                lambda: require_packages(config.logging) if world.is_main else None,
            )
        )
        world.on_rank0(lambda: require_documents_apart(world.layout, model_config))
        world.on_rank0(lambda: require_composable(world.layout, model_config))
    revision = world.on_local_rank0(lambda: fetch_weights(config.model, require_index))
    what = f"the hub's revision of model.path={config.model.path}"
    _require_same({what: revision}, "fetch one revision, or name a directory", world)
    assets = world.run_on_all_ranks(lambda: _read_assets(config))
    folder = _folder_of(config.model.path)
    for note in filter(None, (describe_type(folder, model_config), describe_quantised(folder))):
        logger.info(note)
    for link in links_out_of(folder):
        logger.warning(
            f"{link} leads out of its folder, to {link.resolve()}, and is not copied into exported "
            "models - put the file itself there if it belongs to the model"
        )
    if config.model.init == "pretrained":
        # Every disk has a copy, and they must be alike.
        source = world.on_rank0(lambda: list_source(config.model.path))
        if run.world.layout.is_lora:
            source["weights"] = _identify_frozen(run)
        assets[SOURCE] = json.dumps(source).encode()
        world.on_rank0(lambda: require_exportable(assets, folder))
    return model_config, assets


def _read_assets(config: Config) -> dict[str, bytes]:
    """Return the files beside the weights; `data.chat_template` in place of the model's."""
    assets = model_assets(_folder_of(config.model.path))
    if config.data.chat_template:
        assets["chat_template.jinja"] = read_chat_template(config.data.chat_template).encode()
    return assets


def _read_trainable(config: Config, world: World) -> PretrainedConfig:
    model_config = read_model_config(config.model, config.data.max_length)
    require_trainable(config, model_config, world)
    return model_config


def _folder_of(path: str) -> Path:
    folder = model_folder(path)
    assert folder, path  # its config.json was read
    return folder


def _identify_frozen(run: Run) -> str:
    """Return the digest of the weights that adapters leave as they are.

    Refuses other weights than another node or the checkpoint has.
    """
    world, path = run.world, run.config.model.path
    digest = world.on_local_rank0(lambda: weights_digest(_folder_of(path)))
    what = f"the digest of the weights in model.path={path}"
    _require_same({what: digest}, "copy the same files to every node", world)
    if run.resumed:
        resume_rules.require_same_weights(run.resumed, digest)
    return digest


def read_data(run: Run, model_config: PretrainedConfig) -> PreparedData:
    """Tokenize the data, or open its cache.

    Refuses broken data, and other data or another model than another node or the checkpoint has.
    """
    config, world, resumed = run.config, run.world, run.resumed
    path = config.model.path
    encoder = world.run_on_all_ranks(lambda: dataset.build_encoder(path, config.data, run.date))
    folder = world.on_local_rank0(lambda: str(dataset.prepare_data(config.data, encoder)))
    data = dataset.open_prepared(Path(folder))
    vocabulary = model_config.get_text_config().vocab_size
    world.run_on_all_ranks(lambda: data.require_vocabulary(encoder.tokenizer, vocabulary))
    remedy = "copy the same data, model and code to every node"
    _require_same({"the digest of the tokenized data": data.key}, remedy, world)
    if resumed:
        resume_rules.require_same_data(resumed, data.key)
        resume_rules.require_same_model(resumed, model_config)
    return data


def make_schedule(run: Run, data: PreparedData) -> Schedule:
    """Lay out all steps that are left, and log every number that follows from the configuration.

    Refuses an epoch with fewer rows than the run has ranks.
    """
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
    for line in (*data.lines, *_describe_schedule(config, data, schedule, world)):
        logger.info(line)
    return schedule


def _describe_schedule(
    config: Config, data: PreparedData, schedule: Schedule, world: World
) -> Iterator[str]:
    """Yield a line for each number that the configuration and the data give, with its formula."""
    layout, scheduler = world.layout, config.scheduler
    total, rows = schedule.total_steps, schedule.rows_per_epoch
    yield from _describe_sources(config, data, schedule)
    if not data.eval:
        yield "Evaluation is skipped: neither data.eval nor data.eval_fraction names any data"
    yield (
        f"Precision: {layout.compute_dtype} in forward and backward "
        f"(model.compute_dtype={config.model.compute_dtype}), {layout.master_dtype} weights and "
        f"updates, gradients reduced in {layout.reduce_dtype}"
    )
    tokens = schedule.sum_by_source(data.train.lengths).sum()
    fill = tokens / (rows * config.data.max_length)
    yield (f"Rows per epoch: {rows} of up to {config.data.max_length} tokens, {fill:.1%} full")
    if config.data.packing:
        unpacked = -(-len(schedule.first_epoch) // schedule.rows_per_step)
        yield (
            f"Packing: rows hold {schedule.records_per_row:.1f} records, so a step trains as many "
            f"as {unpacked / schedule.steps_per_epoch:.1f} steps with data.packing=false: "
            f"{schedule.steps_per_epoch} steps an epoch instead of {unpacked}"
        )
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


def _describe_sources(config: Config, data: PreparedData, schedule: Schedule) -> Iterator[str]:
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


def find_pending_evaluation(run: Run, data: PreparedData, schedule: Schedule) -> int | None:
    """Return the step whose evaluation comes before the first step, if there is one.

    That is step 0, the baseline, or the step of the checkpoint where a signal cut its evaluation
    short: it is due, and metrics.jsonl has the step and not the evaluation.
    """
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


def saved_reshard_policy(run: Run) -> ReshardPolicy | None:
    """Return the resumed run's decision, or None where it had other ranks or another mesh."""
    resumed = run.resumed
    if resumed is None or resumed.world_size != run.world.size:
        return None
    changed = changed_keys(resumed.state["config"], run.config)
    is_alike = not any(key.startswith("parallel.") for key, *_ in changed)
    return ReshardPolicy(*resumed.state["residency"]) if is_alike else None


def state_of_run(
    run: Run,
    model_config: PretrainedConfig,
    assets: Mapping[str, bytes],
    data: PreparedData,
    reshard: ReshardPolicy,
) -> dict[str, Any]:
    """Return the state that each checkpoint of the run holds beside its tensors and position."""
    frozen = json.loads(assets.get(SOURCE, b"{}")).get("weights")
    return {
        "date": run.date.isoformat(),
        "data": data.key,
        "config": to_dict(run.config),
        "model": resume_rules.model_settings(model_config),
        **({"weights": frozen} if frozen else {}),
        "residency": list(vars(reshard).values()),  # the key that older checkpoints have, too
    }


def describe_start(run: Run, data: PreparedData, schedule: Schedule, row_cost: Cost) -> StartEntry:
    """Return the start for `metrics.jsonl`: what the run begins from, with what, and how far."""
    config, world, resumed = run.config, run.world, run.resumed
    changes = resume_rules.changes_since(resumed, config, world) if resumed else []
    return StartEntry(
        kind="start",
        step=resumed.step if resumed else 0,
        total_steps=schedule.total_steps,
        world_size=world.size,
        data_ranks=world.layout.data_ranks,
        micro_batch_size=world.layout.micro_batch_size,
        gradient_accumulation_steps=world.layout.micro_batches,
        epoch=schedule.start.epoch,
        row=schedule.start.row,
        row_cost=asdict(row_cost),
        date=run.date.isoformat(),
        data_key=data.key,
        device=world.device.type,
        versions={name: version(name) for name in ("torch", "transformers")},
        changes=[Change(key=key, old=old, new=new) for key, old, new in changes],
        data=[*data.lines, *_describe_sources(config, data, schedule)],
    )


def log_model(whole: PreTrainedModel, config: Config, state: StateBytes, world: World) -> None:
    """Log which weights are trained, by which stages, and the memory that the fullest rank needs.

    Collective. `whole`: the model of all stages. `state`: that of this rank.
    """
    for line in describe_adapters(whole, config.lora) if world.layout.is_lora else ():
        logger.info(line)
    if noise := router_noise(whole):
        logger.info(noise)
    total = sum(p.numel() for p in whole.parameters())
    states = [StateBytes(**each) for each in world.all_gather_json(asdict(state))]
    fullest = max(states, key=lambda each: each.total)
    logger.info(
        f"Parameters: {total:,} | Per rank: {gb(fullest.total, 2)} GB = "
        f"{gb(fullest.parameters, 2)} GB weights + {gb(fullest.gradients, 2)} GB gradients + "
        f"{gb(fullest.optimizer, 2)} GB optimizer"
    )
    if fullest.host:
        logger.info(
            f"Host memory: {gb(fullest.host, 2)} GB pinned per rank = "
            f"{gb(fullest.host_masters, 2)} GB masters + "
            f"{gb(fullest.host_gradients, 2)} GB gradients + "
            f"{gb(fullest.host_optimizer, 2)} GB optimizer"
        )
    if world.layout.checkpointing == "offload":
        is_cpu = world.device.type == "cpu"
        where = "in the same memory on a CPU" if is_cpu else "in pinned host memory"
        logger.info(f"Activation checkpointing: full, with the layers' inputs {where}")
    if world.layout.stages > 1:
        logger.info(_describe_stages(layers_of_stages(whole, world.layout.stages), world.layout))


def _describe_stages(layers: list[range], layout: Layout) -> str:
    """Return a line with the layers of each stage, the idle share of a step, and its remedy."""
    stages, rows, micro_batches = len(layers), layout.micro_batch_size, layout.micro_batches
    parts = " and ".join(f"{part[0]}-{part[-1]}" for part in layers)
    idle = idle_share(stages, micro_batches)
    line = (
        f"Stages: {stages}, of layers {parts} | Idle: ({stages} - 1) / ({micro_batches} + {stages} "
        f"- 1) = {idle:.0%} of a step (the bubble)"
    )
    more = rows * micro_batches if rows > 1 else _ENOUGH_MICRO_BATCHES * stages
    if micro_batches >= min(more, _ENOUGH_MICRO_BATCHES * stages):
        return line
    smaller = "train.micro_batch_size=1 " if rows > 1 else ""
    less = f"{idle_share(stages, more):.0%}"
    return f"{line} - {smaller}train.gradient_accumulation_steps={more} makes it {less}"
