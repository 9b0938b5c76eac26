"""`models/step_0000500/`: the model of every `export.every_steps`-th step, and of the last one."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from shardtune.checkpoint import durable_fs
from shardtune.checkpoint.export.listing import read_listing
from shardtune.checkpoint.export.live import LiveModel
from shardtune.checkpoint.run_dir import MODELS, RunDir
from shardtune.distributed.progress import Phase
from shardtune.distributed.world import World
from shardtune.log import logger
from shardtune.units import gb, rounded_gb

_NAME = re.compile(r"step_(\d{7,})")
_MARK = "models"  # a folder that a run has written here; a copy of another model lacks it


def step_model(run_dir: RunDir, step: int) -> Path:
    return run_dir.path / MODELS / f"step_{step:07d}"


def is_step_model(folder: Path) -> bool:
    """Return whether a run has written this folder as the model of a step."""
    return (read_listing(folder) or {}).get(_MARK) == folder.parent.name


class StepModels:
    """Writes the models of steps, and keeps the newest of them. All methods are collective.

    `to_be_saved` returns the bytes of the next checkpoint, and those that a save will still write,
    on the disk of run.dir/checkpoints. `in_use` returns on rank 0 the folders that a command reads,
    or waits for.
    """

    def __init__(
        self,
        run_dir: RunDir,
        live: LiveModel,
        to_be_saved: Callable[[], int],
        keep: int,
        in_use: Callable[[], Iterable[Path]],
        world: World,
    ) -> None:
        self._run_dir, self._folder = run_dir, run_dir.path / MODELS
        self._live, self._to_be_saved, self._keep = live, to_be_saved, keep
        self._in_use, self._world = in_use, world

    def write(self, step: int) -> Path | None:
        """Write the model of this step; return its folder, or None where it cannot be written."""
        self._world.progress.enter(Phase.EXPORTING, step)
        out, problem = step_model(self._run_dir, step), ""
        remedy = "make room, and that of a later step is written"
        if self._world.is_main:
            with contextlib.suppress(OSError):  # then the model cannot be written either
                if out.exists() and not is_step_model(out):
                    logger.info(f"Another folder moved aside: {durable_fs.move_aside(out)}")
                problem = self._lacking_room()
        problem = self._world.all_gather_json(problem)[0]
        about = {"step": step, _MARK: self._folder.name}
        problem = f"{problem} - {remedy}" if problem else self._live.write(out, about, remedy)
        if problem:
            logger.info(f"Model of step {step} not written: {problem}")
            return None
        logger.info(f"Saved the model of step {step} in {out}, {gb(self._live.n_bytes, 2)} GB")
        return out

    def _lacking_room(self) -> str:
        """Say why a model would take the room of a checkpoint; empty where it does not."""
        free, taken = durable_fs.free_bytes(self._folder), self._live.n_bytes
        saved = self._to_be_saved()
        is_one_disk = durable_fs.share_disk(self._folder, self._run_dir.checkpoints)
        if not is_one_disk or free - taken >= saved:
            return ""
        return (
            f"of {rounded_gb(free)} that are free it takes {rounded_gb(taken)}, and checkpoints "
            f"{rounded_gb(saved)}"
        )

    def delete_old(self, step: int) -> None:
        """Delete on rank 0's disk all but the newest models up to this step, the run's own alone.

        Models of later steps, from before a resume, go first.
        """
        if self._world.is_main:
            with contextlib.suppress(OSError):  # the next model tries again
                self._delete_old(step)

    def _delete_old(self, step: int) -> None:
        found = ((_NAME.fullmatch(path.name), path) for path in self._folder.iterdir())
        own = {int(name[1]): path for name, path in found if name and is_step_model(path)}
        kept = sorted(number for number in own if number <= step)[-self._keep :]
        used = {folder.name for folder in self._in_use()}
        for number, folder in own.items():
            if number not in kept and folder.name not in used:
                durable_fs.delete_hidden(folder)
