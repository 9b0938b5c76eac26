"""The cache of tokenized data: a directory for each content, published whole by one rename."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import xxhash

from shardtune.run_files import cache_folder

# An entry that differs from these digests is made anew. `xxhsum -c` reads the file, too.
_DIGESTS = "digests.xxh128"


def cache_root() -> Path:
    """Return `$SHARDTUNE_CACHE/data`, by default `~/.cache/shardtune/data`."""
    return cache_folder("data")


def damaged_files(entry: Path) -> list[str]:
    """Return the names of the files that are missing or differ from their digests."""
    try:
        recorded = (entry / _DIGESTS).read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return [_DIGESTS]
    return sorted(
        {line.partition("  ")[2] or _DIGESTS for line in {*recorded} ^ {*_digests(entry)}}
    )


def _digests(folder: Path) -> list[str]:
    """Return a line with digest and name for each readable file, except the file of digests."""
    lines = []
    # NFS keeps the bytes of a replaced file that a run maps under a hidden name.
    for file in sorted(each for each in folder.glob("[!.]*") if each.name != _DIGESTS):
        with contextlib.suppress(OSError), file.open("rb") as stream:
            digest = hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()
            lines.append(f"{digest}  {file.name}")
    return lines


@contextlib.contextmanager
def new_entry(entry: Path) -> Iterator[Path]:
    """Yield a hidden directory to fill. It becomes `entry` when the block ends without error."""
    # The new files replace those of an existing entry. These are equal, since the key decides every
    # byte, or damaged. A process that maps an old file keeps it.
    folder = entry.with_name(f".{entry.name}-{uuid.uuid4().hex}")
    try:
        folder.mkdir(parents=True)
        yield folder
        (folder / _DIGESTS).write_text("".join(f"{line}\n" for line in _digests(folder)), "utf-8")
        for file in folder.iterdir():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        try:
            folder.rename(entry)
        except OSError:
            if not entry.exists():
                raise
            for file in entry.glob("[!.]*"):  # else a strange file would look damaged again
                if file.is_dir():
                    shutil.rmtree(file)
                elif not (folder / file.name).exists():
                    file.unlink()
            for file in folder.iterdir():
                file.replace(entry / file.name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
