"""All system calls that change a checkpoint directory or metrics.jsonl.

Their order decides what survives a crash. Tests replace this module's `os` to record or fail them.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from shardtune.units import rounded_gb

_BLOCK_BYTES = 1 << 25


@dataclass(frozen=True)
class WrittenFile:
    """A durable file: its entry in a manifest, and the digest (xxh3_128) of each of its parts."""

    entry: dict[str, int | str]
    part_digests: list[str]


def make_directory(path: Path) -> None:
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    for directory in reversed(missing):
        try:
            os.mkdir(directory)
        except FileExistsError:  # another rank was faster
            continue
        sync_directory(directory.parent)


def write_file(path: Path, parts: Iterable[memoryview]) -> WrittenFile:
    """Write a new file from parts that may be produced while it is written, and sync it.

    Raises:
        OSError: the file exists, or the disk is full or failing. A partial file may remain.
    """
    whole, part_digests, size = xxhash.xxh3_128(), [], 0
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for part in parts:
            digest = xxhash.xxh3_128()
            for start in range(0, len(part), _BLOCK_BYTES):
                block = part[start : start + _BLOCK_BYTES]
                digest.update(block)
                whole.update(block)
                while block:  # a write may be short
                    block = block[os.write(handle, block) :]
            part_digests.append(digest.hexdigest())
            size += len(part)
        os.fsync(handle)
    finally:
        os.close(handle)
    return WrittenFile({"bytes": size, "xxh3_128": whole.hexdigest()}, part_digests)


def replace_file(path: Path, content: bytes) -> None:
    """Give a file this content, durably, or leave it as it was."""
    new = path.with_suffix(".tmp")
    delete(new)
    write_file(new, [memoryview(content)])
    os.rename(new, path)
    sync_directory(path.parent)


class AppendedFile:
    """Appends bytes to an existing file. `sync` makes them durable."""

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_WRONLY | os.O_APPEND)

    def write(self, data: bytes) -> int:
        """Return how many bytes were written: a write may be short."""
        return os.write(self._handle, data)

    def sync(self) -> None:
        os.fsync(self._handle)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def rename(old: Path, new: Path) -> Path | None:
    """Rename within one directory, durably or not at all.

    Returns where an earlier entry of the name `new` was moved aside, or None.
    """
    aside = move_aside(new) if os.path.lexists(new) else None
    try:
        os.rename(old, new)
        sync_directory(new.parent)
    except OSError:
        if not os.path.lexists(old):  # renamed, but the new name may not last
            os.rename(new, old)
        raise
    return aside


def unfinished(path: Path) -> Path:
    """Return the hidden name under which the directory `path` is written until it is complete."""
    return path.with_name(f".{path.name}.writing")


def make_unfinished(path: Path) -> Path:
    delete(unfinished(path))
    make_directory(unfinished(path))
    return unfinished(path)


def replace(path: Path) -> None:
    """Give `unfinished(path)` the name `path`, durably, and delete an earlier directory of it.

    A crash in between leaves the earlier one under another name: see `recover_replaced`.
    """
    if os.path.lexists(path):
        rename(path, _replaced(path))
    rename(unfinished(path), path)
    delete(_replaced(path))


def delete_hidden(path: Path) -> None:
    """Delete a directory under its hidden name: a kill leaves no part of it under `path`."""
    rename(path, unfinished(path))
    delete(unfinished(path))


def recover_replaced(path: Path) -> None:
    """Finish or undo an interrupted `replace`, and delete what was written for it."""
    if os.path.lexists(_replaced(path)) and not os.path.lexists(path):
        rename(_replaced(path), path)
    delete(_replaced(path))
    delete(unfinished(path))


def _replaced(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def move_aside(path: Path, name: Path | None = None) -> Path:
    """Rename `path` to the first free `<name>.aside<number>`, and return that.

    `name` is `path` unless given.
    """
    name, number = name or path, 1
    while os.path.lexists(aside := name.with_name(f"{name.name}.aside{number}")):
        number += 1
    rename(path, aside)
    return aside


def free_bytes(path: Path) -> int:
    return shutil.disk_usage(_existing(path)).free


def _existing(path: Path) -> Path:
    return next(each for each in (path, *path.parents) if each.exists())


def size(path: Path) -> int:
    """Return the bytes that a directory takes of its disk, while others may write there."""
    total = 0
    for file in (path, *path.rglob("*")):
        with contextlib.suppress(FileNotFoundError):
            total += 512 * file.lstat().st_blocks
    return total


def missing_room(error: Exception, what: str, needed_bytes: float, part: Path) -> str:
    """Say how much room a write lacks on a full disk, as "; ...". Empty for another error.

    `part`, the file that was begun, counts as free: it will be deleted.
    """
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    needed = f"; {what} takes {rounded_gb(needed_bytes)} of the disk of {part.parent}"
    try:
        missing = needed_bytes - free_bytes(part.parent) - size(part)
    except OSError:
        return needed
    # A quota may leave less than the filesystem says.
    return f"{needed}, {rounded_gb(missing)} more than it has free" if missing > 0 else needed


def delete(path: Path) -> None:
    """Delete a file, or a directory with its content, if it exists."""
    try:
        if not path.is_dir() or path.is_symlink():
            os.unlink(path)
            return
        for entry in sorted(path.iterdir()):
            delete(entry)
        os.rmdir(path)
    except FileNotFoundError:
        return
