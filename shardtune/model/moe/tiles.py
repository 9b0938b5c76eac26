"""Run experts and MLPs on a part of a row's tokens at a time, so that long rows fit.

The activations of a tile are dropped after it and computed again in its backward. So these modules
run twice, and hold the activations of one tile at a time. All ranks run the same number of tiles,
even with few tokens, since spread experts exchange tokens in each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from shardtune.model.parts import is_stack, stacked_experts


def tile_layers(model: PreTrainedModel, layers: list[nn.Module], tiles: int) -> None:
    """Let the experts and dense MLPs of all layers run on their tokens in `tiles` parts."""
    module: Any
    for _, module, _ in stacked_experts(model):
        module.tiles = tiles
        module.forward = _tiled(module.forward, tiles, dim=0)
    for layer in layers:
        for module in filter(_is_mlp, layer.modules()):
            module.forward = _tiled(module.forward, tiles, dim=-2)


def _is_mlp(module: nn.Module) -> bool:
    """Whether this is transformers' dense MLP, which maps each token by itself."""
    is_named_so = any(kind.__name__.endswith("MLP") for kind in type(module).__mro__)
    return is_named_so and not any(map(is_stack, module.parameters()))  # GPT-OSS' MLP has stacks


def _tiled(forward: Callable[..., torch.Tensor], tiles: int, dim: int) -> Callable[..., Any]:
    """Return a forward on `tiles` parts of its tensors, cut at dimension `dim`."""

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        parts = zip(*(tensor.tensor_split(tiles, dim) for tensor in tensors), strict=True)
        if not torch.is_grad_enabled():
            return torch.cat([forward(*part) for part in parts], dim)
        outputs = [checkpoint(forward, *part, use_reentrant=False) for part in parts]
        return torch.cat(outputs, dim)

    return torch.compiler.disable(run)
