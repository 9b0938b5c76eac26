"""Read the facts of a model on meta: its shapes, and transformers' plans of its architecture."""

from __future__ import annotations

from typing import Any, cast

from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_common
from transformers import PreTrainedConfig, PreTrainedModel

from shardtune.model import traits
from shardtune.model.documents.attention_layers import attention_layers
from shardtune.model.documents.indexers import indexers
from shardtune.model.documents.state_layers import state_mixers
from shardtune.model.facts.facts import Built, Cut, Facts, Stack
from shardtune.model.moe.spread import has_expert_plan, spread_shapes
from shardtune.model.stages import list_of_layers
from shardtune.model.tensor_parallel import CUTS, cut_modules

# FSDP2 completes the gradients of norms that see a part of the heads.
_REPLICATED = "replicated_with_grad_allreduce"


def facts_of_model(model: PreTrainedModel, path: str = "") -> Facts:
    """Read the facts of a whole model; its parameters need no storage."""
    text: Any = model.config.get_text_config()
    stacks = spread_shapes(model)
    layers = [traits.heads(layer) for layer in text.per_layer_config]
    has_list = list_of_layers(model) is not None and model.get_output_embeddings() is not None
    is_scaled = getattr(text, "attn_temperature_tuning", False)
    cut = {}
    for name, style in cut_modules(model).items():
        shape = cast(nn.Linear, model.get_submodule(name)).weight.shape
        cut[f"{name}.weight"] = (shape[0], shape[1]), shape[CUTS[style]["weight"]]
    return Facts(
        kind=model.config.model_type,
        path=path,
        positions=traits.number(text, "max_position_embeddings"),
        layers=len(traits.decoder_layers(model)),
        heads=tuple(traits.numbers_of_heads(model)),
        experts=tuple(sorted({shape[0] for shape in stacks})),
        built=Built(
            has_layer_list=has_list,
            recomputes=model.supports_gradient_checkpointing,
            keeps_state=bool(state_mixers(model)),
            chosen_keys=min((indexer.index_topk for indexer in indexers(model)), default=0),
            short_rope=_short_rope_length(text),
            # Llama 4 counts places from the beginning of the row, not by its positions.
            scaled_from=getattr(text, "floor_scale", None) if is_scaled else None,
            takes_attention=model._can_set_attn_implementation(),
            has_placements=hasattr(_fsdp_common, "ShardPlacementResult"),
            uncut=_uncut(model),
            cut=tuple(Cut(name, *sizes) for name, sizes in cut.items()),
            heads=tuple((layer.queries, layer.keys) for layer in layers),
            has_experts=traits.has_experts(model),
            has_expert_plan=has_expert_plan(model),
            stacks=tuple(sorted({Stack(shape[0], shape[-1]) for shape in stacks})),
        ),
    )


def _uncut(model: PreTrainedModel) -> str:
    """Return why the architecture's plan does not cut all attention, or an empty text."""
    if not model.tp_plan:
        return "does not exist"
    plan, cut = model._expand_parallel_plan(model.tp_plan), cut_modules(model)
    inside = {module for layer in traits.decoder_layers(model) for module in layer.modules()}
    for name, module in model.named_modules():
        is_left = module not in inside or "expert" in name or name in cut
        if not is_left and plan.get(name, _REPLICATED) != _REPLICATED:
            return f"has the unknown rule {plan[name]} for {name}"
    blocks = {model.get_submodule(name.rpartition(".")[0]) for name in cut}
    return "" if blocks.issuperset(attention_layers(model)) else "leaves attention whole"


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
