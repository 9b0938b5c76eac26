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
from shardtune.units import gb

_NAME = re.compile(r"step_(\d{7,})")
_MARK = "models"  # a folder that a run has written here; a copy of another model lacks it


class StepModels:
    """Writes the models of steps, and keeps the newest of them. All methods are collective.

    `in_use`: returns on rank 0 the folders that a command reads, or waits for.
    """

    def __init__(
        self,
        run_dir: RunDir,
        live: LiveModel,
        keep: int,
        in_use: Callable[[], Iterable[Path]],
        world: World,
    ) -> None:
        self._folder, self._live, self._keep = run_dir.path / MODELS, live, keep
        self._in_use, self._world = in_use, world

    def write(self, step: int) -> Path | None:
        """Write the model of this step; return its folder, or None where it cannot be written."""
        self._world.progress.enter(Phase.EXPORTING, step)
        out = self._folder / f"step_{step:07d}"
        about = {"step": step, _MARK: self._folder.name}
        with contextlib.suppress(OSError):  # then the model cannot be written either
            if self._world.is_main and out.exists() and not self._is_own(out):
                logger.info(f"Another folder moved aside: {durable_fs.move_aside(out)}")
        problem = self._live.write(out, about, "make room, and that of a later step is written")
        if problem:
            logger.info(f"Model of step {step} not written: {problem}")
            return None
        logger.info(f"Saved the model of step {step} in {out}, {gb(self._live.n_bytes, 2)} GB")
        return out

    def delete_old(self, step: int) -> None:
        """Delete on rank 0's disk all but the newest models up to this step, the run's own alone.

        Models of later steps, from before a resume, go first.
        """
        if self._world.is_main:
            with contextlib.suppress(OSError):  # the next model tries again
                self._delete_old(step)

    def _delete_old(self, step: int) -> None:
        found = ((_NAME.fullmatch(path.name), path) for path in self._folder.iterdir())
        own = {int(name[1]): path for name, path in found if name and self._is_own(path)}
        kept = sorted(number for number in own if number <= step)[-self._keep :]
        used = {folder.name for folder in self._in_use()}
        for number, folder in own.items():
            if number not in kept and folder.name not in used:
                durable_fs.delete(folder)

    def _is_own(self, folder: Path) -> bool:
        return (read_listing(folder) or {}).get(_MARK) == self._folder.name
