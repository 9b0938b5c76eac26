"""Simulate crashes of a machine that saves, in a model of a POSIX filesystem, and resume from them.

All calls by which the ranks' savers change a directory are recorded. In the model the bytes of a
file last from its fsync on, and a name (created, changed or removed) from the fsync of its
directory on. After a crash each unsynced name may be there or not, and unsynced bytes may be lost,
zeros, or there in part.
https://pubs.opengroup.org/onlinepubs/9799919799/functions/fsync.html
"""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from helpers.faults import Call, DiskOs
from helpers.ranks import world_of
from helpers.thread_ranks import (
    CONFIG,
    Tiny,
    TinyConfig,
    on_threads,
    optimizer_of,
    save_steps,
    thread_worlds,
)
from shardtune.checkpoint import (
    agree_on_checkpoint,
    clear_leftovers,
    durable_fs,
    load_checkpoint,
    open_checkpoint,
)
from shardtune.checkpoint.manifest import (
    DamagedCheckpoint,
    checkpoint_name,
    find_checkpoints,
    step_of,
)
from shardtune.checkpoint.run_dir import RunDir
from shardtune.checkpoint.train_state import random_state, training_state
from shardtune.checkpoint.verify import check_files
from shardtune.distributed.world import World
from shardtune.errors import UserError
from shardtune.log import logger
from shardtune.run_files import METRICS, read_entries

SAVES = (1, 2)
CHECKPOINTS = "checkpoints"
SYNC, RENAME, SAID = "sync", "rename", "said"


# The recording


@dataclass(frozen=True)
class Operation:
    """A change of a file or directory, each a number; or a step that is said to be saved.

    `label` names it for people, by the path at that time.
    """

    kind: str  # create, write, sync, rename, remove or said
    label: str
    inode: int = 0  # what is created, written or synced
    directory: int = 0  # where a name changes
    name: str = ""
    new_name: str = ""
    data: bytes = b""
    step: int = 0


@dataclass
class Recording:
    """The operations of two saves, and the tensors of each."""

    operations: list[Operation]
    directories: set[int]
    disks: int
    saved: dict[int, dict[str, torch.Tensor]]


def record(folder: Path, ranks: int, disks: int) -> Recording:
    """Save twice, changing every weight and keeping one checkpoint; the ranks are threads."""
    recorder = DiskOs(is_recording=True)

    def info(text: str, *_: Any) -> None:
        if text.startswith("Saved "):
            recorder.calls.append(Call(SAID, text.split()[1], ()))

    roots = [folder / f"disk{number}" for number in range(disks)]
    with mock.patch.object(durable_fs, "os", recorder), mock.patch.object(logger, "info", info):
        saved = save_steps(SAVES, ranks, roots, keep=1)
    inodes = {str(root): number for number, root in enumerate(roots)}
    directories = set(range(disks))
    operations = []
    for number, call in enumerate(recorder.calls):
        label, path = call.path.removeprefix(f"{folder}/"), Path(call.path)
        parent, name = inodes.get(str(path.parent), -1), path.name
        if call.operation == SAID:
            operations.append(Operation(SAID, label, step=step_of(path)))
        elif call.operation == "mkdir" or (
            call.operation == "open" and call.arguments[0] & os.O_CREAT
        ):
            inode = inodes[call.path] = disks + number
            if call.operation == "mkdir":
                directories.add(inode)
            operations.append(Operation("create", label, inode, parent, name))
        elif call.operation == "write":
            operations.append(Operation("write", label, inodes[call.path], data=call.arguments[0]))
        elif call.operation == "fsync":
            operations.append(Operation(SYNC, label, inodes[call.path]))
        elif call.operation == "rename":
            new = os.fspath(call.arguments[0])
            inode = inodes[call.path]
            operations.append(Operation(RENAME, label, inode, parent, name, Path(new).name))
            for old in [old for old in inodes if Path(old).is_relative_to(path)]:
                inodes[new + old.removeprefix(call.path)] = inodes.pop(old)
        elif call.operation in ("unlink", "rmdir"):
            operations.append(Operation("remove", label, inodes.pop(call.path), parent, name))
    return Recording(operations, directories, disks, saved)


# The model of a filesystem

Tree = tuple[tuple[str, Any], ...]  # of names, each with a file's bytes or another tree


@dataclass
class Disks:
    """The names and bytes that last, and those that a crash may lose."""

    directories: set[int]
    names: dict[int, dict[str, int]] = field(default_factory=dict)  # that last, of each directory
    unsynced_names: list[Operation] = field(default_factory=list)
    bytes: dict[int, bytes] = field(default_factory=dict)  # that last, of each file
    unsynced_bytes: dict[int, bytes] = field(
        default_factory=dict
    )  # these in their place, if they are kept

    def apply(self, operation: Operation) -> None:
        inode = operation.inode
        if operation.kind in ("create", RENAME, "remove"):
            self.unsynced_names.append(operation)
        elif operation.kind == "write":
            self.unsynced_bytes[inode] = (
                self.unsynced_bytes.get(inode, self.bytes.get(inode, b"")) + operation.data
            )
        elif operation.kind == SYNC and inode in self.directories:
            self.names[inode] = self._names_with(self.unsynced_names).get(inode, {})
            self.unsynced_names = [
                change for change in self.unsynced_names if change.directory != inode
            ]
        elif operation.kind == SYNC and inode in self.unsynced_bytes:
            self.bytes[inode] = self.unsynced_bytes.pop(inode)

    def after_a_crash(self, roots: int) -> Iterator[tuple[Tree, ...]]:
        """Every state of the disks."""
        for changes in self._kept_changes():
            names = self._names_with(changes)
            for crash in _CRASHES if self.unsynced_bytes else _CRASHES[:1]:
                yield tuple(self._tree(root, names, crash) for root in range(roots))

    def _kept_changes(self) -> Iterator[list[Operation]]:
        """All of them, none; each one alone, all but one."""
        changes = self.unsynced_names
        yield changes
        if changes:
            yield []
        if len(changes) > 1:
            for number, change in enumerate(changes):
                yield [change]
                yield changes[:number] + changes[number + 1 :]

    def _names_with(self, changes: Sequence[Operation]) -> dict[int, dict[str, int]]:
        names = {directory: dict(of_one) for directory, of_one in self.names.items()}
        for change in changes:
            of_one = names.setdefault(change.directory, {})
            if change.kind == "remove":
                of_one.pop(change.name, None)
            elif change.kind == "create":
                of_one[change.name] = change.inode
            else:
                of_one.pop(change.name, None)
                of_one[change.new_name] = change.inode
        return names

    def _tree(
        self,
        directory: int,
        names: dict[int, dict[str, int]],
        crash: Callable[[bytes, bytes], bytes],
    ) -> Tree:
        def content(inode: int) -> Any:
            if inode in self.directories:
                return self._tree(inode, names, crash)
            lasting = self.bytes.get(inode, b"")
            return crash(lasting, self.unsynced_bytes.get(inode, lasting))

        return tuple(
            (name, content(inode)) for name, inode in sorted(names.get(directory, {}).items())
        )


# What is left of unsynced bytes, given those that last and all: everything, nothing, zeros, a part.
_CRASHES: tuple[Callable[[bytes, bytes], bytes], ...] = (
    lambda lasting, current: current,
    lambda lasting, current: lasting,
    lambda lasting, current: lasting + bytes(len(current) - len(lasting)),
    lambda lasting, current: current[: (len(lasting) + len(current)) // 2],
)


# What is demanded


@dataclass(frozen=True)
class Verdict:
    """A state's problem, the step that a run resumes from, and the step that all disks show."""

    problem: str
    resumed: int
    visible: int


class Judge:
    """Resumes from states, each once."""

    def __init__(self, recording: Recording, folder: Path) -> None:
        self.recording, self.folder = recording, folder
        self.verdicts: dict[tuple[Tree, ...], Verdict] = {}

    def first_violation(self, operations: Sequence[Operation]) -> tuple[str, int]:
        """Return the first crash that breaks a promise, or "", and the number of states."""
        disks, said, seen = Disks(self.recording.directories), 0, set()
        for operation in operations:
            disks.apply(operation)
            said = operation.step or said
            for trees in disks.after_a_crash(self.recording.disks):
                seen.add(trees)
                verdict = self.of(trees)
                problem = verdict.problem
                if not problem and min(verdict.resumed, verdict.visible) < said:
                    problem = f"step {said} was said to be saved, and there is {verdict}"
                if problem:
                    return f"after {operation.kind} {operation.label}: {problem}", len(seen)
        return "", len(seen)

    def of(self, trees: tuple[Tree, ...]) -> Verdict:
        if trees not in self.verdicts:
            shutil.rmtree(self.folder, ignore_errors=True)
            roots = [self.folder / f"disk{number}" for number in range(len(trees))]
            for root, tree in zip(roots, trees, strict=True):
                _make(root, tree)
            try:
                self.verdicts[trees] = self._judge(roots)
            except (AssertionError, UserError, DamagedCheckpoint) as wrong:
                self.verdicts[trees] = Verdict(repr(wrong), 0, 0)  # never empty, unlike its text
        return self.verdicts[trees]

    def _judge(self, roots: list[Path]) -> Verdict:
        """
        Raises:
            AssertionError, UserError, DamagedCheckpoint: a checkpoint is not whole, or no one is.
        """
        self._require_whole(roots)
        visible = [
            max(map(step_of, find_checkpoints(root / CHECKPOINTS)), default=0) for root in roots
        ]
        worlds = thread_worlds(len(roots))
        steps = on_threads(worlds, lambda world: self._resume(roots[world.rank], world))
        assert len(set(steps)) == 1, f"the ranks go on from {steps}"
        self._require_whole(roots)
        for root in roots:
            assert not list((root / CHECKPOINTS).glob(".*")), (
                "an unfinished save or deletion was left"
            )
        if steps[0]:
            self._require_saved(roots, steps[0])
        return Verdict("", steps[0], min(visible))

    def _require_whole(self, roots: list[Path]) -> None:
        for number, root in enumerate(roots):
            for path in find_checkpoints(root / CHECKPOINTS):
                checkpoint = open_checkpoint(path)
                mine = [
                    name
                    for name, file in checkpoint.files.items()
                    if file["rank"] % len(roots) == number
                ]
                problems = [
                    problem for problem in check_files(checkpoint, mine, 1).values() if problem
                ]
                assert not problems, problems

    def _resume(self, root: Path, world: World) -> int:
        """Do what a run does at its start, up to loading."""
        run_dir = RunDir(root, list(range(world.size)), None)
        checkpoint = agree_on_checkpoint(run_dir, "auto", world)
        clear_leftovers(run_dir, checkpoint, world)
        return checkpoint.step if checkpoint else 0

    def _require_saved(self, roots: list[Path], step: int) -> None:
        steps = [entry["step"] for entry, _ in read_entries(roots[0] / METRICS, step)]
        assert steps == [each for each in SAVES if each <= step], f"metrics.jsonl has {steps}"
        checkpoint = open_checkpoint(
            *(root / CHECKPOINTS / checkpoint_name(step) for root in roots)
        )
        checkpoint = replace(checkpoint, holders={name: [0] for name in checkpoint.files})
        saved = self.recording.saved[step]
        assert checkpoint.state == {"step": step, "config": CONFIG}, checkpoint.state
        assert set(checkpoint.manifest["tensors"]) == set(saved), list(
            checkpoint.manifest["tensors"]
        )
        model = Tiny(TinyConfig())
        optimizer = optimizer_of(model)
        load_checkpoint(
            checkpoint,
            model,
            optimizer,
            0,
            RunDir(roots[0], [0], None),
            world_of(0, 1, dist.HashStore()),
        )
        loaded = training_state(model, optimizer)
        if checkpoint.world_size == 1:
            loaded |= random_state(0, torch.device("cpu"))
        for name, tensor in loaded.items():
            assert torch.equal(tensor, saved[name]), name


def _make(directory: Path, tree: Tree) -> None:
    directory.mkdir(parents=True)
    for name, content in tree:
        if isinstance(content, tuple):
            _make(directory / name, content)
        else:
            (directory / name).write_bytes(content)
