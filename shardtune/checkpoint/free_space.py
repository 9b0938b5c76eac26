"""The disks on which a run writes: their free space, and the bytes that a start will delete."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from shardtune.checkpoint import durable_fs
from shardtune.checkpoint.manifest import Checkpoint, find_committed, step_of
from shardtune.checkpoint.resume import leftovers
from shardtune.checkpoint.run_dir import RunDir
from shardtune.distributed.world import World


class Disk(NamedTuple):
    """A disk of a run, as its leader sees it. `checkpoints/` may be a link to one of its own."""

    directory: str
    node: str  # the leader's
    ranks: int  # whose parts of checkpoints lie here
    has_models: bool
    free_bytes: int  # as it is now
    cleared_bytes: int  # that the start will delete
    checkpoints: int  # the run's checkpoints so far

    @property
    def room(self) -> int:
        """The bytes that the run may write."""
        return self.free_bytes + self.cleared_bytes


def find_disks(run_dir: RunDir, resumed: Checkpoint | None, world: World) -> list[Disk]:
    """Return the disks of a run. Collective."""
    mine = [*_disks_here(run_dir, resumed, world)] if run_dir.is_leader(world) else []
    return [Disk(*disk) for found in world.all_gather_json(mine) for disk in found]


def _disks_here(run_dir: RunDir, resumed: Checkpoint | None, world: World) -> Iterator[Disk]:
    saved = run_dir.checkpoints if run_dir.checkpoints.exists() else run_dir.path
    cleared, ranks = leftovers(run_dir, resumed), run_dir.leader_of.count(world.rank)
    is_one = _device(saved) == _device(run_dir.path)
    for path in (run_dir.path,) if is_one else (saved, run_dir.path):
        parts = ranks if is_one or path == saved else 0
        has_models = world.is_main and path == run_dir.path
        if parts or has_models:
            yield Disk(
                str(path),
                world.node_name,
                parts,
                has_models,
                durable_fs.free_bytes(path),
                sum(durable_fs.size(each) for each in cleared if _device(each) == _device(path)),
                _kept(run_dir, resumed) if parts else 0,
            )


def _device(path: Path) -> int:
    return path.stat().st_dev


def _kept(run_dir: RunDir, resumed: Checkpoint | None) -> int:
    """Return the number of checkpoints here that the run goes on with."""
    here = find_committed(run_dir.checkpoints) if resumed else []
    return sum(step_of(path) <= resumed.step for path in here) if resumed else 0
