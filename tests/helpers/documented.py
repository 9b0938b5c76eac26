"""The messages that docs/troubleshooting.md quotes: in blocks of a kind, a line each, with `<...>` for what varies."""

from __future__ import annotations

import re
from collections import defaultdict

from conftest import REPOSITORY

DOCUMENT = (REPOSITORY / "docs/troubleshooting.md").read_text(encoding="utf-8")
QUOTES: dict[str, list[str]] = defaultdict(list)
for _kind, _block in re.findall(r"^```text (\w+)\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL):
    QUOTES[_kind] += _block.splitlines()
# Those that `require_documented` has met in any process that runs tests, a line each.
MET = REPOSITORY / ".pytest_cache/met"


def is_in(quote: str, text: str) -> bool:
    return re.search(_pattern(quote), text) is not None


def require_documented(kind: str, line: str) -> None:
    """A last line, `ERROR: <what> - <what to do>`, of which the document quotes `<what>`, without a node before it."""
    told = re.sub(r"^ERROR: (node (\d+|\?) \([^()]+\): )?", "", line)
    met = [quote for quote in QUOTES[kind] if re.match(f"{_pattern(quote)} - ", told)]
    assert met, f"docs/troubleshooting.md has no entry for: {line}"
    MET.parent.mkdir(exist_ok=True)
    with MET.open("a", encoding="utf-8") as file:
        file.write("".join(f"{quote}\n" for quote in met))


def _pattern(quote: str) -> str:
    return ".+?".join(map(re.escape, re.split(r"<[^<>]+>", quote)))
