"""What `model.path` holds: its configuration and its weights' files, checked before a weight is read."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import cached_file

from shardtune.config import ModelConfig
from shardtune.distributed.tensors import DTYPES_IN_SAFETENSORS
from shardtune.errors import UserError

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def read_model_config(model: ModelConfig, max_length: int) -> PreTrainedConfig:
    """The model's configuration, with everything checked that can be checked before a weight is read.

    Raises:
        UserError: no such model, an unknown type, a configuration of which no model can be built, rows longer than its
            positions, weights missing or truncated.
    """
    if not Path(model.path).is_dir() and not _HUB_ID.fullmatch(model.path):
        raise UserError(
            f"model.path={model.path}: no such directory - correct the path, or name a hub id"
        )
    try:
        config = AutoConfig.from_pretrained(model.path)
    except Exception as error:  # each model class reads its own fields
        raise UserError(
            f"model.path={model.path}: no model configuration that transformers can read "
            f"({_first_line(error)}) - name a hub id or a directory with a config.json"
        ) from error
    problems = []
    if type(config) not in AutoModelForCausalLM._model_mapping:
        problems.append(
            f"model.path={model.path}: model type '{config.model_type}' is no causal language model that "
            "transformers knows - use one that AutoModelForCausalLM opens"
        )
    elif getattr(config, "quantization_config", None) is not None:
        problems.append(
            f"model.path={model.path}: its weights are quantised - use the unquantised model"
        )
    else:
        problems += _building_problems(model.path, config)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and max_length > positions:
        problems.append(
            f"data.max_length={max_length} is beyond the {positions} positions of {model.path} - "
            f"use data.max_length={positions} or less"
        )
    if model.init == "pretrained" and Path(model.path).is_dir():
        problems += _weight_problems(Path(model.path))
    if problems:
        raise UserError(*problems)
    if config.dtype is None and model.init == "pretrained":
        config.dtype = _stored_dtype(Path(model.path))
    return config


def fetch_weights(model: ModelConfig) -> str | None:
    """The commit of the hub's model that this node reads, whose weights are there now; None for a directory.

    Raises:
        UserError: they cannot be fetched, or are missing or truncated.
    """
    if Path(model.path).is_dir():
        return None
    try:
        file = cached_file(model.path, "config.json")
        assert file is not None
        commit = Path(file).parent.name
        if model.init == "random":
            return commit
        folder = Path(
            snapshot_download(model.path, revision=commit, allow_patterns=[_INDEX, _SINGLE])
        )
        if (folder / _INDEX).is_file():
            snapshot_download(
                model.path, revision=commit, allow_patterns=sorted(_shards(folder / _INDEX))
            )
    except UserError:
        raise
    except Exception as error:  # the hub's client has many
        raise UserError(
            f"model.path={model.path}: its files cannot be fetched ({_first_line(error)}) - connect to the hub, or "
            "copy them into this node's cache"
        ) from error
    if problems := _weight_problems(folder):
        raise UserError(*problems)
    return commit


def _building_problems(path: str, config: PreTrainedConfig) -> list[str]:
    """What keeps the configuration from becoming a model: its architecture is built without storage."""
    try:
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(copy.deepcopy(config))  # which would be changed
    except Exception as error:  # a wrong value meets whatever code it reaches
        return [
            f"model.path={path}: no model can be built of its configuration ({_first_line(error)}) - "
            "correct its config.json"
        ]
    return []


def _stored_dtype(folder: Path) -> torch.dtype | None:
    """The dtype of a local model's weights where its configuration names none: that of the first, by name."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            names = sorted(opened.keys())
            return (
                DTYPES_IN_SAFETENSORS.get(opened.get_slice(names[0]).get_dtype()) if names else None
            )
    return None


def _weight_problems(folder: Path) -> list[str]:
    """What is wrong with the safetensors files of a model, read from their headers alone."""
    if (folder / _INDEX).is_file():
        try:
            shards = _shards(folder / _INDEX)
        except UserError as refused:
            return refused.problems
    elif (folder / _SINGLE).is_file():
        shards = {_SINGLE: set()}
    else:
        return [
            f"{folder}: no model.safetensors and no model.safetensors.index.json, so no weights - fetch them, "
            "convert the model to safetensors, or start from model.init=random"
        ]
    return [
        problem
        for shard in sorted(shards)
        for problem in _shard_problems(folder / shard, shards[shard])
    ]


def _shards(index: Path) -> dict[str, set[str]]:
    """The names of the tensors in each file. Raises UserError."""
    shards: dict[str, set[str]] = {}
    try:
        for name, shard in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items():
            shards.setdefault(shard, set()).add(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{index}: not a readable index of weights ({_first_line(error)}) - fetch the model again"
        ) from error
    return shards


def _shard_problems(file: Path, expected: set[str]) -> list[str]:
    remedy = "fetch the model again"
    if not file.is_file():
        return [f"{file}: this shard of the model is missing - {remedy}"]
    try:
        with safe_open(
            file, framework="pt"
        ) as opened:  # reads the header and compares the file's size with it
            absent = sorted(expected - set(opened.keys()))
    except (OSError, SafetensorError) as error:
        return [
            f"{file}: truncated or damaged, its {file.stat().st_size} bytes are not what its header says "
            f"({_first_line(error)}) - {remedy}"
        ]
    return (
        [
            f"{file}: tensor {absent[0]} ({len(absent)} in all) is in the index and not in the file - {remedy}"
        ]
        if absent
        else []
    )


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
