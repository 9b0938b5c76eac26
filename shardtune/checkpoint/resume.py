"""From which checkpoint a run goes on: one that every rank accepts, or none."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from shardtune.checkpoint import durable_fs as disk
from shardtune.checkpoint.commit import move_aside
from shardtune.checkpoint.manifest import (
    Checkpoint,
    DamagedCheckpoint,
    check_files,
    checkpoint_name,
    find_checkpoints,
    open_checkpoint,
    step_of,
)
from shardtune.checkpoint.run_dir import RunDir
from shardtune.distributed.world import World
from shardtune.errors import UserError
from shardtune.log import logger

_HIDDEN = re.compile(
    r"\.(checkpoint_\d{7,})\.[0-9a-f]{12,}"
)  # an attempt's directory, see Saver.save


@dataclass(frozen=True)
class _Candidate:
    """A checkpoint of which some disks hold a part: where, by the first rank of each disk."""

    step: int
    digest: str
    places: dict[int, str]

    @property
    def is_named(self) -> bool:
        """Whether it has its name on any disk; else its save never ended, and nobody was told that it is saved."""
        return any(not Path(place).name.startswith(".") for place in self.places.values())


def agree_on_checkpoint(run_dir: RunDir, resume: str, world: World) -> Checkpoint | None:
    """`auto`: the newest in run.dir of which every byte is what was saved; `never`: None; else that directory.

    Each file is read once, by one of the ranks that see it. Of newer checkpoints that are not accepted the reason is
    said. One that was prepared on all disks when its run ended is taken up: it gets its name.

    Raises:
        UserError: on every rank, if there are checkpoints and none is whole.
    """
    if resume == "never":
        return None
    directory = run_dir.path / "checkpoints"
    is_chosen = resume != "auto"
    paths = [Path(resume)] if is_chosen else _visible_and_prepared(directory)
    found, rejected = _candidates(paths, is_chosen, run_dir, world)
    was_named = is_chosen or bool(
        rejected
    )  # what never had its name was never saved, and is no loss
    for candidate in found:
        checkpoint, problems = _check(candidate, run_dir, world)
        if not problems:
            for reason in rejected:
                logger.info(f"Not accepted: {reason}")
            if not is_chosen:
                checkpoint = _take_up(checkpoint, run_dir, world)
            return checkpoint
        remedy = "restore it" if candidate.is_named else "its save had not ended"
        rejected += [f"{problem} - {remedy}" for problem in problems]
        was_named = was_named or candidate.is_named
    if rejected and was_named:
        where, instead = f"no checkpoint in {directory} can be", "mend one"
        if is_chosen:
            where, instead = f"run.resume={resume} cannot be", "name another checkpoint, or auto"
        raise UserError(
            *rejected, f"{where} resumed from - {instead}, or start anew with run.resume=never"
        )
    for reason in rejected:
        logger.info(f"Not accepted: {reason}")
    return None


def _visible_and_prepared(directory: Path) -> list[Path]:
    hidden = [entry for entry in _entries(directory) if _HIDDEN.fullmatch(entry.name)]
    return find_checkpoints(directory) + [
        entry for entry in hidden if (entry / "COMPLETE").exists()
    ]


def _candidates(
    paths: Iterable[Path], is_chosen: bool, run_dir: RunDir, world: World
) -> tuple[list[_Candidate], list[str]]:
    """What the disks hold, newest first, and what has a checkpoint's name without being one."""
    entries: list[list[Any]] = []
    problems: list[str] = []
    if run_dir.leader_of[world.rank] == world.rank:
        for path in paths:
            try:
                checkpoint = open_checkpoint(path)
            except (UserError, DamagedCheckpoint) as error:
                if is_chosen or not path.name.startswith("."):
                    problems.append(
                        str(error) if isinstance(error, UserError) else f"{error} - restore it"
                    )
                continue
            entries.append([checkpoint.step, checkpoint.digest, str(path)])
        entries.sort(key=lambda entry: Path(entry[2]).name != checkpoint_name(entry[0]))
    found: dict[tuple[int, str], dict[int, str]] = {}
    reports = world.all_gather_json([entries, problems])
    problems = [problem for _, of_rank in reports for problem in of_rank]
    for rank, (of_rank, _) in enumerate(reports):
        for step, digest, path_name in of_rank:
            place = found.setdefault((step, digest), {}).setdefault(rank, path_name)
            if place != path_name:
                problems.append(f"{path_name}: has the manifest of {place} - restore its own")
    newest_first = sorted(found.items(), reverse=True, key=lambda item: item[0])
    return [_Candidate(step, digest, places) for (step, digest), places in newest_first], problems


def _check(candidate: _Candidate, run_dir: RunDir, world: World) -> tuple[Checkpoint, list[str]]:
    """The candidate as this rank sees it, without directories where its disk holds no part, and why it is not whole."""
    leader = run_dir.leader_of[world.rank]
    logger.info(f"Checking every byte of {checkpoint_name(candidate.step)}")
    neighbours = [rank for rank, of_rank in enumerate(run_dir.leader_of) if of_rank == leader]

    def check() -> tuple[Checkpoint | None, dict[str, str | None]]:
        if leader not in candidate.places:
            return None, {}
        checkpoint = open_checkpoint(Path(candidate.places[leader]))
        present = [name for name in sorted(checkpoint.files) if checkpoint.find(name)]
        mine = present[neighbours.index(world.rank) :: len(neighbours)]
        return checkpoint, check_files(checkpoint, mine, threads=1)

    checkpoint, verdicts = world.run_on_all_ranks(check)
    if len(candidate.places) < len(set(run_dir.leader_of)):
        # A disk that holds no part has no manifest, and its ranks need one.
        first = world.rank == min(candidate.places)
        manifest = world.all_gather_json(
            dict(checkpoint.manifest) if checkpoint and first else None
        )[min(candidate.places)]
        checkpoint = checkpoint or Checkpoint(
            checkpoint_name(candidate.step), manifest, candidate.digest, []
        )
    assert checkpoint
    reports = world.all_gather_json(verdicts)
    holders: dict[str, list[int]] = {name: [] for name in checkpoint.files}
    reasons: dict[str, str] = {}
    for rank, of_rank in enumerate(reports):
        for name, problem in of_rank.items():
            if problem is None:
                holders[name].append(run_dir.leader_of[rank])
            else:
                reasons[name] = problem
    problems = [
        reasons.get(name)
        or f"{checkpoint.name}: {name}, written on node {entry['node']} ({entry['host']}), is missing"
        for name, entry in checkpoint.files.items()
        if not holders[name]
    ]
    return replace(checkpoint, holders=holders), problems


def _take_up(checkpoint: Checkpoint, run_dir: RunDir, world: World) -> Checkpoint:
    """Give it its name on disks where it has none yet; what bears that name there is moved aside."""

    def rename(path: Path) -> Path:
        final = path.with_name(checkpoint.name)
        if path != final and path.exists():
            if os.path.lexists(final):
                move_aside(final)
            disk.rename(path, final)
        return final

    def take_up() -> list[Path]:
        return [rename(path) for path in checkpoint.directories]

    world.run_on_all_ranks(lambda: take_up() if run_dir.leader_of[world.rank] == world.rank else [])
    return replace(
        checkpoint, directories=[path.with_name(checkpoint.name) for path in checkpoint.directories]
    )


def delete_unfinished(run_dir: RunDir, resumed: Checkpoint | None, world: World) -> None:
    """End unfinished saves and deletions on every disk, when it is agreed on which checkpoint to go on from.

    What is prepared here and has its name on another disk is a part of a checkpoint; this, and what is prepared where
    no checkpoint was asked for, is moved aside, and logged.
    """
    directory = run_dir.path / "checkpoints"
    is_leader = run_dir.leader_of[world.rank] == world.rank

    def digest(entry: Path) -> str | None:
        try:
            return (entry / "COMPLETE").read_text(encoding="ascii")
        except (OSError, ValueError):
            return None

    def delete(named: set[str | None]) -> list[str]:
        moved = []
        for entry in _entries(directory):
            if not entry.name.startswith(".checkpoint_") or _is_part(entry, resumed):
                continue
            found = digest(entry)
            is_kept = found is not None and (resumed is None or found in named)
            if is_kept and (match := _HIDDEN.fullmatch(entry.name)):
                moved.append(str(move_aside(entry, entry.with_name(match[1]))))
            else:
                disk.delete(entry)
        return moved

    own = [digest(path) for path in find_checkpoints(directory)] if is_leader else []
    named = {found for of_rank in world.all_gather_json(own) for found in of_rank}
    moved = world.run_on_all_ranks(lambda: delete(named) if is_leader else [])
    for path in chain(*world.all_gather_json(moved)):
        logger.info(f"Moved aside, uncommitted: {path}")


def set_aside(run_dir: RunDir, resumed: Checkpoint | None, world: World) -> None:
    """Make way for this run on every disk, and say what was moved: what would be mistaken for its own is renamed,
    checkpoints newer than the one it resumes from, or, when it comes from elsewhere, all that an earlier run left."""
    directory = run_dir.path / "checkpoints"
    is_of_this_run = any(
        world.all_gather_json(any(_is_part(entry, resumed) for entry in _entries(directory)))
    )

    def make_way() -> list[str]:
        checkpoints = find_checkpoints(directory)
        if not resumed or not is_of_this_run:
            names = (*(["checkpoints"] if checkpoints else []), "metrics.jsonl", "model")
            in_the_way = [path for name in names if os.path.lexists(path := run_dir.path / name)]
        elif not resumed.directories:  # this disk holds none of it
            in_the_way = checkpoints
        else:
            in_the_way = [
                p for p in checkpoints if step_of(p) >= resumed.step and not _is_part(p, resumed)
            ]
        return [str(move_aside(path)) for path in in_the_way]

    moved = world.run_on_all_ranks(
        lambda: make_way() if run_dir.leader_of[world.rank] == world.rank else []
    )
    for path in chain(*world.all_gather_json(moved)):
        logger.info(f"Moved aside, not part of this run: {path}")


def _is_part(path: Path, checkpoint: Checkpoint | None) -> bool:
    return (
        checkpoint is not None
        and path.exists()
        and any(path.samefile(part) for part in checkpoint.directories)
    )


def _entries(directory: Path) -> list[Path]:
    return list(directory.iterdir()) if directory.is_dir() else []
