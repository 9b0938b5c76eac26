"""Read the facts of a model on meta: its shapes, and transformers' plans of its architecture."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_common
from transformers import PreTrainedConfig, PreTrainedModel

from shardtune.model import traits
from shardtune.model.documents.attention_layers import attention_layers, indexers
from shardtune.model.documents.state_layers import state_mixers
from shardtune.model.facts.facts import Cut, Layer, ModelFacts, Parameter
from shardtune.model.flops import NotCounted, count_flops, stage_costs
from shardtune.model.moe.spread import has_expert_plan, spread_stacks
from shardtune.model.stages import list_of_layers
from shardtune.model.tensor_parallel import CUTS, cut_modules, cut_parameters

# FSDP2 completes the gradients of norms that see a part of the heads.
_REPLICATED = "replicated_with_grad_allreduce"


def facts_of_model(
    model: PreTrainedModel, path: str = "", refusals: tuple[str, ...] = ()
) -> ModelFacts:
    """Read the facts of a whole model, with its adapters; its parameters need no storage."""
    text: Any = model.config.get_text_config()
    spread = spread_stacks(model)
    stacks = [model.get_parameter(name).shape for name in spread if not traits.is_factor(name)]
    embedding: Any = model.get_input_embeddings()
    layers, types = traits.decoder_layers(model), traits.layer_types(text)
    kinds = dict.fromkeys(spread, "experts")
    kinds |= dict.fromkeys(cut_parameters(model), "cut")
    kind_of = {p: kinds.get(name, "dense") for name, p in model.named_parameters()}
    elsewhere = {p for module in [*layers, embedding] for p in module.parameters()}
    others = ((name, p) for name, p in model.named_parameters() if p not in elsewhere)
    first, costs, last = stage_costs(model)
    is_scaled = getattr(text, "attn_temperature_tuning", False)

    def read(named: Iterable[tuple[str, nn.Parameter]]) -> tuple[Parameter, ...]:
        return tuple(
            Parameter(name, tuple(p.shape), p.requires_grad, kind_of[p]) for name, p in named
        )

    def cut(name: str, style: str) -> Cut:
        rows, columns = cast(nn.Linear, model.get_submodule(name)).weight.shape
        return Cut(f"{name}.weight", (rows, columns), CUTS[style]["weight"])

    return ModelFacts(
        kind=model.config.model_type,
        path=path,
        positions=traits.number(text, "max_position_embeddings"),
        n_layers=len(layers),
        numbers_of_heads=tuple(traits.numbers_of_heads(model)),
        numbers_of_experts=tuple(sorted({shape[0] for shape in stacks})),
        refusals=refusals,
        has_layer_list=bool(list_of_layers(model)) and model.get_output_embeddings() is not None,
        recomputes=model.supports_gradient_checkpointing,
        keeps_state=bool(state_mixers(model)),
        chosen_keys=min((indexer.index_topk for indexer in indexers(model)), default=0),
        short_rope=_short_rope_length(text),
        # Llama 4 counts places from the beginning of the row, not by its positions.
        scaled_from=getattr(text, "floor_scale", None) if is_scaled else None,
        takes_attention=model._can_set_attn_implementation(),
        has_placements=hasattr(_fsdp_common, "ShardPlacementResult"),
        uncut=_uncut(model),
        cut=tuple(cut(name, style) for name, style in cut_modules(model).items()),
        heads=tuple(traits.heads(layer) for layer in text.per_layer_config),
        has_experts=traits.has_experts(model),
        has_expert_plan=has_expert_plan(model),
        stacks=tuple(sorted({(shape[0], shape[-1]) for shape in stacks})),
        top_k=traits.top_k(model),
        hidden_size=traits.most_of_layers(model, "hidden_size"),
        layers=tuple(
            Layer(types[i] if i < len(types) else None, read(layer.named_parameters()))
            for i, layer in enumerate(layers)
        ),
        embedding=read(embedding.named_parameters()),
        behind=read(others),
        is_tied=bool(model.all_tied_weights_keys),
        costs=(first, tuple(costs), last),
        flops=_flops(model),
    )


def _flops(model: PreTrainedModel) -> Any:
    try:
        return count_flops(model)
    except NotCounted:
        return None


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
