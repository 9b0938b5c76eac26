"""Open a run, and make the state that its checkpoints hold beside tensors."""

import datetime
import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PretrainedConfig

from shardtune.checkpoint import Checkpoint, agree_on_checkpoint, resume_rules
from shardtune.checkpoint.assets import SOURCE
from shardtune.checkpoint.run_dir import RunDir, open_run_dir
from shardtune.config import Config
from shardtune.config_io import changed_keys, shared_settings, to_dict
from shardtune.data.dataset import PreparedData
from shardtune.distributed.world import World
from shardtune.errors import UserError
from shardtune.log import logger
from shardtune.run_files import METRICS
from shardtune.training.states.reshard import ReshardPolicy

_RESTARTERS = ("KUBERNETES_SERVICE_HOST", "SKYPILOT_TASK_ID", "TORCHELASTIC_MAX_RESTARTS")


@dataclass(frozen=True)
class Run:
    """One run: its configuration, its processes, its directory and where it begins."""

    config: Config
    world: World
    directory: RunDir
    resumed: Checkpoint | None
    date: datetime.date  # the run's first start, for chat templates that print the date
    beginning: str  # the checkpoint's directory in which it has begun, else Slurm's job

    @property
    def resumed_step(self) -> int | None:
        return self.resumed.step if self.resumed else None

    @property
    def metrics_file(self) -> Path:
        return self.directory.path / METRICS


def open_run(config: Config, world: World) -> Run:
    """Lock the run's directory, and choose the checkpoint to resume from.

    Refuses nodes whose configurations differ, a directory in use, and a setting that a resume must
    not change.
    """
    world.require_same(shared_settings(config), "start every node with the same configuration")
    directory = open_run_dir(Path(config.run.dir), world)
    if config.checkpoint.mirror is True and directory.is_shared:
        raise UserError(
            f"checkpoint.mirror=true: all ranks see {config.run.dir} on one disk, so there is no "
            "other to copy to - use auto"
        )
    require_settings = partial(resume_rules.require_allowed_settings, config=config)
    beginning = _beginning(config)
    resumed = agree_on_checkpoint(directory, config.run.resume, world, require_settings, beginning)
    if resumed:
        resume_rules.log_changes(resumed, config, world)
        is_mirrored = config.checkpoint.mirror is not False and not directory.is_shared
        if is_mirrored and min(map(len, resumed.holders.values())) == 1:
            logger.warning(
                f"{resumed.name} has parts on one disk alone, and is lost with it until the next "
                "checkpoint is mirrored"
            )
        if config.run.resume in ("auto", "never"):
            beginning = resumed.state.get("beginning")
    today = datetime.date.today().isoformat()
    date = world.on_rank0(lambda: resumed.state["date"] if resumed else today)
    return Run(
        config,
        world,
        directory,
        resumed,
        datetime.date.fromisoformat(date),
        _job() if beginning is None else beginning,
    )


def _job() -> str:
    """Return Slurm's job, which keeps its number when it is requeued."""
    return f"job {os.environ.get('SLURM_JOB_ID', '')}"


def _beginning(config: Config) -> str | None:
    """Return where the run begins, by which a restart knows it; None where it shall begin anew.

    `run.resume=never` is for starts by a person.
    """
    if config.run.resume != "never":
        return _job() if config.run.resume == "auto" else os.path.normpath(config.run.resume)
    if os.environ.get("SLURM_RESTART_COUNT", "0") != "0":
        return _job()
    restarters = [name for name in _RESTARTERS if os.environ.get(name, "0") != "0"]
    for variable in restarters:
        logger.warning(
            f"run.resume=never: {variable} is set, and each restart by what sets it begins "
            "anew - leave run.resume out, and the run goes on"
        )
    return None


def saved_reshard_policy(run: Run) -> ReshardPolicy | None:
    """Return the resumed run's policy, or None if it had another number of ranks or mesh."""
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
    frozen = json.loads(assets.get(SOURCE, b"{}")).get("weights")
    names = [source.label for source in run.config.data.train_sources.values()]
    counted = (data.train.begins_record, data.train.trained_counts)
    records, tokens = (np.bincount(data.train.source, each, len(names)) for each in counted)
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "sources": [
            [name, int(r), int(t)] for name, r, t in zip(names, records, tokens, strict=True)
        ],
        "date": run.date.isoformat(),
        "beginning": run.beginning,
        "data": data.key,
        "config": to_dict(run.config),
        "model": resume_rules.model_settings(model_config),
        **({"weights": frozen} if frozen else {}),
        "residency": list(vars(reshard).values()),  # older checkpoints have this key
    }
