"""Compare a run with its checkpoint: log what a resume may change, and refuse the rest.

A refusal has both values and the remedies.
"""

import json
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig

from shardtune.checkpoint.manifest import Checkpoint
from shardtune.config import Config, resume_may_change
from shardtune.config_io import changed_keys
from shardtune.distributed.layout import Layout
from shardtune.distributed.tensors import dtype_name
from shardtune.distributed.world import World
from shardtune.errors import UserError, counted
from shardtune.log import logger

_START_ANEW = "start anew with run.resume=never or another run.dir"


def require_allowed_settings(resumed: Checkpoint, config: Config) -> None:
    """Raises UserError with every setting that a resume must not change and that has changed.

    Each field of `shardtune.config` says whether a resume may change it.
    """
    changes = changed_keys(resumed.state["config"], config)
    # Frozen weights are compared by their digest, so their folder may have another name.
    decided = {"model.path"} if "weights" in resumed.state else set()
    forbidden = [c for c in changes if not (c[0] in decided or resume_may_change(c[0]))]
    _require_equal(resumed, "set it back", forbidden)


def changes_since(resumed: Checkpoint, config: Config, world: World) -> list[tuple[str, Any, Any]]:
    changes = changed_keys(resumed.state["config"], config)
    if resumed.world_size != world.size:
        changes.append(("world size", resumed.world_size, world.size))
    return changes


def log_changes(resumed: Checkpoint, config: Config, world: World) -> None:
    for key, old, new in changes_since(resumed, config, world):
        logger.info(
            f"Changed since {resumed.name}: {key} was {json.dumps(old)}, is {json.dumps(new)}"
        )
    layout, before = world.layout, saved_rows_per_step(resumed)
    if layout.rows_per_step == before:
        return
    accumulation, rest = divmod(before, layout.rows_per_micro_batch)
    keeps = f"train.gradient_accumulation_steps={accumulation} keeps {before}"
    stages = layout.stages
    if rest or accumulation < stages:  # each stage needs a micro-batch
        rows = counted(layout.rows_per_micro_batch, "row")
        keeps = f"no train.gradient_accumulation_steps keeps {before}: each step adds {rows}"
        if stages > 1:
            keeps += f", and {stages} stages need at least {stages} steps"
    logger.warning(f"Effective batch was {before} rows, is {layout.rows_per_step}: {keeps}")


def saved_rows_per_step(resumed: Checkpoint) -> int:
    saved = resumed.state["config"]
    train, then = saved["train"], Layout.divided(resumed.world_size, saved["parallel"])
    return int(then.data_ranks * train["micro_batch_size"] * train["gradient_accumulation_steps"])


def require_same_data(resumed: Checkpoint, digest: str) -> None:
    """Raises UserError where `digest`, of the tokenized data, is not the checkpoint's."""
    remedy = "bring the same data, tokenizer and code back"
    _require_equal(resumed, remedy, [("the digest of the data", resumed.state["data"], digest)])


def require_same_weights(resumed: Checkpoint, digest: str) -> None:
    """Raises UserError where `digest`, of the frozen weights, is not the checkpoint's.

    A checkpoint of an older version has none, which is said.
    """
    if "weights" not in resumed.state:
        logger.info(
            f"{resumed.name} does not say which frozen weights it was trained on: those in "
            "model.path are taken, and the next checkpoint will say it"
        )
        return
    what = "the digest of the frozen weights in model.path"
    _require_equal(resumed, "bring the same files back", [(what, resumed.state["weights"], digest)])


def require_same_model(resumed: Checkpoint, config: PreTrainedConfig) -> None:
    old, new = resumed.state["model"], model_settings(config)
    values = [
        (f"{key} of the model's config.json", old.get(key), new.get(key))
        for key in sorted({*old, *new})
    ]
    _require_equal(resumed, "bring the same model back", values)


def _require_equal(
    resumed: Checkpoint, remedy: str, values: Sequence[tuple[str, Any, Any]]
) -> None:
    if problems := [
        f"{key} is {json.dumps(new)} and was {json.dumps(old)} in {resumed.name} - "
        f"{remedy}, or {_START_ANEW}"
        for key, old, new in values
        if old != new
    ]:
        raise UserError(*problems)


def model_settings(config: PreTrainedConfig) -> dict[str, Any]:
    dtype = dtype_name(config.dtype) if isinstance(config.dtype, torch.dtype) else config.dtype
    settings = json.loads(json.dumps({**config.to_dict(), "dtype": dtype or "float32"}))
    of_the_file = {"transformers_version", "_name_or_path"}
    return {key: value for key, value in settings.items() if key not in of_the_file}
