"""Small wrong edits of the code, as data, and the tests that must notice each."""

from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mutant:
    """One wrong edit: `find`, which stands once in `file`, becomes `replace`.

    All `tests` pass without the edit, and at least one fails with it.
    """

    room: str  # the name of the YAML file that lists it
    edit: str  # a sentence for people
    file: str  # from the repository's root
    find: str
    replace: str
    tests: tuple[str, ...]  # pytest's node ids

    def apply(self, root: Path) -> None:
        """Edit the file below `root`.

        Raises:
            ValueError: the text does not stand in the file exactly once.
        """
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        if (count := text.count(self.find)) != 1:
            raise ValueError(f"{self.file}: {count} places have the text of {self.edit!r}")
        path.write_text(text.replace(self.find, self.replace), encoding="utf-8")


def read_mutants() -> list[Mutant]:
    """Read every list of this folder, in the order of its name."""
    return [
        Mutant(path.stem, **{**entry, "tests": tuple(entry["tests"])})
        for path in sorted(Path(__file__).parent.glob("*.yaml"))
        for entry in yaml.safe_load(path.read_text(encoding="utf-8"))
    ]
