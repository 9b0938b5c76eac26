"""Why a record cannot be used, in words that whoever wrote the data can follow."""

from __future__ import annotations

import json
import reprlib
from typing import Any


class RecordError(ValueError):
    """A record cannot be used: `<what> - <what to do>`. Whoever catches it adds file and line.

    `kind`: the problem without the values of this record, alike for all records of one shape.
    """

    def __init__(self, problem: str, kind: str = "") -> None:
        super().__init__(problem, kind)
        self.problem, self.kind = problem, kind or problem

    def __str__(self) -> str:
        return self.problem


class FileError(RecordError):
    """No further record of a file can be used, so that none of them is merely left out."""


class _ShortRepr(reprlib.Repr):
    """Shortens values as reprlib does, but shows null, true and false as the data writes them."""

    def repr1(self, x: Any, level: int) -> str:
        return json.dumps(x) if x is None or x is True or x is False else super().repr1(x, level)


def require(condition: object, where: str, value: Any, remedy: str) -> None:
    """Raise RecordError where a value does not meet its condition."""
    if not condition:
        problem = f"{where} is {_ShortRepr().repr(value)} - write {remedy}"
        raise RecordError(problem, kind=f"{where} - {remedy}")
