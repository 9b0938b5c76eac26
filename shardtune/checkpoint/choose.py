"""From which checkpoint a run goes on: one that every rank accepts, or none."""

from __future__ import annotations

from pathlib import Path

from ..errors import Refused
from ..world import World
from .files import Checkpoint, check_rank_file, find_checkpoints, move_aside, open_checkpoint


def agree_on_checkpoint(directory: Path, resume: str, world: World) -> Checkpoint | None:
    """`auto`: the newest in `directory` whose digests hold on every rank; `never`: None; else that directory.

    Of newer ones that do not hold the reason is said.

    Raises:
        Refused: on every rank, if there are checkpoints and none holds, or if it is of another number of ranks.
    """
    if resume == "never":
        return None
    if resume != "auto":
        return _require_same_size(_require_intact(Path(resume), world), world)
    rejected: list[str] = []
    for path in world.from_main(lambda: list(map(str, find_checkpoints(directory)))):
        try:
            intact = _require_intact(Path(path), world)
        except Refused as refused:
            rejected.append(refused.problems[0])
            continue
        for reason in rejected:
            world.say(f"Not accepted: {reason}")
        return _require_same_size(intact, world)
    if rejected:
        raise Refused(
            *rejected,
            f"no checkpoint in {directory} can be resumed from - mend one, or start anew with run.resume=never",
        )
    return None


def set_aside(run_dir: Path, resumed: Checkpoint | None) -> list[str]:
    """Rename what would be mistaken for this run's: checkpoints newer than the one it resumes from, or, when it comes
    from elsewhere, all that an earlier run left in `run_dir`. Returns the new names."""
    checkpoints = find_checkpoints(run_dir / "checkpoints")
    mine = [path for path in checkpoints if resumed and path.samefile(resumed.path)]
    if mine:
        in_the_way = checkpoints[: checkpoints.index(mine[0])]
    else:
        in_the_way = [path for name in ("checkpoints", "metrics.jsonl", "model") if (path := run_dir / name).exists()]
    return [str(move_aside(path)) for path in in_the_way]


def _require_intact(path: Path, world: World) -> Checkpoint:
    checkpoint = world.agree(lambda: open_checkpoint(path))
    if checkpoint.world_size == world.size:
        world.agree(lambda: check_rank_file(checkpoint, world.rank))
    return checkpoint


def _require_same_size(checkpoint: Checkpoint, world: World) -> Checkpoint:
    if checkpoint.world_size != world.size:
        raise Refused(
            f"{checkpoint.path} was written by {checkpoint.world_size} ranks and this run has {world.size}; "
            f"resuming on another number of ranks is not built yet - start {checkpoint.world_size} ranks"
        )
    return checkpoint
