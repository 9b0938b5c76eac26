"""Read the configuration behind `model.path`, and fetch a hub model's files, before any weight."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from huggingface_hub import constants, snapshot_download
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.utils import cached_file

from shardtune.config import ModelConfig
from shardtune.distributed.tensors import DTYPES_IN_SAFETENSORS
from shardtune.errors import UserError
from shardtune.hub import hub_problem, read_config_json
from shardtune.model.parts import not_trained
from shardtune.model.source.quantisation import MODELOPT
from shardtune.model.source.quantised import quantised_problems, take_quantization
from shardtune.model.source.text_model import build_text_model, require_text
from shardtune.model.source.weight_files import (
    ADAPTER_CONFIG,
    INDEX,
    SINGLE,
    describe,
    files_of_weights,
    list_stored,
    weight_problems,
)
from shardtune.new_tokens import PIECES, read_new_tokens

# Configuration, generation settings, tokenizer, and processors of images and sound.
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
    "tekken.json",
    "*processor_config.json",
    "chat_template*",
    "*.py",  # code that config.json may name: users of an export run it, this project does not
)


def read_model_config(model: ModelConfig) -> PreTrainedConfig:
    """Read the model's configuration, with the vocabulary and pieces of `model.new_tokens`.

    Raises:
        UserError: there is no such model, or no model can be built from its configuration.
    """
    path = model.path
    config = known_config(path)
    if model.new_tokens:
        with refusing(path, "no tokenizer that transformers can read", "add its tokenizer.json"):
            text_config = config.get_text_config()
            new_tokens = read_new_tokens(model)
            text_config.vocab_size = new_tokens.vocabulary(text_config.vocab_size)
            for each in (config, text_config):
                setattr(each, PIECES, {str(i): ids for i, ids in new_tokens.pieces.items()})
        if getattr(text_config, "hidden_size_per_layer_input", 0):
            raise UserError(
                f"model.new_tokens: {config.model_type} has rows of a token in each layer, too, "
                "and new ones are not made - leave model.new_tokens empty"
            )
    if problem := not_trained(config.model_type):
        raise UserError(problem)
    take_quantization(config, model_folder(path) or Path(), path)
    with (
        refusing(path, "no model can be built from its configuration", "correct its config.json"),
        torch.device("meta"),
    ):
        require_text(build_text_model(copy.deepcopy(config)))  # building changes it
    if config.dtype is None and model.init == "pretrained":
        config.dtype = _stored_dtype(Path(path))
    return config


def require_weights(model: ModelConfig) -> None:
    """Raise UserError if weights of a directory are missing or truncated."""
    folder = Path(model.path)
    is_read = model.init == "pretrained" and folder.is_dir()
    if is_read and (problems := _problems_of_weights(folder)):
        raise UserError(*problems)


def known_config(path: str) -> PreTrainedConfig:
    """Read the configuration of a model that transformers knows. Raises UserError."""
    with refusing(
        path,
        "no model configuration that transformers can read",
        "name a hub id or a directory with a config.json",
    ):
        config = _read_known_config(path)
        with contextlib.suppress(OSError):  # few models have it
            cached_file(path, MODELOPT)
    return config


def _read_known_config(path: str) -> PreTrainedConfig:
    try:
        return read_config_json(path)
    except ValueError as error:
        values, _ = PreTrainedConfig.get_config_dict(path)
        kind = values.get("model_type")
        if kind in CONFIG_MAPPING or (kind is None and "auto_map" not in values):
            raise
        what = f"transformers {transformers.__version__} does not know the architecture {kind}"
        if "auto_map" in values:
            what = "its model is code of its own, which is not run here"
        problem = f"model.path={path}: {what} - name a model that transformers knows"
        raise UserError(problem) from error


def fetch_weights(model: ModelConfig, require_index: Callable[[Path, str], None]) -> str | None:
    """Fetch a hub model's weights to this node, and return their commit; None for a directory.

    Raises:
        UserError: they cannot be fetched, or are missing or truncated.
    """
    path = model.path
    if Path(path).is_dir():
        return None
    with refusing(
        path,
        "its files cannot be fetched",
        "connect to the hub, or copy them into this node's cache",
    ):
        commit = Path(str(cached_file(path, "config.json"))).parent.name
        small = [*FILES_BESIDE_WEIGHTS, ADAPTER_CONFIG, INDEX, "README.md", "LICENSE*"]
        folder = Path(snapshot_download(path, revision=commit, allow_patterns=small))
        if model.init == "random":
            return commit
        snapshot_download(path, revision=commit, allow_patterns=[SINGLE])  # before an index
        require_index(folder, path)
        snapshot_download(path, revision=commit, allow_patterns=files_of_weights(folder))
    if problems := _problems_of_weights(folder):
        raise UserError(*problems)
    return commit


def _problems_of_weights(folder: Path) -> list[str]:
    return weight_problems(folder) or quantised_problems(folder)


def model_folder(path: str) -> Path | None:
    """Return the directory of a model on this node: itself, or in the hub's cache."""
    if Path(path).is_dir():
        return Path(path)
    with contextlib.suppress(OSError):
        if file := cached_file(path, "config.json", local_files_only=True):
            return Path(file).parent
    return None


@contextmanager
def refusing(path: str, problem: str, remedy: str) -> Iterator[None]:
    """Turn the various errors of transformers and of the hub's client into a UserError."""
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
        if isinstance(error, ImportError):
            remedy = "install what it names"
        raise UserError(f"model.path={path}: {problem} ({describe(error)}) - {remedy}") from error


def _stored_dtype(folder: Path) -> torch.dtype | None:
    """Return the dtype of a directory's first tensor by name, for a config.json without one."""
    for dtype, *_ in list_stored(folder).values() if folder.is_dir() else ():
        return DTYPES_IN_SAFETENSORS.get(dtype)
    return None
