"""Models and datasets by name: the hub, its cache where it cannot be reached, their libraries."""

import functools
import sys
from types import ModuleType

from huggingface_hub import constants
from huggingface_hub.utils import are_progress_bars_disabled, get_session
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from shardtune.errors import UserError, first_line

_TIMEOUT_S = 5
# Names that models have for a type of transformers. Any other is refused: its code may differ.
_SAME_AS = {"kimi_k2": "deepseek_v3"}


@functools.cache
def hub_problem() -> str:
    """Return why the hub cannot be reached, or ""; its clients then read the cache alone."""
    # They would retry for half a minute for each file, even one in the cache.
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=_TIMEOUT_S)
    except Exception as error:  # the HTTP client's and any proxy's
        constants.HF_HUB_OFFLINE = True
        if "datasets" in sys.modules:  # which reads the constant when it is imported
            datasets_library().config.HF_HUB_OFFLINE = True
        return first_line(error)
    return ""


def datasets_library() -> ModuleType:
    """Return `datasets`, with progress bars where the hub's own are shown, or raise UserError."""
    # Its import takes a third of a second, for which runs of JSON need not wait.
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise UserError(
            f"{sys.executable} has no datasets, which reads parquet, save_to_disk and the hub - "
            "pip install datasets, or name files of JSON lines or CSV"
        ) from error

    if are_progress_bars_disabled():
        datasets.disable_progress_bars()
    return datasets


def read_config_json(path: str) -> PreTrainedConfig:
    """Read a config.json; ValueError where transformers has no such type by any name."""
    try:
        return AutoConfig.from_pretrained(path)
    except ValueError:
        given, _ = PreTrainedConfig.get_config_dict(path)
        if not (kind := _SAME_AS.get(given.get("model_type", ""))):
            raise
        return CONFIG_MAPPING[kind].from_dict(given | {"model_type": kind}, name_or_path=path)
