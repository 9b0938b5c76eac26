"""How the ranks make one checkpoint of what each has written, or nothing.

Every rank writes its file into a hidden directory of this attempt and reports to rank 0, through the store and never
in a collective: training goes on meanwhile. Rank 0 decides within a deadline. On every disk the first of its ranks
then adds the same manifest and COMPLETE: the checkpoint is *prepared*. Only when it is so on all disks is it renamed on
each. A crash in between loses nothing: what is prepared on all disks is taken up at the next start.
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

from shardtune.checkpoint import durable_fs as disk
from shardtune.checkpoint.manifest import ASSETS, find_committed, rank_file, step_of
from shardtune.distributed.store import delete_value, get_value, set_value, wait_for
from shardtune.distributed.world import World

_DECISION_ARRIVES_S = 60


class NotSaved(Exception):
    """This attempt is given up, on all ranks; the message says why."""


@dataclass(frozen=True)
class SaveAttempt:
    """One save: where it is written on this rank's disk, and the ranks that take part."""

    hidden: Path
    final: Path
    rank: int
    leader_of: Sequence[int]  # of each rank the first that shares its disk
    keep: int
    assets: Mapping[str, bytes]
    store: dist.Store
    timeout_s: float

    @property
    def leaders(self) -> list[int]:
        return sorted(set(self.leader_of))

    @property
    def is_leader(self) -> bool:
        return self.leader_of[self.rank] == self.rank


def channel(world: World) -> dist.Store:
    """A connection to the store of its own: a thread that waits on it does not hold up another's."""
    return dist.PrefixStore("checkpoint", cast(Any, world.store).clone())


def write_and_commit(
    attempt: SaveAttempt,
    write: Callable[[Path], dict[str, Any]],
    make_manifest: Callable[[list[dict[str, Any]]], dict[str, Any]],
) -> str | None:
    """Run on every rank: `write` its file into the hidden directory, and commit together.

    `make_manifest` makes rank 0's manifest of what all ranks reported. Returns what went wrong afterwards, when old
    checkpoints were deleted.

    Raises:
        NotSaved: on every rank; what this attempt wrote is deleted.
    """
    deadline = time.monotonic() + attempt.timeout_s
    outcome: dict[str, Any] = {}
    report: dict[str, Any] = {}
    try:
        try:
            disk.make_directory(attempt.hidden)
            report["done"] = write(attempt.hidden)
            if attempt.is_leader:
                report["done"]["assets"] = _write_assets(attempt)
        except (
            Exception
        ) as error:  # whatever it is, training must go on and the others must hear of it
            report = {"problem": _problem(attempt, error)}
        set_value(attempt.store, f"report/{attempt.rank}", report)
        if attempt.rank == 0:
            _lead(attempt, deadline, make_manifest)
        elif attempt.is_leader:
            _follow(attempt, deadline)
        outcome = _wait(attempt, "outcome", deadline + _DECISION_ARRIVES_S)
    except (TimeoutError, dist.DistError) as error:
        # Rank 0 may still commit what was reported to it: that is not deleted before the next start.
        outcome = {
            "problem": f"{_problem(attempt, error)}: no word from rank 0",
            "decided": "done" in report,
        }
    if "problem" in outcome:
        if not outcome.get("decided"):
            _clean(attempt)
        raise NotSaved(outcome["problem"])
    try:
        if attempt.is_leader:
            keep_newest(attempt.final.parent, attempt.keep, outcome["committed"])
    except OSError as error:
        return f"an old checkpoint could not be deleted: {_problem(attempt, error)}"
    return None


def _lead(
    attempt: SaveAttempt,
    deadline: float,
    make_manifest: Callable[[list[dict[str, Any]]], dict[str, Any]],
) -> None:
    """Rank 0's part: the decisions, each posted whatever happens, so that nobody waits for one in vain."""
    outcome: dict[str, Any] = {}
    others = attempt.leaders[1:]
    try:
        raw = json.dumps(
            make_manifest(_collect(attempt, "report", range(len(attempt.leader_of)), deadline))
        )
        set_value(attempt.store, "manifest", {"manifest": raw} if others else {})
        _prepare(attempt, raw.encode())
        _collect(attempt, "prepared", others, deadline)
        if time.monotonic() > deadline:
            raise NotSaved(
                f"it took longer than {attempt.timeout_s} s (distributed.save_timeout_s)"
            )
        set_value(attempt.store, "commit", {})
        # From here on it is a checkpoint: where renaming fails, the next start takes it up.
        outcome["decided"] = bool(others)
        own = _rename(attempt)
        listed = [own, *_collect(attempt, "renamed", others, deadline)]
        # On a disk that came to the run later, older ones are missing: what is not on all disks does not count.
        outcome["committed"] = [name for name in own if all(name in of_disk for of_disk in listed)]
    except Exception as error:
        outcome["problem"] = str(error) if isinstance(error, NotSaved) else _problem(attempt, error)
        for decision in ("manifest", "commit"):
            if not attempt.store.check([decision]):
                set_value(attempt.store, decision, outcome)
    set_value(attempt.store, "outcome", outcome)


def _follow(attempt: SaveAttempt, deadline: float) -> None:
    """The part of the other disks' first ranks."""
    parts: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
        ("manifest", lambda told: _prepare(attempt, told["manifest"].encode()), "prepared"),
        ("commit", lambda told: _rename(attempt), "renamed"),
    ]
    for decision, act, done in parts:
        told = _wait(attempt, decision, deadline + _DECISION_ARRIVES_S)
        if "problem" in told:
            return
        try:
            report = {"done": act(told)}
        except Exception as error:
            report = {"problem": _problem(attempt, error)}
        set_value(attempt.store, f"{done}/{attempt.rank}", report)


def _write_assets(attempt: SaveAttempt) -> dict[str, Any]:
    if not attempt.assets:
        return {}
    disk.make_directory(attempt.hidden / ASSETS)
    written = {
        f"{ASSETS}/{name}": disk.write_file(attempt.hidden / ASSETS / name, [memoryview(content)])
        for name, content in attempt.assets.items()
    }
    disk.sync_directory(attempt.hidden / ASSETS)
    return {
        name: {"bytes": file.bytes, "xxh3_128": file.xxh3_128} for name, file in written.items()
    }


def _prepare(attempt: SaveAttempt, raw: bytes) -> None:
    """Manifest, then COMPLETE, then the names of all: from here on the directory is a checkpoint.

    Raises:
        OSError: also if a file of this disk's ranks is not here as it was reported.
    """
    for name, file in json.loads(raw)["files"].items():
        if (
            attempt.leader_of[file["rank"]] == attempt.rank
            and (attempt.hidden / name).stat().st_size != file["bytes"]
        ):
            raise OSError(
                f"{name} has not the {file['bytes']} bytes that rank {file['rank']} wrote"
            )
    disk.write_file(attempt.hidden / "manifest.json", [memoryview(raw)])
    complete = xxhash.xxh3_128(raw).hexdigest() + "\n"
    disk.write_file(attempt.hidden / "COMPLETE", [memoryview(complete.encode())])
    disk.sync_directory(attempt.hidden)


def _rename(attempt: SaveAttempt) -> list[str]:
    """Give this disk's part its name; the names of all checkpoints there up to this one, newest first."""
    if os.path.lexists(attempt.final):
        move_aside(attempt.final)
    disk.rename(attempt.hidden, attempt.final)
    step = step_of(attempt.final)
    return [path.name for path in find_committed(attempt.final.parent) if step_of(path) <= step]


def _collect(attempt: SaveAttempt, what: str, ranks: Iterable[int], deadline: float) -> list[Any]:
    """The reports of these ranks, in their order.

    Raises:
        NotSaved: one reports a problem, or did not report in time.
    """
    keys = {rank: f"{what}/{rank}" for rank in ranks}
    try:
        wait_for(attempt.store, list(keys.values()), deadline - time.monotonic())
    except TimeoutError as error:
        problems = [rank for rank, key in keys.items() if attempt.store.check([key])]
        for rank in problems:
            if "problem" in (told := get_value(attempt.store, keys[rank])):
                raise NotSaved(told["problem"]) from error
        late = [rank for rank, key in keys.items() if not attempt.store.check([key])]
        if late:
            raise NotSaved(
                f"no word from rank {', '.join(map(str, late[:8]))} within {attempt.timeout_s} s "
                "(distributed.save_timeout_s)"
            ) from error
    reports = [get_value(attempt.store, key) for key in keys.values()]
    for report in reports:
        if "problem" in report:
            raise NotSaved(report["problem"])
    return [report["done"] for report in reports]


def _clean(attempt: SaveAttempt) -> None:
    """Delete this attempt's files: their space may be what the next save lacks."""
    with contextlib.suppress(OSError):  # what stays is deleted at the next start
        disk.delete(
            attempt.hidden if attempt.is_leader else attempt.hidden / rank_file(attempt.rank)
        )
        if attempt.hidden.is_dir() and not any(attempt.hidden.iterdir()):
            disk.delete(attempt.hidden)


def keep_newest(checkpoints: Path, keep: int, committed: Sequence[str]) -> None:
    """Delete what is older than the newest `keep` of the committed ones, which are named newest first, if there are so
    many. Each loses its name first, so that none is ever seen in part."""
    if len(committed) < keep:
        return
    for path in find_committed(checkpoints):
        if step_of(path) < step_of(Path(committed[keep - 1])):
            nameless = path.with_name(f".{path.name}.deleting")
            disk.rename(path, nameless)
            disk.delete(nameless)


def move_aside(path: Path, name: Path | None = None) -> Path:
    """Rename what is in the way, so that it is neither overwritten nor deleted; its new name, from `name` if given."""
    name, number = name or path, 1
    while os.path.lexists(aside := name.with_name(f"{name.name}.aside{number}")):
        number += 1
    disk.rename(path, aside)
    return aside


def _problem(attempt: SaveAttempt, error: Exception) -> str:
    text = (str(error).splitlines() or [""])[0]
    what = text if isinstance(error, OSError) else f"{type(error).__name__}: {text}"
    return f"rank {attempt.rank} on {socket.gethostname()}: {what}"


def _wait(attempt: SaveAttempt, key: str, deadline: float) -> dict[str, Any]:
    wait_for(attempt.store, [key], deadline - time.monotonic())
    return cast(dict[str, Any], get_value(attempt.store, key))


def forget(store: dist.Store, size: int) -> None:
    """Take an ended attempt's words out of the store. All ranks must have read them."""
    keys = ["manifest", "commit", "outcome"]
    keys += [f"{what}/{rank}" for what in ("report", "prepared", "renamed") for rank in range(size)]
    for key in keys:
        delete_value(store, key)
