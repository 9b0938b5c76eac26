"""Duplicates: records that the data has twice, and evaluation records that are also trained.

Records count as equal if their rows are equal: the comparison sees what the model sees.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

Row = tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]
_LEAK = "the perplexity tells nothing about new text"
_REMEDY = "docs/data.md has the command that drops them"


class RecordHash(NamedTuple):
    """The hashes of a record's tokens, and of its tokens and trained flags; its index in its set.

    In one of 300,000 datasets of 10 million records two hashes are equal by chance.
    """

    tokens: int
    rows: int
    record: int


def hash_of(record: int, rows: Iterable[Row]) -> RecordHash:
    """Return the hashes of the record with index `record`, which has these rows."""
    all_tokens, all_trained = xxhash.xxh3_64(), xxhash.xxh3_64()
    for tokens, trained in rows:
        all_tokens.update(len(tokens).to_bytes(8, "little") + tokens.tobytes())
        all_trained.update(trained.tobytes())
    flags = all_trained.digest()
    return RecordHash(
        all_tokens.intdigest(), xxhash.xxh3_64_intdigest(all_tokens.digest() + flags), record
    )


class RecordHashes:
    """The hashes of all records of a set that have a row."""

    def __init__(self) -> None:
        self._parts = [np.empty((0, 3), np.uint64)]

    def add(self, hashes: Sequence[RecordHash]) -> None:
        self._parts.append(np.array(hashes, np.uint64).reshape(-1, 3))

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def repeated(self) -> list[int]:
        """Return the records that equal an earlier one of the set, in tokens and flags."""
        _, rows, records = np.concatenate(self._parts).T
        _, firsts = np.unique(rows, return_index=True)
        return np.delete(records, firsts).tolist()

    def shared_with(self, other: RecordHashes) -> list[int]:
        """Return the records whose tokens equal those of a record in `other`, trained or not."""
        tokens, _, records = np.concatenate(self._parts).T
        of_other, *_ = np.concatenate(other._parts).T
        return records[np.isin(tokens, of_other)].tolist()


def describe_duplicates(sets: Mapping[str, RecordHashes]) -> dict[str, int | None]:
    """Return a line for each kind of duplicate, with the first of its records in data.train."""
    lines: dict[str, int | None] = {}
    for name, hashes in sets.items():
        if repeated := hashes.repeated():
            line = f"data.{name}: WARNING: exact repetitions of an earlier record"
            example = repeated[0] if name == "train" else None
            lines[f"{line}: {len(repeated)} of {len(hashes)} - {_REMEDY}"] = example
        if name != "train" and (shared := hashes.shared_with(sets["train"])):
            line = f"data.{name}: WARNING: records that data.train has too"
            example = sets["train"].shared_with(hashes)[0]
            lines[f"{line}: {len(shared)} of {len(hashes)} - {_LEAK}, and {_REMEDY}"] = example
    return lines
