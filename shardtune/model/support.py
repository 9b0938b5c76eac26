"""Refuse settings with which a model cannot be trained exactly; name routers that add noise."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PreTrainedConfig, PreTrainedModel

from shardtune.distributed.layout import Layout

# Attributes of routers with the width of their noise in training.
_JITTER = ("jitter_noise", "router_jitter_noise", "input_jitter_noise")


def unsupported(model: PreTrainedModel, layout: Layout) -> Iterator[str]:
    """Yield the features that would make a record's loss depend on others."""
    kind = model.config.model_type
    text = model.config.get_text_config()
    if layout.recomputes and not model.supports_gradient_checkpointing:
        yield f"{kind} cannot compute layers again - use model.activation_checkpointing=none"
    is_shared = layout.row_ranks > 1
    if not (layout.packing or is_shared) and layout.micro_batch_size == 1:
        return  # each record is alone in its forward, and whole
    alone = "data.packing=false with train.micro_batch_size=1"
    alone += f" and {layout.row_key}=1" * is_shared
    short = _short_rope_length(text)
    if short is not None and layout.max_length > short:
        yield (
            f"{kind} takes other rope factors for a whole forward once one of its records is "
            f"longer than {short} tokens - use data.max_length={short} or less, or {alone}"
        )
    tokens = layout.max_length * layout.micro_batch_size
    # Llama 4 counts places from the beginning of the row, not by the positions that it gets.
    is_scaled = getattr(text, "attn_temperature_tuning", False)
    scaled_from = getattr(text, "floor_scale", None) if is_scaled else None
    if scaled_from is not None and tokens > scaled_from:
        yield (
            f"{kind} scales queries by their place in the row from {scaled_from:.0f} tokens on, so "
            "a record's loss would depend on those before it - lower data.max_length x "
            f"train.micro_batch_size to that, or use {alone}"
        )


def router_remarks(model: PreTrainedModel) -> Iterator[str]:
    """Yield what a user may not expect of a model's routers in training."""
    if any(getattr(module, name, None) for module in model.modules() for name in _JITTER):
        yield (
            f"Routers: {model.config.model_type} chooses experts with noise in training, another "
            "on each rank, so losses depend on the number of ranks. Evaluation has none"
        )
    config = model.config.get_text_config()
    weight = getattr(config, "router_aux_loss_coef", None)
    if weight and getattr(config, "output_router_logits", False):
        yield (
            f"Routers: config.json asks for a balancing loss (router_aux_loss_coef={weight}), "
            "which training does not add: its loss is that of the tokens alone"
        )


def _short_rope_length(config: PreTrainedConfig) -> int | None:
    """Return the longest forward, in tokens, with longrope's short factors; None without longrope.

    Longrope: arXiv 2402.13753. Dynamic scaling begins beyond `max_position_embeddings`, where no
    row ends.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    # One for all layers, or one for each type of layer.
    ropes = [each for each in (rope, *rope.values()) if isinstance(each, dict)]
    lengths = (
        each["original_max_position_embeddings"]
        for each in ropes
        if each.get("rope_type") == "longrope"
    )
    return min(lengths, default=None)
