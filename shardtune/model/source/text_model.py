"""Build the part of an architecture that is trained on text.

A model that also sees or hears is built as the class for all of its files, so that its tensors have
the names of the files. Its towers for images and sound are left out, since no text reaches them;
an export copies their tensors from the source.
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from shardtune.errors import UserError, first_line


def describe_type(folder: Path, model_config: PreTrainedConfig) -> str | None:
    """Return a line on a type that is read as another one, or None."""
    stored = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    if stored in (None, model_config.model_type):
        return None
    return f"Architecture: {stored}, read as {model_config.model_type}"


def build_text_model(model_config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    """Build the architecture without its towers; otherwise as `build_with_towers`."""
    model = build_with_towers(model_config, **options)
    drop_towers(model)
    return model


def build_with_towers(model_config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    """Build the architecture on the current device. This changes `model_config`.

    Raises:
        UserError: transformers has no class that predicts text with this architecture.
    """
    model: PreTrainedModel = class_of(model_config).from_config(model_config, **options)
    return model


def class_of(model_config: PreTrainedConfig) -> type[Any]:
    """Return transformers' automatic class that opens all of such a model's files."""
    kind = type(model_config)
    causal: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(kind, None)
    # A text part alone has a configuration of its own, and another name for each tensor.
    is_whole = causal and (
        causal.config_class is kind or causal.__name__ in (model_config.architectures or ())
    )
    is_decoder = not model_config.is_encoder_decoder
    if not is_whole and is_decoder and kind in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        return AutoModelForMultimodalLM
    if causal:
        return AutoModelForCausalLM
    raise UserError(
        f"{model_config.model_type} has no text-only class: transformers "
        f"{transformers.__version__} has none that predicts the next token from text alone - "
        "name a model that has one"
    )


def require_text(model: PreTrainedModel) -> None:
    """Raise UserError if a model on meta that also sees or hears cannot run on tokens alone."""
    if type(model.config) not in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        return
    try:
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 8, dtype=torch.int64, device="meta"))
    # AttributeError: the class looks for a vision or audio tower.
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{model.config.model_type} has no text-only class: {type(model).__name__}, given "
            f"tokens alone, ends with: {first_line(error)} - name a model that has one"
        ) from error
    except Exception:  # tensors on meta have no contents to look at
        return


def drop_towers(model: PreTrainedModel) -> list[str]:
    """Remove the inner models that see or hear; return their names, each with a dot at its end."""
    # The layers between towers and text stay: some decoders look them up for any token.
    if model.config.get_text_config() is model.config:
        return []
    decoder: nn.Module = model.get_decoder()
    text_modules = set(decoder.modules())
    towers: list[str] = []
    for name, module in list(model.named_modules()):
        is_other = isinstance(module, PreTrainedModel) and module not in text_modules
        if not is_other or decoder in set(module.modules()) or name.startswith(tuple(towers)):
            continue
        towers.append(f"{name}.")
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, None)
    return towers
