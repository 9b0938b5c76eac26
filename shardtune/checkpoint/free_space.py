"""The disks on which a run saves: how much is free there, and what a start will clear."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from shardtune.checkpoint import durable_fs
from shardtune.checkpoint.manifest import Checkpoint, find_committed, step_of
from shardtune.checkpoint.resume import leftovers
from shardtune.checkpoint.run_dir import RunDir
from shardtune.distributed.world import World


class Disk(NamedTuple):
    """One directory of a run, which some ranks share."""

    leader: int  # its first rank
    node: str  # the leader's
    ranks: int
    free_bytes: int  # as it is now
    cleared_bytes: int  # that the start will delete
    checkpoints: int  # of the run so far

    @property
    def room(self) -> int:
        """The bytes that the run may write."""
        return self.free_bytes + self.cleared_bytes


def find_disks(run_dir: RunDir, resumed: Checkpoint | None, world: World) -> list[Disk]:
    """Return the disks of a run. Collective."""
    mine = None
    if run_dir.is_leader(world):
        free = durable_fs.free_bytes(run_dir.path)
        cleared = sum(map(durable_fs.size, leftovers(run_dir, resumed)))
        mine = [world.node_name, free, cleared, _kept(run_dir, resumed)]
    ranks = Counter(run_dir.leader_of)
    return [
        Disk(rank, node, ranks[rank], free, cleared, kept)
        for rank, found in enumerate(world.all_gather_json(mine))
        if found
        for node, free, cleared, kept in [found]
    ]


def _kept(run_dir: RunDir, resumed: Checkpoint | None) -> int:
    """Return the number of checkpoints here that the run goes on with."""
    here = find_committed(run_dir.checkpoints) if resumed else []
    return sum(step_of(path) <= resumed.step for path in here) if resumed else 0
