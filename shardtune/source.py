"""What `model.path` holds: its configuration and its weights' files, checked before a weight is read."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from .config import ModelConfig
from .errors import Refused


def read_model_config(model: ModelConfig, max_length: int) -> PreTrainedConfig:
    """The model's configuration, with everything checked that can be checked before a weight is read.

    Raises:
        Refused: no such model, an unknown type, rows longer than its positions, weights missing or truncated.
    """
    try:
        config = AutoConfig.from_pretrained(model.path)
    except (OSError, ValueError, KeyError) as error:
        raise Refused(f"model.path={model.path}: no model configuration that transformers can read "
                      f"({_first_line(error)}) - name a hub id or a directory with a config.json") from error
    problems = []
    if type(config) not in AutoModelForCausalLM._model_mapping.keys():
        problems.append(f"model.path={model.path}: model type '{config.model_type}' is no causal language model that "
                        "transformers knows - use one that AutoModelForCausalLM opens")
    if getattr(config, "quantization_config", None) is not None:
        problems.append(f"model.path={model.path}: its weights are quantised - use the unquantised model")
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and max_length > positions:
        problems.append(f"data.max_length={max_length} is beyond the {positions} positions of {model.path} - "
                        f"use data.max_length={positions} or less")
    if model.init == "pretrained":
        problems += _weight_problems(model.path)
    if problems:
        raise Refused(*problems)
    return config


def _weight_problems(path: str) -> list[str]:
    """What is wrong with the safetensors files of a model, read from their headers alone."""
    folder = Path(path)
    if not folder.is_dir():
        return []  # a hub id: the download checks sizes
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            return [f"{index}: not a readable index of weights ({_first_line(error)}) - fetch the model again"]
        shards: dict[str, set[str]] = {}
        for name, shard in weight_map.items():
            shards.setdefault(shard, set()).add(name)
    elif single.is_file():
        shards = {single.name: set()}
    else:
        return [f"{path}: no model.safetensors and no model.safetensors.index.json, so no weights - fetch them, "
                "convert the model to safetensors, or start from model.init=random"]
    return [problem for shard in sorted(shards) for problem in _shard_problems(folder / shard, shards[shard])]


def _shard_problems(file: Path, expected: set[str]) -> list[str]:
    remedy = "fetch the model again"
    if not file.is_file():
        return [f"{file}: this shard of the model is missing - {remedy}"]
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (header_bytes,) = struct.unpack("<Q", stream.read(8))
            if header_bytes > size - 8:
                return [f"{file}: truncated inside its header ({size} bytes) - {remedy}"]
            header = json.loads(stream.read(header_bytes))
    except (OSError, ValueError, struct.error) as error:
        return [f"{file}: not a readable safetensors file ({_first_line(error)}) - {remedy}"]
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    end = 8 + header_bytes + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    if end != size:
        return [f"{file}: {size} bytes where its header promises {end} - {remedy}"]
    absent = sorted(expected - tensors.keys())
    return [f"{file}: tensor {absent[0]} ({len(absent)} in all) is in the index and not in the file - {remedy}"] \
        if absent else []


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
