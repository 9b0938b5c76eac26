"""Read the facts of a model on meta: its shapes, and transformers' plans of its architecture."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_common
from transformers import PreTrainedConfig, PreTrainedModel

from shardtune.config import LoraConfig
from shardtune.errors import UserError
from shardtune.model import parts, traits
from shardtune.model.documents.one_by_one import attention_layers, indexers, state_mixers
from shardtune.model.facts.facts import Cut, Layer, ModelFacts, Parameter
from shardtune.model.flops import ModelFlops, NotCounted, cost_of, count_flops, stage_costs
from shardtune.model.lora import add_adapters
from shardtune.model.moe.spread import has_expert_plan, spread_stacks
from shardtune.model.tensor_parallel import CUTS

_STYLES = ("colwise", "rowwise")  # transformers' names, by the dimension that is cut
# FSDP2 completes the gradients of norms that see a part of the heads.
_REPLICATED = "replicated_with_grad_allreduce"


def facts_of_model(
    model: PreTrainedModel, path: str = "", lora: LoraConfig | None = None
) -> ModelFacts:
    """Read the facts of a whole model; its parameters need no storage.

    `lora`: first gives the model these adapters. Those that it cannot have are among its refusals.
    """
    layers = parts.decoder_layers(model)
    refusals: list[str] = []
    try:
        if lora:
            add_adapters(model, lora)
    except UserError as error:
        refusals = error.problems
    text: Any = model.config.get_text_config()
    spread = spread_stacks(model)
    stacks = [model.get_parameter(name).shape for name in spread if not parts.is_factor(name)]
    names = {module: name for name, module in model.named_modules()}
    cut = tuple(_cut(model, layers))
    kinds = dict.fromkeys(spread, "experts")
    kinds |= {f"{name}.{key}": "cut" for name, _, side in cut for key in CUTS[side]}
    of_layers, embedding, behind = _weights(model, layers, kinds)
    experts = {traits.number(text, *traits.EXPERTS)} - {0}
    flops, uncounted = _flops(model)
    is_scaled = getattr(text, "attn_temperature_tuning", False)
    return ModelFacts(
        kind=model.config.model_type,
        path=path,
        positions=traits.number(text, "max_position_embeddings"),
        n_layers=len(layers),
        numbers_of_heads=tuple(traits.numbers_of_heads(model)),
        numbers_of_experts=tuple(sorted({shape[0] for shape in stacks} or experts)),
        refusals=tuple(refusals),
        layer_names=tuple(names[layer] for layer in layers),
        layer_list=_layer_list(model, layers),
        recomputes=model.supports_gradient_checkpointing,
        keeps_state=bool(state_mixers(model)),
        chosen_keys=min((indexer.index_topk for indexer in indexers(model)), default=0),
        short_rope=_short_rope_length(text),
        # Llama 4 counts places from the beginning of the row, not by its positions.
        scaled_from=getattr(text, "floor_scale", None) if is_scaled else None,
        takes_attention=model._can_set_attn_implementation(),
        has_placements=hasattr(_fsdp_common, "ShardPlacementResult"),
        uncut=_uncut(model, layers, cut),
        cut=cut,
        heads=tuple(traits.heads(layer) for layer in text.per_layer_config),
        has_experts=parts.has_experts(model),
        has_expert_plan=has_expert_plan(model),
        stacks=tuple(sorted({(shape[0], shape[-1]) for shape in stacks})),
        top_k=traits.top_k(model),
        hidden_size=traits.most_of_layers(model, "hidden_size"),
        layers=of_layers,
        embedding=embedding,
        behind=behind,
        is_tied=bool(model.all_tied_weights_keys),
        costs=stage_costs(model, layers),
        flops=flops,
        uncounted=uncounted,
        row_cost=cost_of(model),
    )


def _weights(
    model: PreTrainedModel, layers: list[nn.Module], kinds: Mapping[str, str]
) -> tuple[tuple[Layer, ...], tuple[Parameter, ...], tuple[Parameter, ...]]:
    """Return the layers, and the parameters of the embedding and of everything else.

    `kinds`: of parameters that are not dense, by their names.
    """
    types = parts.layer_types(model.config.get_text_config())
    kind_of = {p: kinds.get(name, "dense") for name, p in model.named_parameters()}
    embedding: Any = model.get_input_embeddings()
    embedded = {*embedding.parameters()}
    elsewhere = embedded.union(*(layer.parameters() for layer in layers))

    def read(module: nn.Module, left_out: set[nn.Parameter]) -> tuple[Parameter, ...]:
        return tuple(
            Parameter(name, tuple(p.shape), p.requires_grad, kind_of[p])
            for name, p in module.named_parameters()
            if p not in left_out
        )

    # BERT names its embeddings as a layer.
    of_layers = tuple(
        Layer(types[i] if i < len(types) else None, read(layer, embedded))
        for i, layer in enumerate(layers)
    )
    return of_layers, read(embedding, set()), read(model, elsewhere)


def _flops(model: PreTrainedModel) -> tuple[ModelFlops | None, str]:
    try:
        return count_flops(model), ""
    except NotCounted as reason:
        return None, str(reason)


def _layer_list(model: PreTrainedModel, layers: list[nn.Module]) -> str:
    """Return the name of the list of all layers, or an empty text; also where no head follows."""
    if model.get_output_embeddings() is None:
        return ""
    lists = (each for each in model.named_modules() if isinstance(each[1], nn.ModuleList))
    return next((name for name, module in lists if [*module.children()] == layers), "")


def _cut(model: PreTrainedModel, layers: list[nn.Module]) -> Iterator[Cut]:
    """Yield the linear modules of the layers that the architecture's plan cuts."""
    plan = model._expand_parallel_plan(model.tp_plan) if _has_plan(model) else {}
    inside = {module for layer in layers for module in layer.modules()}
    for name, module in model.named_modules():
        is_cut = plan.get(name) in _STYLES and isinstance(module, nn.Linear) and module in inside
        # Shared experts are small, and run ahead on slices where other experts are spread.
        if is_cut and "expert" not in name:
            rows, columns = module.weight.shape
            yield Cut(name, (rows, columns), _STYLES.index(plan[name]))


def _has_plan(model: PreTrainedModel) -> bool:
    return bool(model.tp_plan) and parts.has_new_transformers()


def _uncut(model: PreTrainedModel, layers: list[nn.Module], cut: Iterable[Cut]) -> str:
    """Return why the architecture's plan does not cut all attention, or an empty text."""
    if not model.tp_plan:
        return "does not exist"
    plan, names = model._expand_parallel_plan(model.tp_plan), {each.module for each in cut}
    inside = {module for layer in layers for module in layer.modules()}
    for name, module in model.named_modules():
        is_left = module not in inside or "expert" in name or name in names
        if not is_left and plan.get(name, _REPLICATED) != _REPLICATED:
            return f"has the unknown rule {plan[name]} for {name}"
    blocks = {model.get_submodule(name.rpartition(".")[0]) for name in names}
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
