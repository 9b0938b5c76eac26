"""Two-phase commit: the ranks make one checkpoint of the files that each wrote, or none.

write    Every rank writes its file into a hidden staging directory.
prepare  The coordinator, rank 0, sends the manifest to the participants, the first rank of each
         disk. They add it and COMPLETE, and report.
commit   When all are prepared, each participant renames its staging directory to its final name.
recover  After a crash in between, the next start commits a checkpoint that is prepared on all
         disks (resume.py).

Messages go through the store, never through a collective: training continues meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
import xxhash

from shardtune.checkpoint import durable_fs
from shardtune.checkpoint.manifest import ASSETS, find_committed, rank_file, step_of
from shardtune.distributed.store import delete_value, get_value, set_value, wait_for
from shardtune.distributed.world import World
from shardtune.errors import first_few, first_line

_DECISION_ARRIVES_S = 60


class NotSaved(Exception):
    """This attempt is given up on all ranks; the message says why."""


@dataclass(frozen=True)
class SaveAttempt:
    """One save: its directories on this rank's disk, and the ranks that take part.

    `leader_of[rank]` is the first rank that shares the rank's disk. `assets` are the files beside
    the tensors, by name.
    """

    staging: Path
    final: Path
    rank: int
    leader_of: Sequence[int]
    keep: int
    assets: Mapping[str, bytes]
    store: dist.Store
    timeout_s: float

    @property
    def participants(self) -> list[int]:
        return sorted(set(self.leader_of))

    @property
    def is_participant(self) -> bool:
        return self.leader_of[self.rank] == self.rank

    def describe(self, error: Exception) -> str:
        """Return one line that names the error, and the rank and host where it happened."""
        if isinstance(error, NotSaved):
            return str(error)
        kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
        return f"rank {self.rank} on {socket.gethostname()}: {kind}{first_line(error)}"

    def report(self, key: str, work: Callable[[], Any]) -> dict[str, Any]:
        """Send the coordinator the result of `work` or its error, and return the message.

        Whatever the error is, training continues and the coordinator must learn of it.
        """
        try:
            message = {"result": work()}
        except Exception as error:
            message = {"problem": self.describe(error)}
        set_value(self.store, f"{key}/{self.rank}", message)
        return message

    def wait_for_decision(self, key: str, deadline: float) -> dict[str, Any]:
        """Return the coordinator's message.

        Raises:
            TimeoutError: it does not arrive within a minute after the deadline.
        """
        wait_for(self.store, [key], deadline + _DECISION_ARRIVES_S - time.monotonic())
        return cast(dict[str, Any], get_value(self.store, key))


def connect_store(world: World) -> dist.Store:
    """Open another connection to the store: a thread that waits on one blocks its other users."""
    return dist.PrefixStore("checkpoint", cast(Any, world.store).clone())


def write_and_commit(
    attempt: SaveAttempt,
    write: Callable[[Path], dict[str, Any]],
    build_manifest: Callable[[list[dict[str, Any]]], dict[str, Any]],
) -> str | None:
    """Write this rank's file into the staging directory, and commit with all other ranks.

    `write` returns this rank's report. On rank 0 `build_manifest` takes the reports of all ranks.
    Returns a problem with deleting old checkpoints, or None.

    Raises:
        NotSaved: on every rank; the files of this attempt are deleted.
    """
    deadline = time.monotonic() + attempt.timeout_s

    def write_files() -> dict[str, Any]:
        durable_fs.make_directory(attempt.staging)
        report = write(attempt.staging)
        return report | ({"assets": _write_assets(attempt)} if attempt.is_participant else {})

    may_be_committed = True
    try:
        may_be_committed = "result" in attempt.report("written", write_files)
        if attempt.rank == 0:
            _coordinate(attempt, deadline, build_manifest)
        elif attempt.is_participant:
            _participate(attempt, deadline)
        outcome = attempt.wait_for_decision("outcome", deadline)
    except (TimeoutError, dist.DistError) as error:
        # Rank 0 may still commit the reported files: they are kept until the next start.
        problem = f"{attempt.describe(error)}: rank 0 did not answer"
        outcome = {"problem": problem, "may_be_committed": may_be_committed}
    if "problem" in outcome:
        if not outcome["may_be_committed"]:
            _delete_staging(attempt)
        raise NotSaved(outcome["problem"])
    try:
        if attempt.is_participant:
            keep_newest(attempt.final.parent, attempt.keep, outcome["checkpoints"])
    except OSError as error:
        return f"an old checkpoint could not be deleted: {attempt.describe(error)}"
    return None


def _coordinate(
    attempt: SaveAttempt,
    deadline: float,
    build_manifest: Callable[[list[dict[str, Any]]], dict[str, Any]],
) -> None:
    """Decide, on rank 0. Every decision is sent whatever happens: the others wait for it."""
    outcome: dict[str, Any] = {"may_be_committed": False}
    others = attempt.participants[1:]
    try:
        reports = _collect(attempt, "written", range(len(attempt.leader_of)), deadline)
        manifest = json.dumps(build_manifest(reports))
        set_value(attempt.store, "prepare", {"manifest": manifest} if others else {})
        _prepare(attempt, manifest)
        _collect(attempt, "prepared", others, deadline)
        if time.monotonic() > deadline:
            raise NotSaved(
                f"it took longer than {attempt.timeout_s} s (distributed.save_timeout_s)"
            )
        set_value(attempt.store, "commit", {})
        # From here on it is a checkpoint: the next start recovers it where a rename fails.
        outcome["may_be_committed"] = bool(others)
        local = _commit(attempt)
        per_disk = [local, *_collect(attempt, "committed", others, deadline)]
        # A disk that joined the run later lacks older checkpoints: only those on all disks count.
        outcome["checkpoints"] = [n for n in local if all(n in names for names in per_disk)]
    except Exception as error:
        outcome["problem"] = attempt.describe(error)
        for decision in ("prepare", "commit"):
            if not attempt.store.check([decision]):
                set_value(attempt.store, decision, outcome)
    set_value(attempt.store, "outcome", outcome)


def _participate(attempt: SaveAttempt, deadline: float) -> None:
    """Prepare and commit another disk, as the coordinator decides."""
    decision = attempt.wait_for_decision("prepare", deadline)
    if "problem" not in decision:
        attempt.report("prepared", lambda: _prepare(attempt, decision["manifest"]))
        if "problem" not in attempt.wait_for_decision("commit", deadline):
            attempt.report("committed", lambda: _commit(attempt))


def _write_assets(attempt: SaveAttempt) -> dict[str, Any]:
    directory = attempt.staging / ASSETS
    entries = {}
    if attempt.assets:
        durable_fs.make_directory(directory)
        for name, content in attempt.assets.items():
            written = durable_fs.write_file(directory / name, [memoryview(content)])
            entries[f"{ASSETS}/{name}"] = written.entry
        durable_fs.sync_directory(directory)
    return entries


def _prepare(attempt: SaveAttempt, manifest: str) -> None:
    """Write manifest and COMPLETE, and sync all names: the directory is now a checkpoint.

    Raises:
        OSError: also if a file of this disk's ranks does not have the reported size.
    """
    raw = manifest.encode()
    for name, file in json.loads(raw)["files"].items():
        is_local = attempt.leader_of[file["rank"]] == attempt.rank
        if is_local and (attempt.staging / name).stat().st_size != file["bytes"]:
            raise OSError(f"{name} is not {file['bytes']} bytes, as rank {file['rank']} wrote it")
    complete = f"{xxhash.xxh3_128(raw).hexdigest()}\n".encode()
    durable_fs.write_file(attempt.staging / "manifest.json", [memoryview(raw)])
    durable_fs.write_file(attempt.staging / "COMPLETE", [memoryview(complete)])
    durable_fs.sync_directory(attempt.staging)


def _commit(attempt: SaveAttempt) -> list[str]:
    """Rename the staging directory to its final name.

    Returns the names of this disk's checkpoints up to this one, newest first.
    """
    if os.path.lexists(attempt.final):
        durable_fs.move_aside(attempt.final)
    durable_fs.rename(attempt.staging, attempt.final)
    step = step_of(attempt.final)
    return [path.name for path in find_committed(attempt.final.parent) if step_of(path) <= step]


def _collect(attempt: SaveAttempt, key: str, ranks: Iterable[int], deadline: float) -> list[Any]:
    """Return the results that these ranks report, in rank order.

    Raises:
        NotSaved: a rank reports a problem, or does not report in time.
    """
    store, keys = attempt.store, {rank: f"{key}/{rank}" for rank in ranks}
    with contextlib.suppress(TimeoutError):
        wait_for(store, list(keys.values()), deadline - time.monotonic())
    late = [rank for rank, key in keys.items() if not store.check([key])]
    reports = [get_value(store, key) for rank, key in keys.items() if rank not in late]
    for report in reports:
        if "problem" in report:
            raise NotSaved(report["problem"])
    if late:
        raise NotSaved(
            f"no report from rank {first_few(late, 8)} within {attempt.timeout_s} s "
            "(distributed.save_timeout_s)"
        )
    return [report["result"] for report in reports]


def _delete_staging(attempt: SaveAttempt) -> None:
    """Delete this attempt's files: the next save may need their space."""
    staging = attempt.staging
    with contextlib.suppress(OSError):  # the next start deletes the rest
        durable_fs.delete(staging if attempt.is_participant else staging / rank_file(attempt.rank))
        if staging.is_dir() and not any(staging.iterdir()):
            durable_fs.delete(staging)


def keep_newest(directory: Path, keep: int, committed: Sequence[str]) -> None:
    """Delete the checkpoints that are older than the `keep`-th of `committed`, newest first.

    Each is renamed before it is deleted, so that none is ever seen in part.
    """
    if len(committed) < keep:
        return
    for path in find_committed(directory):
        if step_of(path) < step_of(Path(committed[keep - 1])):
            deleting = path.with_name(f".{path.name}.deleting")
            durable_fs.rename(path, deleting)
            durable_fs.delete(deleting)


def delete_messages(store: dist.Store, size: int) -> None:
    """Delete an ended attempt's messages from the store. All ranks must have read them."""
    keys = ["prepare", "commit", "outcome"]
    keys += [
        f"{key}/{rank}" for key in ("written", "prepared", "committed") for rank in range(size)
    ]
    for key in keys:
        delete_value(store, key)
