"""From which checkpoint a run goes on: one that every rank accepts, or none."""

from __future__ import annotations

from pathlib import Path

from ..errors import Refused
from ..world import World
from .files import Checkpoint, check_rank_file, find_checkpoints, move_aside, open_checkpoint


def agree_on_checkpoint(directory: Path, resume: str, world: World) -> Checkpoint | None:
    """`auto`: the newest in `directory` whose digests hold on every rank; `never`: None; else that directory.

    Newer ones that do not hold are moved aside, said with the reason.

    Raises:
        Refused: on every rank, if there are checkpoints and none holds, or if they are of another number of ranks.
    """
    if resume == "never":
        return None
    if resume != "auto":
        return _accept(Path(resume), world)
    candidates = [Path(path) for path in world.from_main(lambda: [str(p) for p in find_checkpoints(directory)])]
    rejected: list[tuple[Path, str]] = []
    for path in candidates:
        try:
            accepted = _accept(path, world)
        except Refused as refused:
            rejected.append((path, refused.problems[0]))
            continue
        for bad, reason in rejected:
            aside = world.from_main(lambda bad=bad: str(move_aside(bad)))
            world.say(f"{bad.name} is not accepted and now lies in {aside}: {reason}")
        return accepted
    if rejected:
        raise Refused(*(reason for _, reason in rejected),
                      f"no checkpoint in {directory} can be resumed from - mend one, or start anew with run.resume=never")
    return None


def set_earlier_run_aside(run_dir: Path) -> list[str]:
    """Rename what an earlier run left where a new one will write; the new names."""
    in_the_way = [path for name in ("checkpoints", "metrics.jsonl", "model") if (path := run_dir / name).exists()]
    return [str(move_aside(path)) for path in in_the_way]


def _accept(path: Path, world: World) -> Checkpoint:
    checkpoint = world.agree(lambda: open_checkpoint(path))
    size = checkpoint.manifest["world"]["size"]
    if size != world.size:
        raise Refused(f"{path} was written by {size} ranks and this run has {world.size}; resuming on another number "
                      f"of ranks is not built yet - start {size} ranks")
    world.agree(lambda: check_rank_file(checkpoint, world.rank))
    return checkpoint
