"""Pages of the docs site that lie elsewhere in the repository, and the links between them (read by
mkdocs).
"""

import csv
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

REPOSITORY = Path(__file__).resolve().parent.parent
# Where files of the repository lie in the site.
PLACES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/RESULTS.md": "benchmarks.md",
    "config.yaml": "config.yaml",
    "Dockerfile": "Dockerfile",
    **{
        (name := f"examples/{path.name}"): name
        for path in sorted((REPOSITORY / "examples").glob("*.yaml"))
    },
}
FENCE = re.compile(r"^(```\w+) \w+$", re.MULTILINE)
LINK = re.compile(r"(\]\()([^)#:]+)")


def on_files(files: Files, config: Any) -> Files:
    for source, place in PLACES.items():
        files.append(File.generated(config, place, content=(REPOSITORY / source).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn each link to a file of the repository into one to its place in the site.

    Code blocks lose the second word after their fence, which says to tests what they quote.
    """
    if page.file.src_uri == "models.md":
        markdown += table_of(REPOSITORY / "docs/models.csv")
    sources = {place: source for source, place in PLACES.items()}
    source = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def place(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        return match[1] + PLACES.get(target, target.removeprefix("docs/"))

    return FENCE.sub(r"\1", LINK.sub(place, markdown))


def table_of(file: Path) -> str:
    """Return a table of a page with the rows of a CSV file."""
    with file.open(encoding="utf-8", newline="") as opened:
        header, *rows = csv.reader(opened)
    lines = (" | ".join(row) for row in (header, ["---"] * len(header), *rows))
    return "\n## models.csv\n\n" + "".join(f"| {line} |\n" for line in lines)
