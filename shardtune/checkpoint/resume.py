"""Choose the checkpoint to resume from: one that every rank accepts, or none."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from shardtune.checkpoint import durable_fs
from shardtune.checkpoint.manifest import (
    Checkpoint,
    DamagedCheckpoint,
    checkpoint_name,
    find_checkpoints,
    open_checkpoint,
    step_of,
)
from shardtune.checkpoint.run_dir import RunDir
from shardtune.checkpoint.verify import check_files
from shardtune.distributed.world import World
from shardtune.errors import UserError
from shardtune.log import logger

_STAGING = re.compile(r"\.(checkpoint_\d{7,})\.[0-9a-f]{12,}")  # of a SaveAttempt
_FROM_COPY = "restore it from a copy"


@dataclass(frozen=True)
class _Candidate:
    """A checkpoint of which some disks hold a part: its path on each, by the disk's leader."""

    step: int
    digest: str
    paths: dict[int, str]

    @property
    def is_committed(self) -> bool:
        """Whether it has its final name on any disk; otherwise no log says that it is saved."""
        return any(not Path(path).name.startswith(".") for path in self.paths.values())


def agree_on_checkpoint(run_dir: RunDir, resume: str, world: World) -> Checkpoint | None:
    """Choose the checkpoint to resume from. Collective.

    `resume` is `auto`, the newest in run.dir of which every byte matches its digest; `never`, None;
    or a directory. Each file is read by one of the ranks that see it. The reasons against newer
    checkpoints are logged. One that is prepared on all disks but not committed is committed now.

    Raises:
        UserError: on every rank, if there are checkpoints and none can be used.
    """
    if resume == "never":
        return None
    is_named = resume != "auto"  # by the user
    paths = [Path(resume)] if is_named else _committed_and_prepared(run_dir.checkpoints)
    candidates, rejected = _candidates(paths, is_named, run_dir, world)
    is_loss = is_named or bool(rejected)  # an uncommitted checkpoint is none
    for candidate in candidates:
        checkpoint, problems = _check(candidate, run_dir, world)
        if not problems:
            _log_rejected(rejected)
            return checkpoint if is_named else _recover(checkpoint, run_dir, world)
        remedy = _FROM_COPY if candidate.is_committed else "its save did not finish"
        rejected += [f"{problem} - {remedy}" for problem in problems]
        is_loss = is_loss or candidate.is_committed
    if rejected and is_loss:
        problem = f"no checkpoint in {run_dir.checkpoints} can be resumed from - restore one"
        if is_named:
            problem = f"run.resume={resume} cannot be resumed from - use auto or another checkpoint"
        raise UserError(*rejected, f"{problem}, or start anew with run.resume=never")
    _log_rejected(rejected)
    return None


def _log_rejected(reasons: Iterable[str]) -> None:
    for reason in reasons:
        logger.info(f"Not accepted: {reason}")


def _committed_and_prepared(directory: Path) -> list[Path]:
    staging = [path for path in _entries(directory) if _STAGING.fullmatch(path.name)]
    prepared = [path for path in staging if (path / "COMPLETE").exists()]
    return find_checkpoints(directory) + prepared


def _candidates(
    paths: Iterable[Path], is_named: bool, run_dir: RunDir, world: World
) -> tuple[list[_Candidate], list[str]]:
    """Return the checkpoints on all disks, newest first, and the problems of unreadable ones."""
    opened: list[tuple[int, str, str]] = []
    problems: list[str] = []
    for path in paths if run_dir.is_leader(world) else ():
        try:
            checkpoint = open_checkpoint(path)
            opened.append((checkpoint.step, checkpoint.digest, str(path)))
        except (UserError, DamagedCheckpoint) as error:
            if is_named or not path.name.startswith("."):
                remedy = f" - {_FROM_COPY}" if isinstance(error, DamagedCheckpoint) else ""
                problems.append(f"{error}{remedy}")
    # Of two copies of a checkpoint, the one with its own name comes first.
    opened.sort(key=lambda entry: Path(entry[2]).name != checkpoint_name(entry[0]))
    by_digest: dict[tuple[int, str], dict[int, str]] = {}
    reports = world.all_gather_json([opened, problems])
    problems = list(chain(*(problems for _, problems in reports)))
    for rank, (rank_opened, _) in enumerate(reports):
        for step, digest, path_name in rank_opened:
            first = by_digest.setdefault((step, digest), {}).setdefault(rank, path_name)
            if first != path_name:
                problems.append(f"{path_name}: has the manifest of {first} - {_FROM_COPY}")
    newest_first = sorted(by_digest.items(), reverse=True, key=lambda item: item[0])
    return [_Candidate(*key, paths) for key, paths in newest_first], problems


def _check(candidate: _Candidate, run_dir: RunDir, world: World) -> tuple[Checkpoint, list[str]]:
    """Read every byte of a candidate.

    Returns it as this rank sees it, without directories where its disk holds no part, and its
    problems.
    """
    leader = run_dir.leader_of[world.rank]
    logger.info(f"Checking every byte of {checkpoint_name(candidate.step)}")
    ranks_of_disk = [rank for rank, other in enumerate(run_dir.leader_of) if other == leader]

    def check_share() -> tuple[Checkpoint | None, dict[str, str | None]]:
        if leader not in candidate.paths:
            return None, {}
        checkpoint = open_checkpoint(Path(candidate.paths[leader]))
        present = [name for name in sorted(checkpoint.files) if checkpoint.find(name)]
        share = present[ranks_of_disk.index(world.rank) :: len(ranks_of_disk)]
        return checkpoint, check_files(checkpoint, share, threads=1)

    checkpoint, verdicts = world.run_on_all_ranks(check_share)
    if len(candidate.paths) < len(set(run_dir.leader_of)):
        # The ranks of a disk that holds no part need the manifest of another.
        source = min(candidate.paths)
        manifest = dict(checkpoint.manifest) if checkpoint and world.rank == source else None
        manifest = world.all_gather_json(manifest)[source]
        name = checkpoint_name(candidate.step)
        checkpoint = checkpoint or Checkpoint(name, manifest or {}, candidate.digest, [])
    assert checkpoint
    holders: dict[str, list[int]] = {name: [] for name in checkpoint.files}
    problems = dict[str, str]()
    for rank, rank_verdicts in enumerate(world.all_gather_json(verdicts)):
        for name, problem in rank_verdicts.items():
            if problem is None:
                holders[name].append(run_dir.leader_of[rank])
            else:
                problems[name] = problem
    anywhere = replace(checkpoint, directories=[])
    missing = {name: f"{checkpoint.name}: {anywhere.why_missing(name)}" for name in holders}
    return replace(checkpoint, holders=holders), [
        problems.get(name, missing[name]) for name, disks in holders.items() if not disks
    ]


def _recover(checkpoint: Checkpoint, run_dir: RunDir, world: World) -> Checkpoint:
    """Commit a prepared checkpoint where it is not: give it its final name."""

    def commit() -> None:
        for path in checkpoint.directories:
            final = path.with_name(checkpoint.name)
            if path != final and path.exists():
                if os.path.lexists(final):
                    durable_fs.move_aside(final)
                durable_fs.rename(path, final)

    _on_disk_leaders(commit, run_dir, world)
    final = [path.with_name(checkpoint.name) for path in checkpoint.directories]
    return replace(checkpoint, directories=final)


def delete_unfinished(run_dir: RunDir, resumed: Checkpoint | None, world: World) -> None:
    """Delete what unfinished saves and deletions left on every disk. Collective.

    A prepared directory is moved aside instead, and logged, if another disk has committed it or if
    the run does not resume.
    """

    def digest(entry: Path) -> str | None:
        try:
            return (entry / "COMPLETE").read_text(encoding="ascii")
        except (OSError, ValueError):
            return None

    is_leader = run_dir.is_leader(world)
    local = [digest(path) for path in find_checkpoints(run_dir.checkpoints)] if is_leader else []
    committed = set(chain(*world.all_gather_json(local)))

    def delete_or_move() -> Iterable[Path]:
        for entry in _entries(run_dir.checkpoints):
            if not entry.name.startswith(".checkpoint_") or _is_part(entry, resumed):
                continue
            manifest = digest(entry)
            is_kept = manifest is not None and (resumed is None or manifest in committed)
            if is_kept and (match := _STAGING.fullmatch(entry.name)):
                yield durable_fs.move_aside(entry, entry.with_name(match[1]))
            else:
                durable_fs.delete(entry)

    for path in _on_disk_leaders(lambda: list(map(str, delete_or_move())), run_dir, world):
        logger.info(f"Moved aside, uncommitted: {path}")


def set_aside(run_dir: RunDir, resumed: Checkpoint | None, world: World) -> None:
    """Move aside, on every disk, what could be mistaken for this run's own, and log it. Collective.

    These are checkpoints newer than the one it resumes from, or, if that is elsewhere, everything
    that an earlier run left.
    """
    has_part = any(_is_part(entry, resumed) for entry in _entries(run_dir.checkpoints))
    is_of_this_run = any(world.all_gather_json(has_part))

    def move() -> list[str]:
        checkpoints = find_checkpoints(run_dir.checkpoints)
        if not resumed or not is_of_this_run:
            earlier = [run_dir.checkpoints] if checkpoints else []
            earlier += [run_dir.path / name for name in ("metrics.jsonl", "model")]
            foreign = [path for path in earlier if os.path.lexists(path)]
        elif resumed.directories:
            newer = (path for path in checkpoints if step_of(path) >= resumed.step)
            foreign = [path for path in newer if not _is_part(path, resumed)]
        else:  # this disk holds no part of it
            foreign = checkpoints
        return [str(durable_fs.move_aside(path)) for path in foreign]

    for path in _on_disk_leaders(move, run_dir, world):
        logger.info(f"Moved aside, not part of this run: {path}")


def _on_disk_leaders(work: Callable[[], Any], run_dir: RunDir, world: World) -> list[Any]:
    """Run `work` once per disk; return the items of all results on every rank."""
    is_leader = run_dir.is_leader(world)
    results = world.all_gather_json(world.run_on_all_ranks(lambda: work() if is_leader else []))
    return list(chain(*(result or [] for result in results)))


def _is_part(path: Path, checkpoint: Checkpoint | None) -> bool:
    directories = checkpoint.directories if checkpoint else []
    return path.exists() and any(path.samefile(directory) for directory in directories)


def _entries(directory: Path) -> list[Path]:
    return list(directory.iterdir()) if directory.is_dir() else []
