"""The files behind `model.path`: its configuration, and weights that are present and whole.

They are checked before any weight is read. Weights are safetensors files, of which only the headers
are read here.
"""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

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
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def read_model_config(model: ModelConfig, max_length: int) -> PreTrainedConfig:
    """Read the model's configuration and check it for rows of `max_length` tokens.

    Raises:
        UserError: there is no such model, its type is unknown, no model can be built from its
            configuration, rows are longer than its positions, or a directory's weights are missing
            or truncated.
    """
    name, is_directory = f"model.path={model.path}", Path(model.path).is_dir()
    if not is_directory and not _HUB_ID.fullmatch(model.path):
        raise UserError(f"{name}: no such directory - correct the path, or name a hub id")
    unreachable = "" if is_directory else hub_problem()
    try:
        config = AutoConfig.from_pretrained(model.path)
    except Exception as error:  # each model class reads its own fields
        if unreachable:
            raise UserError(_not_in_cache(model.path, unreachable)) from error
        raise UserError(
            f"{name}: no model configuration that transformers can read ({_describe(error)}) - "
            "name a hub id or a directory with a config.json"
        ) from error
    problems = []
    if type(config) not in AutoModelForCausalLM._model_mapping:
        problems.append(
            f"{name}: transformers knows no causal language model of type '{config.model_type}' - "
            "use one that AutoModelForCausalLM opens"
        )
    elif getattr(config, "quantization_config", None) is not None:
        problems.append(f"{name}: its weights are quantised - use the unquantised model")
    else:
        problems += _building_problems(model.path, config)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and max_length > positions:
        problems.append(
            f"data.max_length={max_length} is beyond the {positions} positions of {model.path} - "
            f"use data.max_length={positions} or less"
        )
    if model.init == "pretrained" and is_directory:
        problems += _weight_problems(Path(model.path))
    if problems:
        raise UserError(*problems)
    if config.dtype is None and model.init == "pretrained":
        config.dtype = _stored_dtype(Path(model.path))
    return config


def fetch_weights(model: ModelConfig) -> str | None:
    """Fetch a hub model's weights to this node, and return their commit; None for a directory.

    Raises:
        UserError: they cannot be fetched, or are missing or truncated.
    """
    if Path(model.path).is_dir():
        return None
    unreachable = hub_problem()
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
        if unreachable:
            raise UserError(_not_in_cache(model.path, unreachable)) from error
        raise UserError(
            f"model.path={model.path}: its files cannot be fetched ({_describe(error)}) - connect "
            "to the hub, or copy them into this node's cache"
        ) from error
    if problems := _weight_problems(folder):
        raise UserError(*problems)
    return commit


def _not_in_cache(path: str, unreachable: str) -> str:
    return (
        f"model.path={path}: neither a directory here nor in the hub's cache, and the hub cannot "
        f"be reached ({unreachable}) - name a directory, copy the model into "
        f"{constants.HF_HUB_CACHE}, or connect to the hub"
    )


def _building_problems(path: str, config: PreTrainedConfig) -> list[str]:
    """Return why no model can be built from the configuration, by building it without storage."""
    try:
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(copy.deepcopy(config))  # building changes it
    except Exception as error:  # a wrong value fails in whatever code it reaches
        return [
            f"model.path={path}: no model can be built from its configuration "
            f"({_describe(error)}) - correct its config.json"
        ]
    return []


def _stored_dtype(folder: Path) -> torch.dtype | None:
    """Return the dtype of a directory's first tensor by name, for a config.json without one."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            names = sorted(opened.keys())
            if not names:
                return None
            return DTYPES_IN_SAFETENSORS.get(opened.get_slice(names[0]).get_dtype())
    return None


def _weight_problems(folder: Path) -> list[str]:
    """Return what is missing or damaged among a model's weight files."""
    if (folder / _INDEX).is_file():
        try:
            shards = _shards(folder / _INDEX)
        except UserError as refusal:
            return refusal.problems
    elif (folder / _SINGLE).is_file():
        shards = {_SINGLE: set()}
    else:
        return [
            f"{folder}: no model.safetensors and no model.safetensors.index.json, so no weights - "
            "fetch them, convert the model to safetensors, or start from model.init=random"
        ]
    return [
        problem
        for shard in sorted(shards)
        for problem in _shard_problems(folder / shard, shards[shard])
    ]


def _shards(index: Path) -> dict[str, set[str]]:
    """Return the tensors' names in each file of an index. Raises UserError."""
    shards: dict[str, set[str]] = {}
    try:
        for name, shard in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items():
            shards.setdefault(shard, set()).add(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{index}: not a readable index of weights ({_describe(error)}) - fetch the model again"
        ) from error
    return shards


def _shard_problems(file: Path, expected: set[str]) -> list[str]:
    remedy = "fetch the model again"
    if not file.is_file():
        return [f"{file}: this shard of the model is missing - {remedy}"]
    try:
        # This compares the file's size with its header.
        with safe_open(file, framework="pt") as opened:
            absent = sorted(expected - set(opened.keys()))
    except (OSError, SafetensorError) as error:
        return [
            f"{file}: truncated or damaged, its {file.stat().st_size} bytes do not match its "
            f"header ({_describe(error)}) - {remedy}"
        ]
    if not absent:
        return []
    return [
        f"{file}: tensor {absent[0]} ({len(absent)} in all) is in the index and not in the file - "
        f"{remedy}"
    ]


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
