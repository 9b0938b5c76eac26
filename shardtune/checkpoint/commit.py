"""Two-phase commit: the files of all ranks become one checkpoint, or none does.

write    Every rank writes its file into a hidden staging directory.
prepare  The first rank of each disk, its leader, adds the manifest and COMPLETE.
commit   Once all disks are prepared, each leader gives the directory its final name.
recover  After a crash in between, the next start commits a checkpoint that is prepared on all
         disks (resume.py).

Rank 0, the coordinator, ends each phase with a decision for all. Messages go through the store,
never through a collective: training continues meanwhile.
"""

import contextlib
import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch.distributed as dist
import xxhash

from shardtune.checkpoint import durable_fs
from shardtune.checkpoint.manifest import ASSETS, find_committed, open_checkpoint, step_of
from shardtune.distributed.world import delete_value, get_value, set_value, wait_for
from shardtune.errors import first_few, first_line
from shardtune.log import node_logger

_DECISION_ARRIVES_S = 60


class NotSaved(Exception):
    """This attempt is given up on all ranks; the message says why."""


@dataclass(frozen=True)
class SaveAttempt:
    """One save: its directories on this rank's disk, and the ranks that take part.

    `leader_of[rank]` is the first rank that shares the rank's disk. `assets` are the files beside
    the tensors, by name. `what` goes to this rank's disk, in `disk_bytes`. `is_mirrored`: each disk
    will hold its neighbour's part. `pinned`: older checkpoints that stay, with the newest that is
    whole without a disk, for each disk; None: no checkpoint is mirrored.
    """

    staging: Path
    final: Path
    rank: int
    leader_of: Sequence[int]
    keep: int
    assets: Mapping[str, bytes]
    disk_bytes: int
    store: dist.Store
    timeout_s: float
    is_mirrored: bool = False
    pinned: Sequence[str] | None = None
    what: str = "a checkpoint"

    @property
    def is_leader(self) -> bool:
        return self.leader_of[self.rank] == self.rank

    def describe(self, error: Exception) -> str:
        if isinstance(error, NotSaved):
            return str(error)
        kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
        place = f"rank {self.rank} on {socket.gethostname()}"
        missing = durable_fs.missing_room(error, self.what, self.disk_bytes, self.staging)
        return f"{place}: {kind}{first_line(error)}{missing}"


def write_and_commit(
    attempt: SaveAttempt,
    write: Callable[[Path], dict[str, Any]],
    build_manifest: Callable[[list[dict[str, Any]]], dict[str, Any]],
) -> None:
    """Write this rank's file into the staging directory, and commit with all other ranks.

    `write` returns this rank's report. On rank 0 `build_manifest` takes the reports of all ranks.
    Raises NotSaved.
    """
    deadline = time.monotonic() + attempt.timeout_s
    everyone, leaders = range(len(attempt.leader_of)), sorted(set(attempt.leader_of))

    def write_files() -> dict[str, Any]:
        durable_fs.make_directory(attempt.staging)
        report = write(attempt.staging)
        return report | ({"assets": _write_assets(attempt)} if attempt.is_leader else {})

    def send_manifest(reports: list[dict[str, Any]]) -> None:
        set_value(attempt.store, "manifest", json.dumps(build_manifest(reports)))

    def require_in_time(_: list[None]) -> None:
        if time.monotonic() > deadline:
            limit = f"{attempt.timeout_s} s (distributed.save_timeout_s)"
            raise NotSaved(f"it took longer than {limit}")

    run = partial(run_phase, attempt, deadline)
    may_be_committed = False
    try:
        run("write", everyone, write_files, send_manifest)
        run("prepare", leaders, partial(_prepare, attempt), require_in_time)
        # From here on it is a checkpoint: the next start commits it where a rename fails.
        may_be_committed = len(leaders) > 1
        kept, pinned = run("commit", leaders, partial(_commit, attempt), partial(_choose, attempt))
    except NotSaved:
        if not may_be_committed:
            with contextlib.suppress(OSError):  # the next start deletes what is left
                durable_fs.delete(attempt.staging)
        raise
    except (TimeoutError, dist.DistError) as error:
        # Rank 0 may still commit the files: they are kept until the next start.
        raise NotSaved(f"{attempt.describe(error)}: rank 0 did not answer") from error
    try:
        if attempt.is_leader:
            _keep_newest(attempt, kept, pinned)
    except OSError as error:
        problem = attempt.describe(error)
        node_logger.info(f"Saved, but an old checkpoint could not be deleted: {problem}")


def run_phase(
    attempt: SaveAttempt,
    deadline: float,
    phase: str,
    ranks: Sequence[int],
    work: Callable[[], Any],
    decide: Callable[[list[Any]], Any],
) -> Any:
    """Run `work` on these ranks; return on all what `decide` makes of its results on rank 0.

    Raises:
        NotSaved: on every rank, if anything failed on one of these or was late.
        TimeoutError: rank 0 has not decided a minute after the deadline.
    """
    store = attempt.store
    if attempt.rank in ranks:
        # Not phase/rank: the store keeps the pieces of the decision there.
        set_value(store, f"{phase}.{attempt.rank}", _outcome_of(attempt, work))
    if attempt.rank == 0:
        decision = _outcome_of(attempt, lambda: decide(_collect(attempt, phase, ranks, deadline)))
        set_value(store, phase, decision)
    wait_for(store, [phase], deadline + _DECISION_ARRIVES_S - time.monotonic())
    return _result(get_value(store, phase))


def _outcome_of(attempt: SaveAttempt, work: Callable[[], Any]) -> dict[str, Any]:
    """Return the result of `work`, or its error: the others wait for it."""
    try:
        return {"result": work()}
    except Exception as error:
        return {"problem": attempt.describe(error)}


def _result(outcome: Mapping[str, Any]) -> Any:
    if "problem" in outcome:
        raise NotSaved(outcome["problem"])
    return outcome["result"]


def _collect(attempt: SaveAttempt, phase: str, ranks: Sequence[int], deadline: float) -> list[Any]:
    store, keys = attempt.store, {rank: f"{phase}.{rank}" for rank in ranks}
    with contextlib.suppress(TimeoutError):
        wait_for(store, list(keys.values()), deadline - time.monotonic())
    late = [rank for rank, key in keys.items() if not store.check([key])]
    results = [_result(get_value(store, key)) for rank, key in keys.items() if rank not in late]
    if late:
        limit = f"{attempt.timeout_s} s (distributed.save_timeout_s)"
        raise NotSaved(f"no report from rank {first_few(late, 8)} within {limit}")
    return results


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


def _prepare(attempt: SaveAttempt) -> None:
    """Write manifest and COMPLETE, and sync all names: the directory is now a checkpoint.

    Raises:
        OSError: also if a file of this disk's ranks does not have the reported size.
    """
    raw = get_value(attempt.store, "manifest").encode()
    for name, file in json.loads(raw)["files"].items():
        is_local = attempt.leader_of[file["rank"]] == attempt.rank
        if is_local and (attempt.staging / name).stat().st_size != file["bytes"]:
            raise OSError(f"{name} is not {file['bytes']} bytes, as rank {file['rank']} wrote it")
    complete = f"{xxhash.xxh3_128(raw).hexdigest()}\n".encode()
    durable_fs.write_file(attempt.staging / "manifest.json", [memoryview(raw)])
    durable_fs.write_file(attempt.staging / "COMPLETE", [memoryview(complete)])
    durable_fs.sync_directory(attempt.staging)


def _commit(attempt: SaveAttempt) -> dict[str, tuple[int, list[str]]]:
    """Return this disk's checkpoints up to this one: how many ranks saved each, and the files."""
    durable_fs.rename(attempt.staging, attempt.final)
    step, own = step_of(attempt.final), dict[str, tuple[int, list[str]]]()
    for path in find_committed(attempt.final.parent):
        with contextlib.suppress(Exception):  # a damaged one does not count
            if step_of(path) <= step:
                files = [file.name for file in path.glob("rank_*.safetensors")]
                own[path.name] = (open_checkpoint(path).world_size, files)
    return own


def _choose(
    attempt: SaveAttempt, per_disk: Sequence[Mapping[str, tuple[int, Sequence[str]]]]
) -> tuple[list[str], list[str]]:
    """Return the newest `keep` checkpoints that are whole, and older ones that stay, too."""
    disks = [{name: set(files) for name, (_, files) in disk.items()} for disk in per_disk]
    ranks = {name: size for disk in per_disk for name, (size, _) in disk.items()}
    newest = sorted(ranks, key=lambda name: step_of(Path(name)), reverse=True)
    # A disk that joined the run later lacks older checkpoints, which the others may have.
    newest_first = [name for name in newest if len(_files(name, disks)) >= ranks[name]]
    if attempt.pinned is None:  # no copies: older ones stay until the new disk has enough
        newest_first = [name for name in newest_first if all(name in disk for disk in disks)]
    pinned: list[str] = []
    if attempt.pinned is not None:
        pinned = [*attempt.pinned]
        for dead in range(len(disks)):  # the newest one that is whole without this disk
            left = disks[:dead] + disks[dead + 1 :]
            whole = (n for n in newest if _files(n, left) == _files(n, disks))
            pinned += islice(whole, 1)
    return newest_first[: attempt.keep], pinned


def _files(name: str, disks: Sequence[Mapping[str, set[str]]]) -> set[str]:
    return set().union(*(disk.get(name, ()) for disk in disks))


def _keep_newest(attempt: SaveAttempt, kept: Sequence[str], pinned: Sequence[str]) -> None:
    """Delete the checkpoints that are older than all that are kept, and not pinned.

    Each checkpoint is renamed before it is deleted, so that no reader sees a part of one.
    """
    if len(kept) < attempt.keep:
        return
    for path in find_committed(attempt.final.parent):
        if step_of(path) < step_of(Path(kept[-1])) and path.name not in pinned:
            deleting = path.with_name(f".{path.name}.deleting")
            durable_fs.rename(path, deleting)
            durable_fs.delete(deleting)


def delete_messages(attempt: SaveAttempt) -> None:
    """Delete an ended attempt's messages from the store. All ranks must have read them."""
    ranks = range(len(attempt.leader_of))
    for phase in ("write", "prepare", "commit"):
        for key in (phase, *(f"{phase}.{rank}" for rank in ranks)):
            delete_value(attempt.store, key)
    delete_value(attempt.store, "manifest")
