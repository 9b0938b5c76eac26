"""The commands and files of README.md and docs/, and the messages that docs/troubleshooting.md
quotes: in blocks of a kind, one on each line, `<...>` for what varies.
"""

import os
import re
import sys
from collections import defaultdict
from pathlib import Path
from subprocess import CompletedProcess

from helpers.commands import REPOSITORY, completed

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
# In the order in which they are read.
PAGES = ["README.md", *re.findall(r"\]\((docs/[\w-]+\.md|CONTRIBUTING\.md)\)", README)]
TEXTS = {page: (REPOSITORY / page).read_text(encoding="utf-8") for page in PAGES}


def blocks(language: str) -> list[str]:
    """Every code block of a language, once, in the order of the pages."""
    found = [
        block.strip()
        for text in TEXTS.values()
        for block in re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]
    return list(dict.fromkeys(found))


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


def error_line(errors: str) -> str:
    """Return the last line of these errors, which must have that form."""
    last = errors.splitlines()[-1]
    require_error_line(last)
    return last


def refused(done: CompletedProcess[str], code: int = 2) -> str:
    """Expect that a command has ended with this code; return its last line."""
    assert done.returncode == code, done.stderr
    return error_line(done.stderr)


def environment(**more: str) -> dict[str, str]:
    binaries = str(Path(sys.executable).parent)
    active = {"PATH": f"{binaries}:{os.environ['PATH']}", "VIRTUAL_ENV": sys.prefix}
    return os.environ | active | more


def run(command: str, cwd: Path, timeout_s: float = 240, **more: str) -> str:
    done = completed(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=cwd,
        env=environment(**more),
        timeout_s=timeout_s,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout
