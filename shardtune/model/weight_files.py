"""The weights of a model in its safetensors files: which files there are, and what is in them.

Only headers are read here. Nothing imports torch, so the agents of a launch may use it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from shardtune.errors import UserError, first_line

INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def files_of_weights(folder: Path) -> list[str]:
    """Return the names of a model's files of weights. Raises UserError."""
    index = folder / INDEX
    if not index.is_file():
        return [_SINGLE]
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{index}: not a readable index of weights ({describe(error)}) - fetch the model again"
        ) from error


def weight_problems(folder: Path) -> list[str]:
    """Return which of a model's files of weights are missing or damaged. Raises UserError."""
    problems = []
    for file in (folder / name for name in files_of_weights(folder)):
        try:
            with safe_open(file, framework="np"):  # compares the file's size with its header
                pass
        except FileNotFoundError:
            problems.append(
                f"{file}: this file of weights is missing - fetch the model again, convert it to "
                "safetensors, or start from model.init=random"
            )
        except (OSError, SafetensorError) as error:
            problems.append(
                f"{file}: truncated or damaged ({describe(error)}) - fetch the model again"
            )
    return problems


def list_tensors(folder: Path) -> dict[str, list[Any]]:
    """Return dtype (as safetensors names it), shape and file of each tensor of a model, by name.

    Only the headers are read.
    """
    tensors: dict[str, list[Any]] = {}
    for file_name in files_of_weights(folder):
        with safe_open(folder / file_name, framework="np") as file:
            for name in sorted(file.keys()):
                tensor = file.get_slice(name)
                tensors[name] = [tensor.get_dtype(), tensor.get_shape(), file_name]
    return tensors


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
