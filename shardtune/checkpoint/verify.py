"""Compare the files of a checkpoint with the digests in its manifest."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash
from tqdm import tqdm

from shardtune.checkpoint.manifest import RESTORE, Checkpoint, DamagedCheckpoint, open_checkpoint

_READ_BYTES = 1 << 22


def verify_checkpoint(directories: Sequence[Path]) -> list[str]:
    """Read every byte once, several files at a time, with a progress bar on a terminal.

    Returns a problem `<what> - <what to do>` for each damaged or missing file.

    Raises:
        UserError: as open_checkpoint.
    """
    try:
        checkpoint = open_checkpoint(*directories)
    except DamagedCheckpoint as error:
        return [f"{error} - {RESTORE}"]
    names = sorted(checkpoint.files)
    total = sum(checkpoint.files[name]["bytes"] * len(checkpoint.find_all(name)) for name in names)
    hidden = not sys.stderr.isatty()
    with tqdm(total=total, unit="B", unit_scale=True, desc=checkpoint.name, disable=hidden) as bar:
        problems = check_files(checkpoint, names, os.cpu_count() or 1, bar.update)
    if not any(problems.values()):
        print(f"{checkpoint.name}: intact, {len(names)} files, {total / 1e9:.2f} GB")
    name_all = "name all parts of the checkpoint, or restore it from a copy"
    return [
        f"{problem} - {RESTORE if checkpoint.find(name) else name_all}"
        for name, problem in problems.items()
        if problem
    ]


def check_files(
    checkpoint: Checkpoint,
    names: Sequence[str],
    threads: int = 1,
    on_read: Callable[[int], object] = lambda count: None,
) -> dict[str, str | None]:
    """Check every copy of these files on several threads; return a problem or None for each.

    `on_read` is called with the number of bytes of each read.
    """

    def check(name: str) -> str | None:
        paths = checkpoint.find_all(name)
        problems = (_check_file(checkpoint, name, path, on_read) for path in paths)
        return next(filter(None, problems), None) if paths else checkpoint.why_missing(name)

    with ThreadPoolExecutor(threads) as pool:
        return dict(zip(names, pool.map(check, names), strict=True))


def _check_file(
    checkpoint: Checkpoint, name: str, path: Path, on_read: Callable[[int], object]
) -> str | None:
    expected = checkpoint.files[name]
    whole, size, buffer = xxhash.xxh3_128(), 0, memoryview(bytearray(_READ_BYTES))
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                whole.update(buffer[:count])
                size += count
                on_read(count)
    except OSError as error:
        return f"{path}: cannot be read ({error.strerror})"
    if whole.hexdigest() == expected["xxh3_128"]:
        return None
    length = "" if size == expected["bytes"] else f" (its length is not {expected['bytes']})"
    return f"{path}: is damaged{length}"
