"""run.dir: which ranks see the same directory, and the lock against other runs."""

import fcntl
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from shardtune.distributed.world import World
from shardtune.errors import UserError
from shardtune.run_files import LOCK, METRICS

ADAPTER, BEST = "adapter", "best"  # exported models beside `model`
MODELS, COMMANDS = "models", "commands"  # of steps, and the output of commands that score them
# What a run leaves beside checkpoints and MODELS, which may hold models of the user's too. A run
# that is not its continuation moves it aside.
EXPORTED = ("model", ADAPTER, BEST)
LEFT_BY_A_RUN = (METRICS, *EXPORTED, COMMANDS, "tensorboard", "profile")
_LOCK_WAIT_S = 10  # the processes of a run that was just killed may take this long to end


@dataclass(frozen=True)
class RunDir:
    """run.dir, which may be one shared directory or one on each node's own disk.

    `leader_of[rank]` is the first rank that sees the same directory, the leader of that disk.
    The leader holds `lock` until its process ends.
    """

    path: Path
    leader_of: list[int]
    lock: IO[str] | None

    @property
    def is_shared(self) -> bool:
        return not any(self.leader_of)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def is_leader(self, world: World) -> bool:
        return self.leader_of[world.rank] == world.rank


def open_run_dir(path: Path, world: World) -> RunDir:
    """Create run.dir, find out which nodes share it, and lock it. Collective. Raises UserError."""
    probe_name = world.run_on_all_ranks(lambda: _write_probe(path) if world.is_node_main else "")
    try:
        probes = world.all_gather_json(probe_name)
        visible = [rank for rank, name in enumerate(probes) if name and (path / name).exists()]
        leader_of = [ranks[0] for ranks in world.all_gather_json(visible)]
    finally:
        if probe_name:
            (path / probe_name).unlink(missing_ok=True)
    is_leader = leader_of[world.rank] == world.rank
    lock = world.run_on_all_ranks(lambda: _lock(path) if is_leader else None)
    return RunDir(path, leader_of, lock)


def _write_probe(path: Path) -> str:
    saved = path / "checkpoints"
    if saved.is_symlink() and not saved.exists():
        raise UserError(
            f"{saved} is a link to {saved.readlink()}, and that does not exist - mount its disk, "
            "or remove the link to begin anew"
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".seen.{secrets.token_hex(8)}"
        probe.touch()
    except OSError as error:
        raise UserError(
            f"run.dir={path} cannot be written: {error.strerror} ({error.filename}) "
            "- name a writable directory"
        ) from error
    return probe.name


def _lock(path: Path) -> IO[str]:
    """Lock run.dir until this process ends, however it ends; the lock file itself means nothing.

    This kind of lock holds between nodes on a shared filesystem, and no child inherits it.
    """
    file = (path / LOCK).open("a+", encoding="utf-8")
    deadline = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except OSError as error:
            is_held = isinstance(error, (BlockingIOError, PermissionError))
            if not is_held or time.monotonic() > deadline:
                problem = "is in use by another run" if is_held else "cannot be locked"
                raise UserError(
                    f"run.dir={path} {problem} ({error.strerror}) - end that run, or name another "
                    "directory, on a filesystem with locks"
                ) from error
            time.sleep(0.2)
