"""Log what a run is before its first step."""

import os
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version

import torch
from transformers import PreTrainedModel

from shardtune.checkpoint import resume_rules
from shardtune.config import Config
from shardtune.config_io import remarks
from shardtune.data.dataset import PreparedData
from shardtune.data.schedule import Cost, Schedule
from shardtune.distributed.join import describe
from shardtune.distributed.layout import Layout
from shardtune.distributed.older_torch import untried_versions
from shardtune.distributed.rank_record import SHORT_START
from shardtune.distributed.world import World
from shardtune.log import logger, node_logger, quiet_libraries, setup_logging
from shardtune.metrics_schema import Change, StartEntry
from shardtune.model.facts.facts import ModelFacts
from shardtune.model.lora import describe_adapters
from shardtune.model.stages import divided
from shardtune.training.data_and_schedule import describe_sources
from shardtune.training.run import Run
from shardtune.training.states.sharded_optimizer import StateBytes
from shardtune.units import gb

# Attributes of routers with the width of their noise in training.
_JITTER = ("jitter_noise", "router_jitter_noise", "input_jitter_noise")


def start_logging(config: Config, world: World) -> None:
    """Log the `Training Configuration:` block, the memory that GPUs use before the run allocates
    any, and settings without effect."""
    setup_logging(world.is_main, world.is_node_main)
    quiet_libraries(world.is_main)
    if SHORT_START not in os.environ:
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


def describe_start(run: Run, data: PreparedData, schedule: Schedule, row_cost: Cost) -> StartEntry:
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
        data=[*data.lines, *describe_sources(config, data, schedule)],
    )


def log_model(
    whole: PreTrainedModel, facts: ModelFacts, config: Config, state: StateBytes, world: World
) -> None:
    """Log which weights are trained, by which stages, and the fullest rank's memory. Collective.

    `whole`: the model of all stages. `state`: the bytes of this rank's state.
    """
    # All lines are of the whole model, since only rank 0 logs and it may have one of many stages.
    for line in describe_adapters(whole, config.lora) if world.layout.is_lora else ():
        logger.info(line)
    for line in router_remarks(whole):
        logger.info(line)
    states = [StateBytes(**each) for each in world.all_gather_json(asdict(state))]
    fullest = max(states, key=lambda each: each.total)
    logger.info(
        f"Parameters: {facts.numel():,} | Per rank: {gb(fullest.total, 2)} GB = "
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
    if world.layout.row_ranks > 1:
        logger.info(_describe_rows(facts, world.layout))
    if world.layout.stages > 1:
        logger.info(_describe_stages(divided(facts.costs, world.layout.stages), world.layout))


def router_remarks(model: PreTrainedModel) -> Iterator[str]:
    """Yield what a user may not expect of a model's routers in training."""
    if any(getattr(module, name, None) for module in model.modules() for name in _JITTER):
        yield (
            f"Routers: {model.config.model_type} chooses experts with noise in training, another "
            "on each rank, so losses depend on the number of ranks. Evaluation has none"
        )
    config = model.config.get_text_config()
    weight = getattr(config, "router_aux_loss_coef", None)
    if weight and getattr(config, "output_router_logits", False):
        yield (
            f"Routers: config.json asks for a balancing loss (router_aux_loss_coef={weight}), "
            "which training does not add: its loss is that of the tokens alone"
        )


def _describe_rows(facts: ModelFacts, layout: Layout) -> str:
    line = f"Rows: each shared by {layout.row_ranks} ranks"
    if layout.tensor > 1:
        return f"{line}, which cut the matrices of each layer in {layout.tensor}"
    numbers = facts.numbers_of_heads
    shares = " or ".join(f"{heads // layout.context} of {heads}" for heads in numbers)
    return f"{line}, {shares} heads each"


def _describe_stages(layers: list[range], layout: Layout) -> str:
    stages, micro_batches = len(layers), layout.micro_batches
    parts = " and ".join(f"{part[0]}-{part[-1]}" for part in layers)
    return (
        f"Stages: {stages}, of layers {parts} | Idle: ({stages} - 1) / ({micro_batches} + {stages} "
        f"- 1) = {layout.bubble:.0%} of a step (the bubble)"
    )
