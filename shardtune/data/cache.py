"""The cache of tokenized data: a directory for each content, published whole by one rename."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import xxhash

from shardtune.config import DataConfig
from shardtune.data.chat_encoder import ChatEncoder
from shardtune.data.sources import Source


def cache_root() -> Path:
    """Return `$SHARDTUNE_CACHE/data`, by default `~/.cache/shardtune/data`."""
    return Path(os.environ.get("SHARDTUNE_CACHE") or "~/.cache/shardtune").expanduser() / "data"


def cache_key(sets: Mapping[str, Sequence[Source]], data: DataConfig, encoder: ChatEncoder) -> str:
    """Return a digest of everything that an entry depends on, 32 hexadecimal digits.

    Raises:
        UserError: a data file cannot be read.
    """
    tokenizer = encoder.tokenizer
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    backend.update(truncation=None, padding=None)  # calls set these two; ours use neither
    code = sorted(Path(__file__).parent.glob("*.py"))
    parts = [
        {name: [source.digest() for source in sources] for name, sources in sets.items()},
        [data.columns, data.template_options],
        [data.loss_on, data.max_length, data.overflow, 0.0 if data.eval else data.eval_fraction],
        [backend, tokenizer.special_tokens_map, tokenizer.chat_template, encoder.stop_token_ids],
        str(encoder.template.date) if encoder.template.uses_date else "",
        [file.read_text("utf-8") for file in code],
        [importlib.metadata.version(name) for name in ("transformers", "tokenizers", "jinja2")],
    ]
    return xxhash.xxh3_128_hexdigest(json.dumps(parts, sort_keys=True, default=str).encode())


@contextlib.contextmanager
def new_entry(entry: Path) -> Iterator[Path]:
    """Yield a hidden directory to fill, which becomes `entry` where the block ends without error.

    Several processes may build the same entry; the first one's stays, as it may be in use.

    Raises:
        OSError: the cache cannot be written.
    """
    folder = entry.with_name(f".{entry.name}-{uuid.uuid4().hex}")
    try:
        folder.mkdir(parents=True)
        yield folder
        for file in folder.iterdir():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        try:
            folder.rename(entry)
        except OSError:
            if not entry.exists():
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
