"""Every call that changes a checkpoint directory. What survives a crash is decided by the order of these, and tests
replace this module's `os` to record them or to let them fail."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import xxhash

_BLOCK_BYTES = 1 << 25


@dataclass(frozen=True)
class Written:
    """A file that is on its disk: its size, its digest (xxh3_128, hexadecimal) and that of each part it is made of."""

    bytes: int
    xxh3_128: str
    parts: list[str]


def make_directory(path: Path) -> None:
    """Create `path` and what is missing above it, all of it durable."""
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    for directory in reversed(missing):
        try:
            os.mkdir(directory)
        except FileExistsError:  # another rank was faster
            continue
        sync_directory(directory.parent)


def write_file(path: Path, parts: Iterable[memoryview]) -> Written:
    """Write a new file from bytes that are made while it is written, and sync it.

    Raises:
        OSError: it exists, or the disk is full or failing. What was written may remain.
    """
    whole, digests, size = xxhash.xxh3_128(), [], 0
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
            digests.append(digest.hexdigest())
            size += len(part)
        os.fsync(handle)
    finally:
        os.close(handle)
    return Written(size, whole.hexdigest(), digests)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def rename(old: Path, new: Path) -> None:
    """Give a file or directory another name beside its own, durably or not at all. `new` must not exist."""
    try:
        os.rename(old, new)
        sync_directory(new.parent)
    except OSError:
        if not old.exists() and not old.is_symlink():  # it has its new name, which may not last
            os.rename(new, old)
        raise


def delete(path: Path) -> None:
    """Delete a file or a directory with all that is in it, if it is there."""
    try:
        if not path.is_dir() or path.is_symlink():
            os.unlink(path)
            return
        for entry in sorted(path.iterdir()):
            delete(entry)
        os.rmdir(path)
    except FileNotFoundError:
        return
