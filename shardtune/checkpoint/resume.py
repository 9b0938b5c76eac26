"""Choose the checkpoint to resume from: one that every rank accepts, or none."""

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from shardtune.checkpoint import durable_fs
from shardtune.checkpoint.manifest import (
    PARTIAL,
    Checkpoint,
    DamagedCheckpoint,
    find_checkpoints,
    open_checkpoint,
    step_of,
)
from shardtune.checkpoint.run_dir import EXPORTED, LEFT_BY_A_RUN, MODELS, RunDir
from shardtune.checkpoint.verify import check_files
from shardtune.distributed.world import World
from shardtune.errors import UserError, first_few
from shardtune.log import logger, node_logger
from shardtune.units import rounded_gb

_STAGING = re.compile(r"\.(checkpoint_\d{7,})\.[0-9a-f]{12,}")  # see SaveAttempt
_STEP_MODEL = re.compile(r"\.?(step_\d{7,})(\.writing|\.old)?$")
_FROM_COPY = "restore it from a copy"


def agree_on_checkpoint(
    run_dir: RunDir,
    resume: str,
    world: World,
    require_settings: Callable[[Checkpoint], None] = lambda checkpoint: None,
    beginning: str | None = None,
) -> Checkpoint | None:
    """Choose the checkpoint to resume from. Collective.

    `resume` is `auto` for the newest one in run.dir whose bytes all match their digests, `never`
    for none, or a checkpoint's directory, in which a run begins. Where the newest one in run.dir is
    of a run with the same `beginning`, it goes on as with `auto`. `require_settings` refuses a
    checkpoint before its bytes are read. Each file is read by one of the ranks that see it. The
    reasons against newer checkpoints are logged. One that is prepared on all disks but not
    committed is committed now. Raises UserError.
    """
    if resume == "never" and beginning is None:
        return None
    staging = [path for path in _entries(run_dir.checkpoints) if _STAGING.fullmatch(path.name)]
    prepared = [path for path in staging if (path / "COMPLETE").exists()]
    own = find_checkpoints(run_dir.checkpoints) + prepared
    candidates, rejected = _candidates(own, False, run_dir, world)
    begun = _open(candidates[0], run_dir, world) if candidates and resume != "auto" else None
    is_named = resume != "auto"  # by the user
    if begun and beginning is not None and _beginning_of(begun, beginning) == beginning:
        is_named = False
        logger.info(f"run.resume={resume}: this is a restart, and the run that has begun goes on")
    elif resume == "never":
        return None
    if is_named:
        candidates, rejected = _candidates([Path(resume)], is_named, run_dir, world)
    is_loss = is_named or bool(rejected)  # a save that never ended loses nothing
    chosen = None
    for path_of in candidates:
        checkpoint = _open(path_of, run_dir, world)
        require_settings(checkpoint)
        checkpoint, problems = _check(checkpoint, run_dir, world)
        if not problems:
            chosen = checkpoint if is_named else _recover(checkpoint, run_dir, world)
            break
        is_committed = any(not Path(path).name.startswith(".") for path in path_of.values())
        is_loss = is_loss or is_committed
        remedy = _FROM_COPY if is_committed else "its save did not finish"
        rejected += [f"{problem} - {remedy}" for problem in problems]
    if rejected and is_loss and not chosen:
        problem = f"no checkpoint in {run_dir.checkpoints} can be resumed from - restore one"
        if is_named:
            problem = f"run.resume={resume} cannot be resumed from - use auto or another checkpoint"
        raise UserError(*rejected, f"{problem}, or start anew with run.resume=never")
    for reason in rejected:
        logger.info(f"Not accepted: {reason}")
    return chosen


def _beginning_of(checkpoint: Checkpoint, of_older: str) -> str:
    """Return where the checkpoint's run began. Older versions kept a directory alone."""
    resume = checkpoint.state["config"]["run"].get("resume", "never")
    older = of_older if resume == "never" else os.path.normpath(resume)
    return str(checkpoint.state.get("beginning", older))


def _candidates(
    paths: Iterable[Path], is_named: bool, run_dir: RunDir, world: World
) -> tuple[list[dict[int, str]], list[str]]:
    """Return the checkpoints, newest first, and the problems of those that cannot be opened.

    A checkpoint is a mapping from each disk's leader to the path of the disk's part.
    """
    opened: list[tuple[int, str, str]] = []
    problems: list[str] = []
    for path in paths if run_dir.is_leader(world) else ():
        try:
            checkpoint = open_checkpoint(path)
            if not is_named and checkpoint.name not in path.name:
                raise DamagedCheckpoint(f"{path}: has the manifest of {checkpoint.name}")
            opened.append((checkpoint.step, checkpoint.digest, str(path)))
        except (UserError, DamagedCheckpoint) as error:
            if is_named or not path.name.startswith("."):
                remedy = f" - {_FROM_COPY}" if isinstance(error, DamagedCheckpoint) else ""
                problems.append(f"{error}{remedy}")
    candidates: dict[tuple[int, str], dict[int, str]] = {}
    reports = world.all_gather_json([opened, problems])
    for rank, (rank_opened, _) in enumerate(reports):
        for step, digest, path_name in rank_opened:
            candidates.setdefault((step, digest), {}).setdefault(rank, path_name)
    newest_first = [candidates[key] for key in sorted(candidates, reverse=True)]
    return newest_first, list(chain(*(problems for _, problems in reports)))


def _open(path_of: dict[int, str], run_dir: RunDir, world: World) -> Checkpoint:
    """Open a candidate on all ranks. A rank whose disk has no part of it gets another rank's
    manifest."""
    path = path_of.get(run_dir.leader_of[world.rank])
    source = min(path_of)
    opened = open_checkpoint(Path(path_of[source])) if world.rank == source else None
    shared = [opened.name, opened.manifest, opened.digest] if opened else None
    name, manifest, digest = world.all_gather_json(shared)[source]
    return Checkpoint(name, manifest, digest, [Path(path)] if path else [])


def _check(checkpoint: Checkpoint, run_dir: RunDir, world: World) -> tuple[Checkpoint, list[str]]:
    """Read every byte; return the checkpoint with the holders of its files, and its problems."""
    logger.info(f"Checking every byte of {checkpoint.name}")
    leader = run_dir.leader_of[world.rank]
    ranks_of_disk = [rank for rank, other in enumerate(run_dir.leader_of) if other == leader]
    present = [name for name in sorted(checkpoint.files) if checkpoint.find(name)]
    share = present[ranks_of_disk.index(world.rank) :: len(ranks_of_disk)]
    holders: dict[str, list[int]] = {name: [] for name in checkpoint.files}
    damaged = dict[str, str]()
    for rank, verdicts in enumerate(world.all_gather_json(check_files(checkpoint, share))):
        for name, problem in verdicts.items():
            if problem:
                damaged[name] = problem
            else:
                holders[name].append(run_dir.leader_of[rank])
    missing = {name: f"{checkpoint.name}: {checkpoint.why_missing(name)}" for name in holders}
    problems = [(missing | damaged)[name] for name, disks in holders.items() if not disks]
    return replace(checkpoint, holders=holders), problems


def _recover(checkpoint: Checkpoint, run_dir: RunDir, world: World) -> Checkpoint:
    """Give a prepared checkpoint its final name on each disk where it has none yet."""
    final = [path.with_name(checkpoint.name) for path in checkpoint.directories]

    def commit() -> None:
        for old, new in zip(checkpoint.directories, final, strict=True):
            if old != new:
                durable_fs.rename(old, new)

    _on_disk_leaders(commit, run_dir, world)
    return replace(checkpoint, directories=final)


def _step_models(run_dir: RunDir) -> set[Path]:
    """Return the folders of steps' models, also those of which a kill has left a part alone."""
    entries = _entries(run_dir.path / MODELS)
    return {path.with_name(found[1]) for path in entries if (found := _STEP_MODEL.match(path.name))}


def _is_unfinished(path: Path, resumed: Checkpoint | None) -> bool:
    is_hidden = path.name.startswith(".checkpoint_") and not _is_part(path, resumed)
    return is_hidden and not (_STAGING.fullmatch(path.name) and (path / "COMPLETE").exists())


def _is_part(path: Path, checkpoint: Checkpoint | None) -> bool:
    parts = checkpoint.directories if checkpoint else []
    return path.exists() and any(map(path.samefile, parts))


def clear_leftovers(run_dir: RunDir, resumed: Checkpoint | None, world: World) -> None:
    """Leave on every disk only what belongs to the run that goes on from `resumed`. Collective.

    Unfinished saves and deletions are deleted. Uncommitted checkpoints are moved aside, and logged:
    they could be mistaken for this run's own. So are checkpoints newer than the one it resumes
    from, or, if that is elsewhere, everything that an earlier run left.
    """
    is_part = partial(_is_part, checkpoint=resumed)
    entries = _entries(run_dir.checkpoints)
    is_of_this_run = any(world.all_gather_json(any(map(is_part, entries))))

    def clear() -> Iterable[Path]:
        models = [*(run_dir.path / name for name in EXPORTED), *_step_models(run_dir)]
        unfinished = [entry for entry in entries if _is_unfinished(entry, resumed)]
        unfinished += filter(Path.exists, map(durable_fs.unfinished, models))
        copies = [*run_dir.checkpoints.glob(f"checkpoint_*/*{PARTIAL}")]
        unfinished += copies
        if unfinished:
            names = first_few([path.name for path in unfinished], 4)
            size = rounded_gb(sum(map(durable_fs.size, unfinished)))
            node_logger.info(f"Deleted, left by saves that did not finish: {names} ({size})")
        for model in models:
            durable_fs.recover_replaced(model)
        for entry in (*entries, *copies):
            if entry in unfinished:
                durable_fs.delete(entry)
            elif not is_part(entry) and (staging := _STAGING.fullmatch(entry.name)):
                yield durable_fs.move_aside(entry, entry.with_name(staging[1]))
        checkpoints = find_checkpoints(run_dir.checkpoints)
        if resumed and is_of_this_run:
            newer = [path for path in checkpoints if step_of(path) >= resumed.step]
            yield from (durable_fs.move_aside(path) for path in newer if not is_part(path))
            return
        earlier = [run_dir.checkpoints] if checkpoints else []
        earlier += [run_dir.path / name for name in LEFT_BY_A_RUN]
        earlier += sorted(_step_models(run_dir))
        yield from (durable_fs.move_aside(path) for path in earlier if path.exists())

    for path in _on_disk_leaders(lambda: list(map(str, clear())), run_dir, world):
        logger.info(f"Moved aside, not part of this run: {path}")


def _on_disk_leaders(work: Callable[[], Any], run_dir: RunDir, world: World) -> list[Any]:
    """Run `work` once per disk; return the items of all results on every rank."""
    is_leader = run_dir.is_leader(world)
    results = world.all_gather_json(world.run_on_all_ranks(lambda: work() if is_leader else []))
    return list(chain(*(result or [] for result in results)))


def _entries(directory: Path) -> list[Path]:
    return list(directory.iterdir()) if directory.is_dir() else []
