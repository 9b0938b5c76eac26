"""Names of data on this machine: files of records, what `save_to_disk` wrote. Nothing heavy."""

import functools
from pathlib import Path

KINDS = (".json", ".jsonl", ".csv", ".parquet")
_OTHER_NAMES = {".ndjson": ".jsonl"}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}


@functools.cache
def kind_of(name: str) -> str:
    """Return which of KINDS the file with this name is, compressed or not; "" if none."""
    path = Path(name)
    is_compressed = path.suffix in COMPRESSIONS
    suffix = path.with_suffix("").suffix if is_compressed else path.suffix
    kind = _OTHER_NAMES.get(suffix, suffix)
    return kind if kind in KINDS and not (is_compressed and kind == ".parquet") else ""


def split_path(spec: str) -> tuple[Path, str]:
    """Return the path that a value names, and its split where it is `DIRECTORY:SPLIT`."""
    folder, colon, split = spec.rpartition(":")
    is_split = colon and not Path(spec).exists() and Path(folder).is_dir()
    return (Path(folder), split) if is_split else (Path(spec), "")
