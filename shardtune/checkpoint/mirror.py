"""Copy each disk's part of a committed checkpoint to the next disk, while training goes on.

The leaders of the disks form a ring. Once each of them has its neighbour's part, the checkpoint
outlives any one disk: a resume reads parts wherever they are.
"""

import contextlib
import datetime
import errno
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shardtune.checkpoint import durable_fs
from shardtune.checkpoint.commit import SaveAttempt, run_phase
from shardtune.checkpoint.manifest import (
    PARTIAL,
    DamagedCheckpoint,
    find_committed,
    open_checkpoint,
    rank_file,
)
from shardtune.checkpoint.run_dir import RunDir
from shardtune.checkpoint.safetensors_writer import tensor_bytes
from shardtune.distributed.measured import MIRROR_SHARE, read_measured
from shardtune.distributed.world import World
from shardtune.log import logger, node_logger
from shardtune.run_files import METRICS, read_entries
from shardtune.units import gb

_PIECE_BYTES = 1 << 20  # longer bursts would hold up a step more
# The timeout is long: a slow link may take hours, and a dead leader closes its connections anyway.
_TIMEOUT_S = 2 * 24 * 3600.0


class Mirror:
    """The ring of the leaders of a run's disks, which copies one checkpoint at a time.

    After a failure no other checkpoint is copied: it would fail for the same reason.
    """

    def __init__(self, run_dir: RunDir, part_bytes: Mapping[int, int], world: World) -> None:
        """Connect the leaders. `part_bytes`: what the ranks of each disk save. Collective."""
        self._run_dir, self._world = run_dir, world
        self._leaders = sorted(set(run_dir.leader_of))
        place = self._leaders.index(run_dir.leader_of[world.rank])
        self._next = self._leaders[(place + 1) % len(self._leaders)]
        self._previous = self._leaders[place - 1]
        self.expected_bytes = part_bytes[self._previous]  # come to this rank's disk
        timeout = datetime.timedelta(seconds=_TIMEOUT_S)
        self._group = dist.new_group(self._leaders, backend="gloo", timeout=timeout)
        nodes = world.size // world.local_size
        measured = read_measured(run_dir.path, nodes, world.local_size, lambda device: True)
        self._link_bytes_per_s = world.on_rank0(lambda: measured.node_bytes_per_s)
        self._thread: threading.Thread | None = None
        self._save_bytes = 0
        self.under_way: list[str] = []  # the checkpoint whose parts are being copied
        self._has_failed = self._is_late = False
        self._training_has_ended = threading.Event()

    def agree_to_start(self, name: str) -> bool:
        """Return whether no copy is under way and none has failed. Collective."""
        is_ready = all(self._world.all_gather_json(self._is_free()))
        if not (is_ready or self._has_failed or self._is_late):
            self._is_late = True
            logger.info(f"Not mirrored: {name}: the copies of an earlier one go on (said once)")
        return is_ready

    def _is_free(self) -> bool:
        return not (self._has_failed or self.under_way)

    def start(self, attempt: SaveAttempt) -> None:
        """Copy the parts of a committed checkpoint, in a thread. Every leader calls it."""
        if attempt.is_leader:
            self.under_way = [attempt.final.name]
            self._thread = threading.Thread(target=self._run, args=(attempt,), daemon=True)
            self._thread.start()

    def finish(self, last: SaveAttempt) -> None:
        """Wait until the last checkpoint is copied; without training the whole link is free."""
        self._training_has_ended.set()
        deadline = time.monotonic() + last.timeout_s
        for must_start in (False, not last.is_mirrored):
            if must_start and self._is_free():
                self.start(last)
            if self._thread:
                self._thread.join(max(0.0, deadline - time.monotonic()))
        if self.under_way:
            node_logger.warning(
                f"Not mirrored: {self.under_way[0]}: its copies did not end within "
                f"{last.timeout_s:g} s (distributed.save_timeout_s)"
            )

    def _run(self, committed: SaveAttempt) -> None:
        began, name = time.perf_counter(), committed.final.name
        self._save_bytes = committed.disk_bytes
        attempt = replace(
            committed,
            what="its neighbour's part, with the saves to come,",
            staging=committed.final / PARTIAL,
            disk_bytes=self.expected_bytes + _saves_to_come(committed) * committed.disk_bytes,
            store=dist.PrefixStore("mirror", committed.store),
        )
        run = partial(run_phase, attempt, time.monotonic() + _TIMEOUT_S)
        sent: dict[Path, int] = {}
        try:
            offers = run("offer", self._leaders, lambda: self._offer(attempt, sent), list)
            incoming = self._exchange(sent, offers[self._leaders.index(self._previous)])
            run("copy", self._leaders, lambda: self._receive(attempt, incoming), list)
        except Exception as error:
            self._has_failed = True
            logger.warning(
                f"Not mirrored: {name}: {attempt.describe(error)}. No checkpoint is mirrored until "
                "the next start"
            )
            return
        finally:
            self.under_way = []
        size, seconds = gb(max(map(sum, offers))), time.perf_counter() - began
        logger.info(
            f"Mirrored {name}: each node holds its neighbour's part ({size} GB in {seconds:.0f} s)"
        )

    def _offer(self, attempt: SaveAttempt, sent: dict[Path, int]) -> list[int]:
        """Find the files that go to the next disk; return their lengths in the order of sending.

        Raises OSError: also if the disk lacks room for the part that comes and for the next saves.
        """
        if durable_fs.free_bytes(attempt.final) < attempt.disk_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        own = _part(attempt, self._world.rank)
        sent.update((attempt.final / name, file["bytes"]) for name, file in own.items())
        if self._world.is_main:
            metrics = self._run_dir.path / METRICS
            with contextlib.suppress(OSError):  # the checkpoint is whole without them
                sent[metrics] = metrics.read_bytes().rfind(b"\n") + 1  # the rest is being written
        return list(sent.values())

    def _exchange(self, sent: Mapping[Path, int], received: Sequence[int]) -> Iterator[memoryview]:
        """Send these files to the next disk, and yield the pieces of files of these lengths.

        A piece counts until the next one is asked for.
        """
        outgoing = chain(*(_read(path, n_bytes) for path, n_bytes in sent.items()))
        lengths = chain(*map(_pieces, received))
        buffer = torch.empty(_PIECE_BYTES, dtype=torch.uint8)
        for piece, length in zip_longest(outgoing, lengths):
            began, transfers = time.perf_counter(), []
            if piece is not None:
                transfers.append(dist.isend(piece, self._next, self._group))
            if length is not None:
                transfers.append(dist.irecv(buffer[:length], self._previous, self._group))
            for transfer in filter(None, transfers):
                transfer.wait()
            seconds = time.perf_counter() - began
            if self._link_bytes_per_s:
                seconds = _PIECE_BYTES / self._link_bytes_per_s
            if length is not None:
                yield tensor_bytes(buffer[:length])
            rest_s = seconds / MIRROR_SHARE - (time.perf_counter() - began)
            self._training_has_ended.wait(max(0.0, rest_s))

    def _receive(self, attempt: SaveAttempt, incoming: Iterator[memoryview]) -> None:
        """Write the neighbour's files under their own names once all of them are whole.

        Raises OSError, DamagedCheckpoint.
        """
        arrived: dict[Path, Path] = {}
        try:
            for name, file in _part(attempt, self._previous).items():
                final = attempt.final / name
                arrived[final] = final.with_name(f"{name}{PARTIAL}")
                pieces = islice(incoming, len(_pieces(file["bytes"])))
                content = _leaving_room(self._save_bytes, attempt.final, pieces)
                written = durable_fs.write_file(arrived[final], content).entry
                if written["xxh3_128"] != file["xxh3_128"]:
                    raise DamagedCheckpoint(f"{name} arrived damaged")
            metrics = b"".join(map(bytes, incoming))
            for final, copy in arrived.items():
                durable_fs.rename(copy, final)
            if metrics:
                path = self._run_dir.path / METRICS
                durable_fs.replace_file(path, _with_missing_steps(path, metrics))
        except Exception:
            with contextlib.suppress(OSError):
                for copy in arrived.values():
                    durable_fs.delete(copy)
            raise
        finally:
            for _ in incoming:  # a leader whose disk has failed still sends its part
                pass


def _part(attempt: SaveAttempt, leader: int) -> dict[str, Mapping[str, Any]]:
    """Return the entries of the files that the ranks of one disk wrote. Assets are on all disks."""
    files = open_checkpoint(attempt.final).files
    return {
        name: file
        for name, file in files.items()
        if name == rank_file(file["rank"]) and attempt.leader_of[file["rank"]] == leader
    }


def _leaving_room(n_bytes: int, path: Path, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    """Yield pieces while they leave room for the next save: others may have come meanwhile."""
    for piece in pieces:
        if durable_fs.free_bytes(path) < n_bytes + len(piece):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        yield piece


def _saves_to_come(attempt: SaveAttempt) -> int:
    """Return how many parts of its own a disk still takes before each save deletes an older one."""
    held = len(find_committed(attempt.final.parent))
    # A mirrored checkpoint may stay beyond `keep`, where only one is kept in place of a newer one.
    return max(1, attempt.keep + 1 - held) + (attempt.keep == held == 1)


def _with_missing_steps(path: Path, metrics: bytes) -> bytes:
    """Return a neighbour's lines, and among them those of steps that a new disk of it lacks."""
    theirs = [(json.loads(line), line) for line in metrics.splitlines(keepends=True)]
    steps = {entry["step"] for entry, _ in theirs if entry["kind"] == "step"}
    lines = {line for _, line in theirs}
    earlier = [
        (entry, line)
        for entry, line in read_entries(path, max(steps, default=0))
        if entry["step"] not in steps and line not in lines
    ]
    in_order = sorted(earlier + theirs, key=lambda each: each[0]["step"])
    return b"".join(line for _, line in (in_order if earlier else theirs))


def _pieces(n_bytes: int) -> list[int]:
    """Return the lengths of the pieces in which a file is sent."""
    whole, rest = divmod(n_bytes, _PIECE_BYTES)
    return [_PIECE_BYTES] * whole + [rest] * (rest > 0)


def _read(path: Path, n_bytes: int) -> Iterator[torch.Tensor]:
    """Yield a file in pieces. What cannot be read is zeros, which the receiver's digest shows."""
    for number, length in enumerate(_pieces(n_bytes)):
        piece = torch.zeros(length, dtype=torch.uint8)
        with contextlib.suppress(OSError):
            content = np.fromfile(path, np.uint8, length, offset=number * _PIECE_BYTES)
            piece[: len(content)] = torch.from_numpy(content)
        yield piece
