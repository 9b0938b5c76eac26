"""run.dir: which ranks see the same directory, and the lock against other runs."""

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

_LOCK_WAIT_S = 10  # the processes of a run that was just killed may take as long to end


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
        """Whether this rank is the leader of its disk."""
        return self.leader_of[world.rank] == world.rank


def open_run_dir(path: Path, world: World) -> RunDir:
    """Create run.dir, find out which nodes share it, and lock it. Collective.

    Raises:
        UserError: on every rank, if a node cannot write there or another run does.
    """
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
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".seen.{secrets.token_hex(8)}"
        probe.touch()
        if os.path.lexists(path / "checkpoints"):  # it may be on another disk
            (path / "checkpoints" / probe.name).touch()
            (path / "checkpoints" / probe.name).unlink()
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
    file = (path / ".lock").open("a+", encoding="utf-8")
    deadline = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except (BlockingIOError, PermissionError) as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"run.dir={path} is in use by another run ({_lock_holder(file)}) "
                    "- wait for its end, end it, or name another run.dir"
                ) from error
            time.sleep(0.2)
        except OSError as error:
            raise UserError(
                f"run.dir={path} cannot be locked: {error.strerror} "
                "- name a directory on a filesystem with locks"
            ) from error


def _lock_holder(file: IO[str]) -> str:
    """Name the process that holds the lock; the system may not know one on another node."""
    lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    with contextlib.suppress(OSError):
        *_, process = struct.unpack("hhqqi4x", fcntl.fcntl(file, fcntl.F_GETLK, lock))
        if process > 0:
            return f"process {process} on {socket.gethostname()}"
    return "on another node"
