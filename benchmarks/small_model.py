"""A small model with the tokenizer of a real one."""

from __future__ import annotations

import shutil
from pathlib import Path

from transformers import AutoConfig

from distTest.workloads.shapes import shape_of

_SIZES = shape_of(256, 768, 6, 4, {"num_key_value_heads": 4, "head_dim": 64})


def small_model(model: Path, folder: Path) -> Path:
    """Write the configuration of a small model and the tokenizer; return their folder."""
    AutoConfig.from_pretrained(model, **_SIZES).save_pretrained(folder)
    copy_tokenizer(model, folder)
    return folder


def copy_tokenizer(model: Path, folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(model / name, folder / name)
