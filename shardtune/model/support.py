"""Architectures and settings that cannot be trained exactly, and why."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from shardtune.config import Config
from shardtune.distributed.world import World


def unsupported(model: PreTrainedModel, config: Config, world: World) -> Iterator[str]:
    """Yield the reasons not to train this architecture as configured.

    They are features that would make a record's loss depend on others, or ranks diverge.
    """
    kind = model.config.model_type
    if config.data.packing and not can_be_packed(type(model)):
        yield (
            f"{kind} keeps a state or takes no positions, so documents in one row would mix - "
            "use data.packing=false"
        )
    short = _short_rope_length(model.config)
    is_alone = not config.data.packing and config.train.micro_batch_size == 1
    if short is not None and config.data.max_length > short and not is_alone:
        yield (
            f"{kind} takes other rope factors for a whole forward once one of its records is "
            f"longer than {short} tokens - use data.max_length={short} or less, or "
            "data.packing=false with train.micro_batch_size=1"
        )
    text = model.config.get_text_config()
    tokens = config.data.max_length * config.train.micro_batch_size
    # Llama 4 counts places from the beginning of the row, whatever positions it is given.
    is_scaled = getattr(text, "attn_temperature_tuning", False)
    scaled_from = getattr(text, "floor_scale", None) if is_scaled else None
    if scaled_from is not None and not is_alone and tokens > scaled_from:
        yield (
            f"{kind} scales queries by their place in the row from {scaled_from:.0f} tokens on, so "
            "a record's loss would depend on those before it - lower data.max_length x "
            "train.micro_batch_size to that, or use data.packing=false with "
            "train.micro_batch_size=1"
        )
    if config.data.packing and (table := _causal_table(model)) and tokens > table:
        yield (
            f"{kind} has a causal mask of {table} x {table} positions, and the rows of a "
            f"micro-batch have {tokens} tokens in all - lower data.max_length x "
            f"train.micro_batch_size to {table}, or use data.packing=false"
        )
    if world.size > 1 and any(getattr(module, "layerdrop", 0) for module in model.modules()):
        yield (
            f"{kind} drops layers at random (layerdrop), so ranks would drop different layers, and "
            "all must gather each together - set the layerdrop of its config.json to 0"
        )


def _causal_table(model: PreTrainedModel) -> int | None:
    """Return the positions of the table from which layers take their causal mask, as in GPT-Neo."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    shapes = {
        tuple(buffer.shape[-2:]) for layer in decoder_layers(model) for buffer in layer.buffers()
    }
    return positions if (positions, positions) in shapes else None


def _short_rope_length(model_config: PreTrainedConfig) -> int | None:
    """Return the longest forward, in tokens, with longrope's short factors; None without longrope.

    Longrope: arXiv 2402.13753.

    Dynamic scaling begins beyond `max_position_embeddings`, where no row ends.
    """
    rope = getattr(model_config.get_text_config(), "rope_parameters", None) or {}
    ropes = [rope, *rope.values()]  # one for all layers, or one for each type of layer
    lengths = [
        each["original_max_position_embeddings"]
        for each in ropes
        if isinstance(each, dict) and each.get("rope_type") == "longrope"
    ]
    return min(lengths, default=None)


def can_be_packed(model_class: type[PreTrainedModel]) -> bool:
    """Return whether restarting positions can tell documents apart.

    `choose_attention` sees whether they do.
    """
    return (
        "position_ids" in inspect.signature(model_class.forward).parameters
        and not model_class._is_stateful
    )


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder layers, whose classes FSDP2 may have replaced by subclasses."""
    names = set(model._no_split_modules or ())
    return [
        module
        for module in model.modules()
        if names & {kind.__name__ for kind in type(module).__mro__}
    ]
