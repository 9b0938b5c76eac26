"""What a node says of the preflight: lines that `tee` can take, without control characters."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable

from shardtune.cluster.control import printable


class Voice:
    """Problems are said once each, as soon as they are known; the last one is the last line on stderr."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._is_problem_last = False

    def say(self, line: str) -> None:
        self._is_problem_last = False
        try:
            print(f"Preflight: {printable(line)}", flush=True)
        except OSError:  # `tee` may have ended before
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def warn(self, line: str) -> None:
        self._is_problem_last = False
        with contextlib.suppress(OSError):
            print(f"Warning: {printable(line)}", flush=True)

    def report(self, problems: Iterable[str]) -> None:
        for problem in problems:
            if problem not in self.problems:
                self.problems.append(problem)
                self._print(problem)

    def conclude(self, problems: Iterable[str]) -> None:
        """Report them; in a log that has both streams, what was said since the last problem must not hide it."""
        self.report(problems)
        with contextlib.suppress(OSError):
            if self.problems and not self._is_problem_last and os.path.sameopenfile(1, 2):
                self._print(self.problems[-1])

    def _print(self, problem: str) -> None:
        self._is_problem_last = True
        with contextlib.suppress(OSError):
            print(f"ERROR: {printable(problem)}", file=sys.stderr, flush=True)
