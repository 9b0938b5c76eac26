"""Compare the files of checkpoints and of exported models with the digests that came with them."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash
from tqdm import tqdm

from shardtune.checkpoint.assets import LISTING, read_listing
from shardtune.checkpoint.manifest import RESTORE, Checkpoint, DamagedCheckpoint, open_checkpoint
from shardtune.units import gb

_READ_BYTES = 1 << 22
_EXPORT_AGAIN = "export the model again, or restore it from a copy"


def verify(directories: Sequence[Path]) -> list[str]:
    """Read every byte once, several files at a time, with a progress bar on a terminal.

    The directories are exported models, and the parts of one checkpoint. Returns a problem `<what>
    - <what to do>` for each damaged or missing file. Raises UserError.
    """
    parts = [path for path in directories if not os.path.lexists(path / LISTING)]
    problems = verify_checkpoint(parts) if parts else []
    for folder in (path for path in directories if path not in parts):
        if exported := read_listing(folder):
            found = [*_check_all(Checkpoint(str(folder), exported, "", [folder])).values()]
        else:
            found = [f"{folder / LISTING}: is damaged"]
        problems += [f"{problem} - {_EXPORT_AGAIN}" for problem in found]
    return problems


def verify_checkpoint(directories: Sequence[Path]) -> list[str]:
    try:
        checkpoint = open_checkpoint(*directories)
    except DamagedCheckpoint as error:
        return [f"{error} - {RESTORE}"]
    name_all = "name all parts of the checkpoint, or restore it from a copy"
    return [
        f"{problem} - {RESTORE if checkpoint.find(name) else name_all}"
        for name, problem in _check_all(checkpoint).items()
    ]


def _check_all(written: Checkpoint) -> dict[str, str]:
    """Return the problem of each bad file, under a progress bar; say if there is none."""
    names = sorted(written.files)
    total = sum(int(written.files[n]["bytes"]) * len(written.find_all(n)) for n in names)
    hidden = not sys.stderr.isatty()
    bar = tqdm(total=total, unit="B", unit_scale=True, desc=written.name, disable=hidden)
    with bar:
        checked = check_files(written, names, os.cpu_count() or 1, bar.update)
    problems = {name: problem for name, problem in checked.items() if problem}
    if not problems:
        print(f"{written.name}: intact, {len(names)} files, {gb(total, 2)} GB")
    return problems


def check_files(
    written: Checkpoint,
    names: Sequence[str],
    threads: int = 1,
    on_read: Callable[[int], object] = lambda count: None,
) -> dict[str, str | None]:
    """Check every copy of these files on several threads; return a problem or None for each.

    `on_read` is called with the number of bytes of each read.
    """

    def check(name: str) -> str | None:
        paths = written.find_all(name)
        problems = (_check_file(written.files[name], path, on_read) for path in paths)
        return next(filter(None, problems), None) if paths else written.why_missing(name)

    with ThreadPoolExecutor(threads) as pool:
        return dict(zip(names, pool.map(check, names), strict=True))


def _check_file(
    expected: Mapping[str, Any], path: Path, on_read: Callable[[int], object]
) -> str | None:
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
