"""What a run checks and says before it reads a weight: where it writes, and every number that it derives."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from shardtune.checkpoint import Checkpoint, agree_on_checkpoint
from shardtune.checkpoint.run_dir import RunDir
from shardtune.config import Config, ModelConfig
from shardtune.config_io import changed_keys, to_dict
from shardtune.data.dataset import PreparedData
from shardtune.data.schedule import Position, Schedule, make_schedule
from shardtune.distributed.world import World
from shardtune.errors import UserError
from shardtune.log import logger
from shardtune.model.build import compute_dtype, local_bytes
from shardtune.model.files import fetch_weights
from shardtune.training.metrics import has_evaluation
from shardtune.training.optim import learning_rate, warmup_steps


def require_same_config(config: Config, world: World) -> None:
    """Every node must have been started with the configuration of node 0; run.dir may be each node's own disk.

    Raises:
        UserError: on every rank, with both values of every key that differs.
    """
    first = world.all_gather_json(to_dict(config))[0]

    different = [change for of_kind in changed_keys(first, config) for change in of_kind]
    own = [
        f"{key} is {json.dumps(of_first)} on node 0 and {json.dumps(here)} on node {world.node_rank} - start every "
        "node with the same configuration"
        for key, of_first, here in different
        if key not in ("run.dir", "distributed.join_timeout_s")
    ]
    if problems := dict.fromkeys(
        problem for of_rank in world.all_gather_json(own) for problem in of_rank
    ):
        raise UserError(*problems)


def choose_checkpoint(config: Config, run_dir: RunDir, world: World) -> Checkpoint | None:
    """The checkpoint to resume from, on which all ranks agree; what changed since is said, or refused."""
    found = agree_on_checkpoint(run_dir, config.run.resume, world)
    if found is None:
        return None
    allowed, forbidden = changed_keys(found.state["config"], config)
    if forbidden:
        raise UserError(
            *(
                f"{key} is {json.dumps(new)} and was {json.dumps(old)} in {found.name} - set it back, or "
                "start anew with another run.dir"
                for key, old, new in forbidden
            )
        )
    if found.world_size != world.size:
        allowed.append(("world size", found.world_size, world.size))
    for key, old, new in allowed:
        logger.info(
            f"Changed since {found.name}: {key} was {json.dumps(old)}, is {json.dumps(new)}"
        )
    return found


def require_same_revision(model: ModelConfig, world: World) -> None:
    """Each node has the weights, and where they come from the hub all have the same.

    Raises:
        UserError: with both revisions, or because a node lacks files.
    """
    revision = world.on_local_rank0(lambda: fetch_weights(model))
    (first, of_first), *others = dict(world.all_gather_json([world.node_name, revision])).items()
    for name, found in others:
        if found != of_first:
            raise UserError(
                f"model.path={model.path} is the hub's revision {of_first} on {first} and {found} on {name} - fetch "
                "one revision on every node, or name a directory"
            )


def require_same_model(resumed: Checkpoint, assets: Mapping[str, bytes]) -> None:
    """The architecture must be that of the checkpoint.

    Raises:
        UserError: with both values of every setting that differs.
    """
    old, new = resumed.state["model"], model_settings(assets)
    if problems := [
        f"{key} of the model's config.json is {json.dumps(new.get(key))} and was {json.dumps(old.get(key))} in "
        f"{resumed.name} - bring the same model back, or start anew with another run.dir"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key)
    ]:
        raise UserError(*problems)


def model_settings(assets: Mapping[str, bytes]) -> dict[str, Any]:
    """What config.json says of the model itself."""
    settings: dict[str, Any] = json.loads(assets["config.json"])
    return {
        key: value
        for key, value in settings.items()
        if key not in ("transformers_version", "_name_or_path")
    }


def owed_evaluation(
    config: Config, resumed: Checkpoint | None, run_dir: RunDir, world: World
) -> int | None:
    """Of which step the perplexity comes before the first step: 0, the baseline, or one that a signal cut short."""
    if resumed is None:
        return 0 if config.eval.baseline else None
    is_owed = resumed.state.get("owes_evaluation") and world.on_rank0(
        lambda: not has_evaluation(run_dir.path / "metrics.jsonl", resumed.step)
    )
    return resumed.step if is_owed else None


def plan_steps(
    config: Config, data: PreparedData, resumed: Checkpoint | None, world: World
) -> Schedule:
    """The schedule, which all ranks share; every number derived from it is said."""
    train, section = data.train, config.train
    rows_per_step = section.micro_batch_size * section.gradient_accumulation_steps * world.size
    schedule = make_schedule(
        train,
        max_length=config.data.max_length,
        packing=config.data.packing,
        seed=config.run.seed,
        rows_per_step=rows_per_step,
        epochs=section.epochs,
        max_steps=section.max_steps,
        start=Position(*(resumed.state[key] for key in ("step", "epoch", "row")))
        if resumed
        else Position(),
    )
    rows = schedule.rows_per_epoch
    if rows < world.size:
        raise UserError(
            f"an epoch has {rows} rows and the run {world.size} ranks - add data, lower data.max_length, "
            "set data.packing=false, or use fewer ranks"
        )
    keys = world.all_gather_json(data.key)
    if len(set(keys)) > 1:
        other = next(rank for rank, key in enumerate(keys) if key != keys[0])
        raise UserError(
            f"the data of rank {other} (digest {keys[other]}) is not that of rank 0 ({keys[0]}) - "
            "copy the same data, model and code to every node"
        )
    if resumed and resumed.state["data"] != data.key:
        raise UserError(
            f"the data (digest {data.key}) is not that of {resumed.name} ({resumed.state['data']}) - "
            "bring the same data, tokenizer and code back, or start anew with another run.dir"
        )
    announce(config, data, schedule, world)
    return schedule


def saved_reshard_policy(
    resumed: Checkpoint | None, config: Config, world: World
) -> list[bool] | None:
    """What the run decided of whole parameters and gradients before, where nothing has changed on which that hangs."""
    if resumed is None or resumed.world_size != world.size:
        return None
    allowed, _ = changed_keys(resumed.state["config"], config)
    changed = {key for key, _, _ in allowed}
    if changed & {"train.gradient_accumulation_steps", "parallel.replicate", "model.reduce_dtype"}:
        return None
    kept: list[bool] | None = resumed.state.get("residency")
    return kept


def announce(config: Config, data: PreparedData, schedule: Schedule, world: World) -> None:
    """Say what was counted and derived, each number with its formula."""
    for line in data.lines():
        logger.info(line)
    dtype = str(compute_dtype(config.model.compute_dtype, world.device)).removeprefix("torch.")
    logger.info(
        f"On {world.device.type}: forward and backward in {dtype} (model.compute_dtype={config.model.compute_dtype}), "
        f"weights and updates in {config.model.master_dtype}, gradients reduced in {config.model.reduce_dtype}"
    )
    if data.eval is None:
        logger.info(
            "Evaluation is skipped: neither data.eval nor data.eval_fraction names evaluation data"
        )
    rows, train, section = schedule.rows_per_epoch, data.train, config.train
    share = train.lengths.sum(dtype="int64") / (rows * config.data.max_length)
    logger.info(
        f"Rows per epoch: {rows} of at most {config.data.max_length} tokens, {share:.1%} full "
        f"(data.packing={str(config.data.packing).lower()}); {rows} / {schedule.rows_per_step}, rounded up, are "
        f"{schedule.steps_per_epoch} steps"
    )
    logger.info(
        f"Effective batch size: {section.micro_batch_size} (micro-batch) x "
        f"{section.gradient_accumulation_steps} (accumulation) x {world.size} (ranks) = {schedule.rows_per_step}"
    )
    warmup = warmup_steps(schedule.total_steps, config.scheduler)
    logger.info(
        f"Learning rate: up to {config.optimizer.lr} over {warmup} steps ({config.scheduler.warmup_ratio} x "
        f"{schedule.total_steps}, rounded up), then {config.scheduler.name}, at the last step "
        f"{learning_rate(schedule.total_steps, schedule.total_steps, config.optimizer.lr, config.scheduler):.3g}"
    )
    logger.info(
        f"Steps per epoch: {schedule.steps_per_epoch} | Total steps: {schedule.total_steps} | "
        f"Records: {data.train_summary.records} | Trained tokens: {train.trained_counts.sum(dtype='int64')}"
    )


def describe_mesh(world: World) -> str:
    """How many copies of the model there are, and whether each has a node to itself."""
    shards = world.mesh["shard"].size()
    nodes = world.all_gather_json(world.node_rank)
    crosses = any(
        len(set(nodes[start : start + shards])) > 1 for start in range(0, world.size, shards)
    )
    place = (
        "across nodes, where the network carries the sharding too"
        if crosses
        else "each within one node"
    )
    return f"Mesh: {world.replicas} (replicas) x {shards} (shards) = {world.size} ranks, {place}"


def describe_state(model: PreTrainedModel) -> str:
    """How many parameters there are, and what this rank holds of them and of AdamW's two moments."""
    total = sum(p.numel() for p in model.parameters())
    local = local_bytes(model)
    return (
        f"Parameters: {total} | On each rank: {local / 1e9:.2f} GB of weights and as much again for each of two "
        f"moments and the gradients = {4 * local / 1e9:.2f} GB"
    )
