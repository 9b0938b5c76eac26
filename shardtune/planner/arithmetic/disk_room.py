"""Check that a disk has room for a run, before the run reads its weights."""

from __future__ import annotations

from pathlib import Path

from shardtune.checkpoint import Disk
from shardtune.config import Config
from shardtune.errors import UserError
from shardtune.log import logger
from shardtune.units import rounded_gb


def saves_left(every_steps: int, first_step: int, total_steps: int) -> int:
    """Return the number of checkpoints after `first_step`, the last step's included."""
    if first_step >= total_steps:
        return 0
    if every_steps == 0:
        return 1
    return total_steps // every_steps - first_step // every_steps + (total_steps % every_steps > 0)


def require_room(
    disk: Disk,
    checkpoint_bytes: float,
    exported_bytes: float,
    saves: int,
    config: Config,
    resumed: str | None,
) -> None:
    """Log it if a disk will be full before the run ends.

    `checkpoint_bytes`, `exported_bytes`: this disk's part of one checkpoint, and of all models.
    `resumed`: the name of the checkpoint that the run resumes.

    Raises:
        UserError: the disk cannot hold one checkpoint, and `run.ignore_plan` is false.
    """
    place = f"run.dir={config.run.dir} on {disk.node}"
    if Path(disk.directory) != Path(config.run.dir):
        place += f", the disk of {disk.directory}"
    free = f"{rounded_gb(disk.room)} are free"
    if disk.cleared_bytes:
        free += f" ({rounded_gb(disk.cleared_bytes)} of it once unfinished saves are deleted)"
    if checkpoint_bytes > disk.room:
        needed = rounded_gb(checkpoint_bytes)
        problem = f"{place}: a checkpoint takes {needed} of this disk, and {free}"
        if not config.run.ignore_plan:
            elsewhere = "name a run.dir"
            if resumed:
                auto = f"{config.run.dir}/checkpoints/{resumed}"
                directory = auto if config.run.resume == "auto" else config.run.resume
                elsewhere = f"go on with run.resume={directory} and a run.dir"
            raise UserError(
                f"{problem} - free {rounded_gb(checkpoint_bytes - disk.room)}, or {elsewhere} on "
                "another disk; run.ignore_plan=true starts it all the same"
            )
        logger.info(f"Disk: {problem}; the run starts all the same (run.ignore_plan=true)")
        return
    # The next one is written before the oldest is deleted.
    keep = config.checkpoint.keep
    most = max(disk.checkpoints, min(keep + 1, disk.checkpoints + saves))
    saved_bytes = (most - disk.checkpoints) * checkpoint_bytes
    more = saved_bytes + exported_bytes
    if more > disk.room:
        parts = [f"checkpoints (checkpoint.keep={keep}, and the next one)"] * (saved_bytes > 0)
        parts += [f"{rounded_gb(exported_bytes)} of models"] * (exported_bytes > 0)
        failures = ["a save that fails is said, and training goes on"] * (saved_bytes > 0)
        failures += ["a final model that fails ends the run with 1"] * (exported_bytes > 0)
        lower = ", or lower checkpoint.keep" if saved_bytes and keep > 1 else ""
        logger.info(
            f"Disk: {place}: {free}, and the run will add {rounded_gb(more)}: "
            f"{' and '.join(parts)}. Make room for {rounded_gb(more - disk.room)} meanwhile"
            f"{lower}: {' and '.join(failures)}"
        )
