"""Where a run's own files are: their names in run.dir, and the user's cache."""

import contextlib
import fcntl
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VERSION = "0.1.0"  # the version of the program that writes the files
LOCK = ".lock"  # exists from the first start on, also after the run
METRICS = "metrics.jsonl"
_FLOCK = "hhqqi"  # Linux's struct flock: l_type, l_whence, l_start, l_len, l_pid


def cache_folder(name: str) -> Path:
    """Return a folder of `$SHARDTUNE_CACHE`, by default of `~/.cache/shardtune`."""
    return Path(os.environ.get("SHARDTUNE_CACHE") or "~/.cache/shardtune").expanduser() / name


def read_entries(path: Path, last_step: int) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield each object up to a step, with its line. Lines that a crash garbled are left out."""
    for line in path.read_bytes().splitlines(keepends=True) if path.is_file() else ():
        with contextlib.suppress(ValueError, TypeError, KeyError):
            entry = json.loads(line)
            if entry["step"] <= last_step and line.endswith(b"\n"):
                yield entry, line


def is_locked(run_dir: Path) -> bool | None:
    """Return whether a process holds the run's lock, without taking it.

    None: the lock file does not exist, or its filesystem lacks locks. Only other processes count.
    """
    try:
        with (run_dir / LOCK).open("rb") as file:
            wanted = struct.pack(_FLOCK, fcntl.F_WRLCK, 0, 0, 0, 0)
            held, *_ = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, wanted))
            return bool(held != fcntl.F_UNLCK)
    except OSError:
        return None
