"""run.dir: which nodes see the same one, and that no other run writes there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from shardtune.distributed.world import World
from shardtune.errors import UserError

_LOCK_WAIT_S = 10  # as long as the processes of a run that was just killed may take to end


@dataclass(frozen=True)
class RunDir:
    """`leader_of`: of each rank the first one that sees the same directory. `lock` is held until the process ends."""

    path: Path
    leader_of: list[int]
    lock: IO[str] | None

    @property
    def is_shared(self) -> bool:
        return not any(self.leader_of)


def open_run_dir(path: Path, world: World) -> RunDir:
    """Create run.dir, see which nodes share it, and keep other runs out.

    Raises:
        UserError: on every rank, if a node cannot write there, or another run does.
    """

    def write_probe() -> str:
        try:
            path.mkdir(parents=True, exist_ok=True)
            probe = path / f".seen.{secrets.token_hex(8)}"
            probe.touch()
            if os.path.lexists(path / "checkpoints"):  # a disk of its own, perhaps
                (path / "checkpoints" / probe.name).touch()
                (path / "checkpoints" / probe.name).unlink()
        except OSError as error:
            raise UserError(
                f"run.dir={path} cannot be written: {error.strerror} ({error.filename}) - name one that can be"
            ) from error
        return probe.name

    mine = world.run_on_all_ranks(lambda: write_probe() if world.is_node_main else "")
    try:
        probes = world.all_gather_json(mine)
        seen = world.all_gather_json(
            [rank for rank, probe in enumerate(probes) if probe and (path / probe).exists()]
        )
    finally:
        if mine:
            (path / mine).unlink(missing_ok=True)
    leader_of = [of_rank[0] for of_rank in seen]
    lock = world.run_on_all_ranks(
        lambda: _lock(path) if leader_of[world.rank] == world.rank else None
    )
    return RunDir(path, leader_of, lock)


def _lock(path: Path) -> IO[str]:
    """The system releases the lock with the process, however that ends; the file it leaves behind means nothing.

    Such a lock holds between nodes too, where a filesystem is shared, and no child inherits it.
    """
    file = (path / ".lock").open("a+", encoding="utf-8")
    deadline = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except (BlockingIOError, PermissionError) as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"run.dir={path} is in use by another run ({_holder(file)}) - wait for its end, end it, or name "
                    "another run.dir"
                ) from error
            time.sleep(0.2)
        except OSError as error:
            raise UserError(
                f"run.dir={path} cannot be locked: {error.strerror} - name a directory on a filesystem with locks"
            ) from error
    return file


def _holder(file: IO[str]) -> str:
    """Who has the lock, as far as the system tells: of a process on another node it may not."""
    lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    with contextlib.suppress(OSError):
        _, _, _, _, process = struct.unpack("hhqqi4x", fcntl.fcntl(file, fcntl.F_GETLK, lock))
        if process > 0:
            return f"process {process} on {socket.gethostname()}"
    return "on another node"
