"""The errors that end a run early, and helpers for their messages. Imports nothing heavy."""

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# The remedy of most failures.
AGAIN = "the same command with run.resume=auto resumes from the last checkpoint, if any"


def print_errors(*problems: str) -> None:
    """Print an `ERROR:` line for each problem: the last lines of a process that fails."""
    with contextlib.suppress(OSError):  # `tee` may have ended before
        for problem in problems:
            print(f"ERROR: {problem}", file=sys.stderr, flush=True)


class Ending(BaseException):
    """Ends the process with exit code `code`.

    `problems` holds every reason, each as `<what> - <what to do>`, for an `ERROR:` line on stderr.
    """

    code = 1

    def __init__(self, *problems: str) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(problems))


class UserError(Ending, Exception):
    """The run cannot start."""

    code = 2


class Preempted(Ending, Exception):
    """The run has saved and stops on a signal."""

    code = 75


class DoesNotFit(UserError):
    """The plan says that the memory cannot hold the run."""

    code = 3


class RunFailed(Ending, Exception):
    """The run ends for a cause that all ranks share."""


class Aborted(Ending, KeyboardInterrupt):
    """Ends this process at once without saving, and so the run.

    `code` is 2 for a refusal, 75 where the same command goes on from a checkpoint, else 1.
    """

    def __init__(self, *problems: str, code: int) -> None:
        super().__init__(*problems)
        self.code = code


class OutOfMemory(Exception):
    """One rank has less memory than it needs: `<what> - <what to do>`; exit code 1."""


def all_of(*checks: Callable[[], Any]) -> list[Any]:
    """Run every check, even after one has refused, and return their results. Raises UserError."""
    results, problems = [], []
    for check in checks:
        try:
            results.append(check())
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)
    return results


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text, or the name of its type where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def missing_directory(path: str) -> str:
    directories = reversed(Path(path).absolute().parents)
    missing = next((str(d) for d in directories if not os.access(d, os.F_OK)), "")
    return missing and f" (the directory {missing} does not exist)"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: "1 step", "2 steps", "2 processes"."""
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{ending}"


def first_few(names: Sequence[object], limit: int) -> str:
    """Return at most `limit` names and the number of the others: "a, b and 3 more"."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(str, names[:limit])) + more


def divisors_text(number: int) -> str:
    return ", ".join(str(other) for other in range(1, number + 1) if number % other == 0)


def require_packages() -> None:
    """End with code 2 and one line if this Python lacks a package that a run imports."""
    names = ("torch", "transformers", "pyarrow", "accelerate", "psutil", "pydantic", "yaml")
    if missing := [name for name in names if not find_spec(name)]:
        print_errors(
            f"{sys.executable} has no {', '.join(missing)} - activate the environment that has "
            "requirements.txt (make setup; source .venv/bin/activate)"
        )
        sys.exit(2)
