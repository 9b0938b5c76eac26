"""How a run ends early."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# What to do after most failures; distTest/launch.sh has the same words.
AGAIN = "the same command with run.resume=auto resumes from the last checkpoint, if any"


class UserError(Exception):
    """The run cannot start: every problem found, each as `<what> - <what to do>`.

    The command prints one `ERROR:` line a problem on stderr and exits with 2.
    """

    def __init__(self, *problems: str) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(problems))


class Preempted(Exception):
    """A signal asked the run to stop, and it has saved: `<what> - <what to do>`; exit code 75."""


class Aborted(KeyboardInterrupt):
    """This process ends at once, and the run with it, by a signal or where others would be long in coming: `<what> -
    <what to do>`. There is nothing to save.

    `code` is 2 where it refuses, 75 where the same command goes on from what was saved, else 1.
    """

    def __init__(self, problem: str, code: int) -> None:
        self.code = code
        super().__init__(problem)


class RunFailed(Exception):
    """All ranks stop the run together for a cause that they share, `<what> - <what to do>`; exit code 1."""


class OutOfMemory(Exception):
    """One rank has less memory than it needs: `<what> - <what to do>`; exit code 1."""


def all_of(*checks: Callable[[], Any]) -> list[Any]:
    """The results of all checks, each run although another refused.

    Raises:
        UserError: with the problems of all that did.
    """
    results, problems = [], []
    for check in checks:
        try:
            results.append(check())
        except UserError as refused:
            problems += refused.problems
    if problems:
        raise UserError(*problems)
    return results
