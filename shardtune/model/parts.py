"""Tell architectures and their parts by the names and shapes that transformers has.

This file alone decides which architectures are refused by their names, which parameters are stacks
of experts or factors of adapters, and which modules are decoder layers, of which types.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from packaging.version import Version

if TYPE_CHECKING:  # a preflight asks for versions alone: torch's import takes seconds
    import torch
    from torch import nn
    from transformers import PreTrainedModel

FACTORS = ("lora_A", "lora_B")
ROWS = "token_rows"  # of new tokens, beside a frozen embedding or head
# Architectures that would need code of their own, and architectures to use instead.
_INSTEAD = dict.fromkeys(("rwkv", "xlstm"), "mamba2 or qwen3_next")
_INSTEAD |= dict.fromkeys(("gpt_neo", "mpt", "xlnet"), "llama or gpt_neox")
_INSTEAD |= dict.fromkeys(("zamba", "zamba2"), "bamba or falcon_h1")
_INSTEAD |= dict.fromkeys(("dbrx", "doge"), "qwen3_moe or mixtral")
_INSTEAD |= dict.fromkeys(
    ("inkling2", "inkling2_text", "inkling_mm_model", "inkling_text"), "gpt_oss or glm4_moe"
)


def is_factor(name: str) -> bool:
    """Whether a parameter is a factor of an adapter, by its name."""
    return name.endswith(FACTORS)


def is_stack(parameter: torch.Tensor) -> bool:
    """Whether a parameter has a matrix for each expert, the experts first."""
    return parameter.dim() == 3


def stacked_experts(model: PreTrainedModel) -> Iterator[tuple[str, Any, int]]:
    """Yield name, module and number of experts of each stack that takes a router's choices."""
    for name, module in model.named_modules():
        stacks = [*filter(is_stack, module.parameters(recurse=False))]
        # The module itself, tokens, the router's choices and their weights.
        if stacks and len(inspect.signature(type(module).forward).parameters) == 4:
            yield name, module, stacks[0].shape[0]


def is_in_list(name: str) -> bool:
    """Whether a name is that of a module or a parameter within a list of experts."""
    return re.search(r"(^|\.)experts\.\d+\.", name) is not None


def has_experts(model: nn.Module) -> bool:
    return any("expert" in name for name, _ in model.named_parameters())


def met_numel(parameter: torch.Tensor, top_k: int) -> int:
    """Return how many elements of a parameter a token is multiplied by."""
    numel = parameter.numel()
    return numel * top_k // parameter.shape[0] if is_stack(parameter) else numel


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder layers, whose classes FSDP2 may have replaced by subclasses."""
    # Mamba lists its mixers in `_no_split_modules`, too. They are within layers: leave them out.
    names = set(model._no_split_modules or ())
    named = [m for m in model.modules() if names & {kind.__name__ for kind in type(m).__mro__}]
    inner = {m for layer in named for m in [*layer.modules()][1:]}
    return [layer for layer in named if layer not in inner]


def layer_types(settings: Any) -> list[str]:
    """Return the type of each layer, or an empty list where an architecture does not name them."""
    return list(getattr(settings, "layer_types", None) or ())


def has_new_transformers() -> bool:
    """Return whether the installed transformers has plans of experts and of cut matrices."""
    return Version(importlib.metadata.version("transformers")).release >= (5, 23)


def not_trained(kind: str) -> str:
    """Return why an architecture is refused by its name alone, or an empty text."""
    instead = _INSTEAD.get(kind)
    return f"{kind} is not trained here - use a model of type {instead}" if instead else ""
