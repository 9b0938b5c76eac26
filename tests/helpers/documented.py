"""The messages quoted in docs/troubleshooting.md: in blocks of a kind, one on each line, `<...>`
for what varies.
"""

from __future__ import annotations

import re
from collections import defaultdict

from helpers.commands import REPOSITORY

DOCUMENT = (REPOSITORY / "docs/troubleshooting.md").read_text(encoding="utf-8")
QUOTES: dict[str, list[str]] = defaultdict(list)
for _kind, _block in re.findall(r"^```text (\w+)\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL):
    QUOTES[_kind] += _block.splitlines()


def is_in(quote: str, text: str) -> bool:
    return re.search(".+?".join(map(re.escape, fixed_parts(quote))), text) is not None


def fixed_parts(quote: str) -> list[str]:
    """The text between the `<...>` of a quote."""
    return re.split(r"<[^<>]+>", quote)


def require_error_line(line: str) -> None:
    """Require the form of a last line: `ERROR: <what happened> - <what to do>`."""
    assert re.fullmatch(r"ERROR: \S.* - \S.*", line), line
