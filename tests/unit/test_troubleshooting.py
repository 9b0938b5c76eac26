"""docs/troubleshooting.md quotes messages that the source has."""

from __future__ import annotations

import re

import pytest
from conftest import REPOSITORY
from helpers.documented import QUOTES, fixed_parts

FEW = 3  # runs of three words: a message with fewer is too short to be looked for


def source_text() -> str:
    """Return the code that a launch runs, each text in one piece, and the launch scripts."""
    files = [*REPOSITORY.glob("shardtune/**/*.py"), *REPOSITORY.glob("distTest/**/*")]
    files += REPOSITORY.glob("launch_*")
    texts = [file.read_text("utf-8") for file in files if file.suffix in (".py", ".sh", ".sbatch")]
    return re.sub(r'"\s+f?r?"|\\\n', "", "\n".join(texts))


@pytest.mark.parametrize("kind", ["slow"])
def test_each_quoted_message_is_in_the_source(kind):
    """Most of its words, three in a row at a time: the source may put a message together from
    parts.
    """
    source = source_text()
    assert QUOTES[kind]
    for quote in QUOTES[kind]:
        words = [part.split() for part in fixed_parts(quote)]
        runs = [" ".join(part[i : i + 3]) for part in words for i in range(len(part) - 2)]
        known = [run for run in runs if run in source]
        assert len(runs) < FEW or len(known) >= len(runs) / 3, quote
