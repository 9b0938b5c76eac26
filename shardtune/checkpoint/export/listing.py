"""`export.json`, which lists the files of an exported model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

LISTING = "export.json"
Entries = Mapping[str, Mapping[str, int | str]]  # size and digest of each file
_FORMAT = 1


@dataclass(frozen=True)
class Listing:
    """The files that a folder's export.json lists, as `Checkpoint` has those of a checkpoint."""

    folder: Path
    files: Entries

    @property
    def name(self) -> str:
        return str(self.folder)

    def find_all(self, file: str) -> list[Path]:
        """Return the path of a file, if it is there."""
        path = self.folder / file
        return [path] if path.is_file() else []

    def why_missing(self, file: str) -> str:
        """Describe a missing file."""
        return f"{self.folder / file}: is missing"


def listing_json(values: Mapping[str, Any]) -> bytes:
    """Return the file, whose last value is the digest of the others."""
    values = {"format": _FORMAT, **values}
    return (json.dumps({**values, "xxh3_128": _digest(values)}, indent=2) + "\n").encode()


def read_listing(folder: Path) -> dict[str, Any] | None:
    """Return the content of a folder's file; None if it has none, or one that is damaged or of
    another format."""
    try:
        values: dict[str, Any] = json.loads((folder / LISTING).read_bytes())
        intact = values.pop("xxh3_128") == _digest(values)
        is_readable = values["format"] == _FORMAT and isinstance(values["files"], dict)
    except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return None
    return values if intact and is_readable else None


def _digest(values: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(values).encode()).hexdigest()
