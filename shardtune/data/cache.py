"""The cache of tokenized data: a directory for each content, published whole.

An entry is a directory of files and a `meta.json`, which holds their sizes. It is built under a
hidden name beside its place and published by one rename. So it is either whole or absent, even if
several processes build it at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from shardtune.config import DataConfig
from shardtune.data.chat_encoder import ChatEncoder
from shardtune.data.sources import Source

_ABANDONED_AFTER_S = 24 * 3600.0
# The modules that decide the content of an entry.
_MODULES = (
    "chat_encoder",
    "chat_template",
    "dataset",
    "messages",
    "overflow",
    "records",
    "sources",
    "tokenize",
)


def cache_root() -> Path:
    """Return `$SHARDTUNE_CACHE/data`, by default `~/.cache/shardtune/data`."""
    return Path(os.environ.get("SHARDTUNE_CACHE") or "~/.cache/shardtune").expanduser() / "data"


def cache_key(sources: Mapping[str, Source], data: DataConfig, encoder: ChatEncoder) -> str:
    """Return a digest of everything that an entry depends on, 32 hexadecimal digits.

    Raises:
        UserError: a data file cannot be read.
    """
    tokenizer = encoder.tokenizer
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    backend.update(truncation=None, padding=None)  # calls set these two; ours use neither
    parts = {
        "sources": {name: source.digest() for name, source in sources.items()},
        "data": [
            data.loss_on,
            data.max_length,
            data.overflow,
            0.0 if data.eval else data.eval_fraction,
        ],
        "tokenizer": [
            backend,
            tokenizer.special_tokens_map,
            tokenizer.chat_template,
            encoder.stop_token_ids,
        ],
        "date": str(encoder.template.date) if encoder.template.uses_date else "",
        "code": [Path(__file__).with_name(f"{name}.py").read_text("utf-8") for name in _MODULES],
        "versions": [
            importlib.metadata.version(name) for name in ("transformers", "tokenizers", "jinja2")
        ],
    }
    return xxhash.xxh3_128_hexdigest(json.dumps(parts, sort_keys=True, default=str).encode())


def read_meta(entry: Path) -> dict[str, Any] | None:
    """Return the contents of `meta.json`; None unless every file has the size it was built with."""
    try:
        meta: dict[str, Any] = json.loads((entry / "meta.json").read_text(encoding="utf-8"))
        is_intact = all((entry / n).stat().st_size == size for n, size in meta["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return meta if is_intact else None


def build_entry(entry: Path, build: Callable[[Path], dict[str, Any]]) -> None:
    """Publish the directory that `build` fills, with what it returns in `meta.json`.

    Raises:
        OSError: the cache cannot be written.
    """
    entry.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(entry.parent)
    folder = entry.with_name(f".{entry.name}-{uuid.uuid4().hex}")
    folder.mkdir()
    try:
        meta = build(folder)
        files = {file.name: file.stat().st_size for file in folder.iterdir()}
        (folder / "meta.json").write_text(json.dumps(meta | {"files": files}, indent=1), "utf-8")
        _publish(folder, entry)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _publish(folder: Path, entry: Path) -> None:
    """Rename `folder` to `entry`, unless another process has published an intact one meanwhile."""
    for file in folder.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    with (entry.parent / "lock").open("a") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)  # an intact entry must stay: it may be in use already
        if read_meta(entry) is None:
            if entry.exists():
                shutil.rmtree(entry)
            folder.rename(entry)


def _remove_abandoned(root: Path) -> None:
    """Remove the remains of interrupted builds: directories that nobody has written to for long."""
    for folder in root.glob(".*"):
        with contextlib.suppress(FileNotFoundError):  # another process removes or publishes it
            written = max(path.stat().st_mtime for path in [folder, *folder.iterdir()])
            if time.time() - written > _ABANDONED_AFTER_S:
                shutil.rmtree(folder)
