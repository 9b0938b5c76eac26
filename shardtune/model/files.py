"""The files behind `model.path`: its configuration, and weights that are present and whole.

They are checked before any weight is read. Weights are safetensors files, of which only the headers
are read here.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, snapshot_download
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import cached_file

from shardtune.config import ModelConfig
from shardtune.data.hub import hub_problem
from shardtune.distributed.tensors import DTYPES_IN_SAFETENSORS
from shardtune.errors import UserError, first_line

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
# Configuration, generation settings and tokenizer.
FILES_BESIDE_WEIGHTS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
)


def read_model_config(model: ModelConfig, max_length: int) -> PreTrainedConfig:
    """Read the model's configuration and check it for rows of `max_length` tokens.

    Raises:
        UserError: there is no such model, no model can be built from its configuration, rows are
            longer than its positions, or a directory's weights are missing or truncated.
    """
    path = model.path
    with _refusing(
        path,
        "no model configuration that transformers can read",
        "name a hub id or a directory with a config.json",
    ):
        config = AutoConfig.from_pretrained(path)
    if getattr(config, "quantization_config", None) is not None:
        raise UserError(f"model.path={path}: its weights are quantised - use the unquantised model")
    with (
        _refusing(path, "no model can be built from its configuration", "correct its config.json"),
        torch.device("meta"),
    ):
        AutoModelForCausalLM.from_config(copy.deepcopy(config))  # building changes it
    problems = []
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and max_length > positions:
        problems.append(
            f"data.max_length={max_length} is beyond the {positions} positions of {path} - "
            f"use data.max_length={positions} or less"
        )
    if model.init == "pretrained" and Path(path).is_dir():
        problems += _weight_problems(Path(path))
    if problems:
        raise UserError(*problems)
    if config.dtype is None and model.init == "pretrained":
        config.dtype = _stored_dtype(Path(path))
    return config


def fetch_weights(model: ModelConfig) -> str | None:
    """Fetch a hub model's weights to this node, and return their commit; None for a directory.

    Raises:
        UserError: they cannot be fetched, or are missing or truncated.
    """
    path = model.path
    if Path(path).is_dir():
        return None
    with _refusing(
        path,
        "its files cannot be fetched",
        "connect to the hub, or copy them into this node's cache",
    ):
        commit = Path(str(cached_file(path, "config.json"))).parent.name
        small = [*FILES_BESIDE_WEIGHTS, _INDEX]
        folder = Path(snapshot_download(path, revision=commit, allow_patterns=small))
        if model.init == "random":
            return commit
        snapshot_download(path, revision=commit, allow_patterns=_files_of_weights(folder))
    if problems := _weight_problems(folder):
        raise UserError(*problems)
    return commit


def model_folder(path: str) -> Path | None:
    """Return the directory of a model on this node: itself, or in the hub's cache."""
    if Path(path).is_dir():
        return Path(path)
    with contextlib.suppress(OSError):
        if file := cached_file(path, "config.json", local_files_only=True):
            return Path(file).parent
    return None


def list_tensors(folder: Path) -> dict[str, list[Any]]:
    """Return dtype (as safetensors names it), shape and file of each tensor of a model, by name.

    Only the headers are read.
    """
    tensors: dict[str, list[Any]] = {}
    for file_name in _files_of_weights(folder):
        with safe_open(folder / file_name, framework="pt") as file:
            for name in sorted(file.keys()):
                tensor = file.get_slice(name)
                tensors[name] = [tensor.get_dtype(), tensor.get_shape(), file_name]
    return tensors


@contextmanager
def _refusing(path: str, problem: str, remedy: str) -> Iterator[None]:
    """Turn what transformers and the hub's client raise, each in its own way, into a UserError."""
    unreachable = "" if Path(path).is_dir() else hub_problem()
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if unreachable and isinstance(error, OSError):
            raise UserError(
                f"model.path={path}: neither a directory here nor in the hub's cache, and the hub "
                f"cannot be reached ({unreachable}) - name a directory, copy the model into "
                f"{constants.HF_HUB_CACHE}, or connect to the hub"
            ) from error
        raise UserError(f"model.path={path}: {problem} ({_describe(error)}) - {remedy}") from error


def _stored_dtype(folder: Path) -> torch.dtype | None:
    """Return the dtype of a directory's first tensor by name, for a config.json without one."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in sorted(opened.keys()):
                return DTYPES_IN_SAFETENSORS.get(opened.get_slice(name).get_dtype())
    return None


def _files_of_weights(folder: Path) -> list[str]:
    """Return the names of a model's files of weights. Raises UserError."""
    index = folder / _INDEX
    if not index.is_file():
        return [_SINGLE]
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{index}: not a readable index of weights ({_describe(error)}) - fetch the model again"
        ) from error


def _weight_problems(folder: Path) -> list[str]:
    """Return which of a model's files of weights are missing or damaged. Raises UserError."""
    problems = []
    for file in (folder / name for name in _files_of_weights(folder)):
        try:
            with safe_open(file, framework="pt"):  # compares the file's size with its header
                pass
        except FileNotFoundError:
            problems.append(
                f"{file}: this file of weights is missing - fetch the model again, convert it to "
                "safetensors, or start from model.init=random"
            )
        except (OSError, SafetensorError) as error:
            problems.append(
                f"{file}: truncated or damaged ({_describe(error)}) - fetch the model again"
            )
    return problems


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
