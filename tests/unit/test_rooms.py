"""The folders of the library, and the imports between their parts."""

from __future__ import annotations

import ast
from collections import Counter
from graphlib import TopologicalSorter

import pytest
from helpers.commands import REPOSITORY

LIBRARY = REPOSITORY / "shardtune"
MOST_ARROWS = {"model": 40, "training": 30, "planner": 35}


def arrows(room: str) -> set[tuple[str, str]]:
    """Return the imports between the parts of a room: its sub-folders, and the files beside them.

    `from package import module` counts as an import of the module.
    """
    between = set()
    for file in (LIBRARY / room).rglob("*.py"):
        part = file.relative_to(LIBRARY / room).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                assert not node.level, f"{file}: a relative import"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            imported = [name.split(".") for name in names]
            # Attributes of these packages would be imports that nobody counts.
            assert ["shardtune"] not in imported and ["shardtune", room] not in imported, file
            between |= {
                (part, path[2]) for path in imported if path[:2] == ["shardtune", room] and path[2:]
            }
    return {(part, other) for part, other in between if part != other}


@pytest.mark.parametrize("room", MOST_ARROWS)
def test_imports_between_the_parts_of_a_room_are_few_and_go_one_way(room):
    imports: dict[str, set[str]] = {}
    for part, other in arrows(room):
        imports.setdefault(part, set()).add(other)
    assert sum(map(len, imports.values())) <= MOST_ARROWS[room]
    TopologicalSorter(imports).prepare()  # raises CycleError


def test_the_modules_of_the_library_have_names_of_their_own():
    counts = Counter(file.name for file in LIBRARY.rglob("*.py"))
    twice = {name for name, n in counts.items() if n > 1}
    assert twice <= {"__init__.py", "__main__.py"}
