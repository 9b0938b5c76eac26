"""Say on stderr each part of a command's work before it begins."""

from __future__ import annotations

import sys
from collections.abc import Callable

Say = Callable[[str], None]


def silent(_: str) -> None:
    """Say nothing."""


def say(text: str) -> None:
    print(f"Plan: {text}", file=sys.stderr, flush=True)
