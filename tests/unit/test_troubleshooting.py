"""docs/troubleshooting.md quotes messages that the source has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from conftest import REPOSITORY
from helpers.documented import QUOTES, fixed_parts

FEW = 3  # runs of three words: a message with fewer is too short to be looked for


def source_texts() -> Iterator[str]:
    """The string literals of the code that a launch runs, NUL where a value is put in, and the
    launch scripts.
    """
    for folder in ("shardtune", "distTest"):
        for file in (REPOSITORY / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = [
                        part.value if isinstance(part, ast.Constant) else "\0"
                        for part in node.values
                    ]
                    yield "".join(map(str, parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value
    for script in (*REPOSITORY.glob("launch_*"), *REPOSITORY.glob("distTest/*.sh")):
        text = script.read_text(encoding="utf-8").replace("\\\n", "")
        yield re.sub(r"\$\{[^}]*\}|\$\([^)]*\)|\$\w+", "\0", text)


@pytest.mark.parametrize("kind", ["preflight", "data", "adapters", "context", "running", "slow"])
def test_each_quoted_message_is_in_the_source(kind: str) -> None:
    """Most of its words, three in a row at a time: the source may put a message together from
    parts.
    """
    source = "\n".join(source_texts())
    assert QUOTES[kind]
    for quote in QUOTES[kind]:
        words = [part.split() for part in fixed_parts(quote)]
        runs = [" ".join(part[i : i + 3]) for part in words for i in range(len(part) - 2)]
        known = [run for run in runs if run in source]
        assert len(runs) < FEW or len(known) >= len(runs) / 3, quote
