"""A bound of a rank's memory from the shapes of its parameters alone, without a step."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from shardtune.config import Config
from shardtune.distributed.world import World
from shardtune.model.experts import gathered_numel
from shardtune.model.traits import decoder_layers, is_stack, most_of_layers, top_k
from shardtune.training.reshard import kept_bytes
from shardtune.training.states import StateBytes

# Generous, because a bound that is too low would let a run begin that cannot end. Tests hold it
# against simulated steps.
_COPIES_OF_GATHERED = 2  # FSDP's buffer, and the parameters that are copied out of it
_COPIES_OF_ACTIVATIONS = 4  # what a product reads and writes, with norms, and gradients of both
_WIDEST_BYTES = 4  # float32


def bound_bytes(model: PreTrainedModel, config: Config, states: StateBytes, world: World) -> int:
    """Return an upper bound of a rank's memory in bytes, the device's own left out.

    `model` comes from `build_on_meta`. All parameters and gradients count as unsharded at once,
    each parameter's product as kept for the backward, and attention as under a mask.
    """
    tokens = world.layout.tokens_per_rank
    head: Any = model.get_output_embeddings()
    logits = head.weight.shape[0] if getattr(head, "weight", None) is not None else 0
    # A layer that is computed again keeps its input alone, but one layer is whole in the backward.
    layers = [_products(layer, top_k(model)) for layer in decoder_layers(model)]
    scores = most_of_layers(model, "num_attention_heads") * world.layout.max_length
    kept = [width + scores for width in layers]
    if world.layout.keeps_inputs_alone:
        kept = [max(kept, default=0), len(kept) * most_of_layers(model, "hidden_size")]
    activations = tokens * (sum(kept) + logits) * _WIDEST_BYTES * _COPIES_OF_ACTIVATIONS
    largest = max(gathered_numel(p) for p in model.parameters()) * _WIDEST_BYTES
    staging = 0
    if world.device.type == "cpu" and config.checkpoint.mode == "async":
        staging = states.parameters + states.optimizer
    parameters, *others = kept_bytes(model, world.layout)
    gathered = _COPIES_OF_GATHERED * (sum(parameters) + sum(others))
    # A parameter is loaded and updated in float32.
    return states.total + gathered + activations + 2 * largest + staging


def _products(layer: nn.Module, met: int) -> int:
    """Return how many elements the products of a layer read and write for each token."""
    elements = 0
    for parameter in layer.parameters():
        width, height = parameter.shape[-1], parameter.shape[-2] if parameter.dim() > 1 else 0
        elements += (width + height) * (met if is_stack(parameter) else 1)
    return elements
