"""The last lines of a process that fails. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import sys


def print_errors(*problems: str) -> None:
    """Print an `ERROR:` line for each problem: the last lines of a process that fails."""
    with contextlib.suppress(OSError):  # `tee` may have ended before
        for problem in problems:
            print(f"ERROR: {problem}", file=sys.stderr, flush=True)
