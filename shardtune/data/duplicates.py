"""The leak into evaluation: evaluation records whose tokens are also trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

_REMEDY = "the perplexity tells nothing of new text; docs/data.md has the command that drops them"


# The hash of a record's tokens, and its index in its set. In one of 300,000 datasets of 10 million
# records two hashes are equal by chance.
RecordHash = tuple[int, int]


def hash_of(record: int, rows: Iterable[npt.NDArray[np.uint32]]) -> RecordHash:
    """Return the hash of the record with index `record`, whose rows have these tokens."""
    digest = xxhash.xxh3_64()
    for tokens in rows:
        digest.update(len(tokens).to_bytes(8, "little") + tokens.tobytes())
    return digest.intdigest(), record


class RecordHashes:
    """The hashes of all records of a set that have a row."""

    def __init__(self) -> None:
        self._parts = [np.empty((0, 2), np.uint64)]

    def add(self, hashes: Sequence[RecordHash]) -> None:
        self._parts.append(np.array(hashes, np.uint64).reshape(-1, 2))

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def shared_with(self, other: RecordHashes) -> list[int]:
        """Return the records whose tokens equal those of a record in `other`, trained or not."""
        tokens, records = np.concatenate(self._parts).T
        of_other, _ = np.concatenate(other._parts).T
        return records[np.isin(tokens, of_other)].tolist()


def describe_leaks(sets: Mapping[str, RecordHashes]) -> dict[str, int]:
    """Return a line for each set with records of data.train, and the first of these there."""
    lines = {}
    for name, hashes in sets.items():
        if name != "train" and (shared := hashes.shared_with(sets["train"])):
            line = f"data.{name}: WARNING: records that data.train has too"
            line += f": {len(shared)} of {len(hashes)} - {_REMEDY}"
            lines[line] = sets["train"].shared_with(hashes)[0]
    return lines
