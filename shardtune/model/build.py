"""Build the model sharded: every rank reads or draws its own slices, never the whole model.

The parameters of each decoder layer form one FSDP group. Embeddings, final norm and head stay in
the root's group, where tied weights stay tied: a group of its own would untie a tied embedding at
its first forward.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import PreTrainedConfig, PreTrainedModel

from shardtune.config import Config
from shardtune.distributed.layout import Layout
from shardtune.distributed.tensors import DTYPES
from shardtune.distributed.world import World
from shardtune.errors import UserError, first_line
from shardtune.model.facts.facts import ModelFacts
from shardtune.model.facts.of_model import facts_of_model
from shardtune.model.facts.problems import problems
from shardtune.model.lora import add_adapters, draw_factors
from shardtune.model.moe.grouped_experts import gather_both_ways
from shardtune.model.recomputation import (
    Copies,
    PinnedCopies,
    keep_inputs_on_host,
    prepare_for_training,
)
from shardtune.model.sharding import require_whole_blocks, shard
from shardtune.model.source.load_weights import load_sharded
from shardtune.model.source.masters import draw_weights, rounded_when_read
from shardtune.model.source.text_model import build_text_model
from shardtune.model.stages import divided, keep_stage, layers_in
from shardtune.optimizers.rules import find_rule


def read_facts(config: Config, model_config: PreTrainedConfig, layout: Layout) -> ModelFacts:
    """Read what the whole model is, with its adapters; its config.json is enough.

    Raises:
        UserError: an attention implementation is missing.
    """
    model = _on_meta(model_config, layout)
    return facts_of_model(model, config.model.path, config.lora if layout.is_lora else None)


def require_trainable(
    config: Config, model_config: PreTrainedConfig, facts: ModelFacts, world: World
) -> None:
    """Check that a model can be trained as configured. Raises UserError: every reason at once."""
    layout, found = world.layout, [*problems(facts, world.layout)]
    if not found and find_rule(layout.optimizer, layout.master_dtype).has_blocks:
        require_whole_blocks(build_on_meta(config, model_config, facts, world), layout.optimizer)
    if found:
        raise UserError(*found)


def build_model(
    config: Config, model_config: PreTrainedConfig, facts: ModelFacts, world: World
) -> PreTrainedModel:
    """Build the sharded model, in training mode. Raises UserError if its files lack tensors."""
    skeleton, distribute = _sharding(config, model_config, facts, world)
    stored, master = DTYPES[world.layout.device_dtype], skeleton.dtype
    if config.model.init == "random":
        model = skeleton
        distribute(model, stored)
        draw_weights(model, config.run.seed, world.device, master if stored != master else None)
    else:
        with rounded_when_read(stored) if stored != master else nullcontext():
            model = load_sharded(skeleton, config.model.path, world.device, distribute)
    if world.layout.is_lora:
        draw_factors(model, config.run.seed)
    model = prepare_for_training(model, world.layout)
    if world.device.type == "cuda":
        run_as_on_gpus(model, world.layout, partial(PinnedCopies, world.device))
    return model


def run_as_on_gpus(model: PreTrainedModel, layout: Layout, copies: Callable[[], Copies]) -> None:
    """Make the changes that GPUs need. `copies` makes the store of the layers' inputs."""
    gather_both_ways(model)
    if layout.checkpointing == "offload":
        keep_inputs_on_host(model, copies())


def build_on_meta(
    config: Config,
    model_config: PreTrainedConfig,
    facts: ModelFacts,
    world: World,
    layers: range | None = None,
) -> PreTrainedModel:
    """Build the model as `build_model` does, but without storage.

    `layers`: the layers of this stage; by default `divided` chooses them.
    """
    model, distribute = _sharding(config, model_config, facts, world, layers)
    distribute(model, DTYPES[world.layout.device_dtype])
    return prepare_for_training(model, world.layout)


def whole_on_meta(
    config: Config, model_config: PreTrainedConfig, layout: Layout
) -> PreTrainedModel:
    """Build the model of all stages, neither sharded nor with storage, with its adapters."""
    model = _on_meta(model_config, layout)
    if layout.is_lora:
        add_adapters(model, config.lora)
    return model


def _sharding(
    config: Config,
    model_config: PreTrainedConfig,
    facts: ModelFacts,
    world: World,
    layers: range | None = None,
) -> tuple[PreTrainedModel, Callable[..., None]]:
    """Return the model on meta, and the function that shards it.

    That function takes the dtype of trained weights on the device, which may not be the masters'.
    """
    layout = world.layout
    compute, dtype = DTYPES[layout.compute_dtype], DTYPES[layout.weights_dtype]
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=DTYPES[layout.reduce_dtype])

    def adapt_and_shard(model: PreTrainedModel, stored: torch.dtype = dtype) -> None:
        # Some routers are float32 in any model, and an FSDP2 group takes one dtype.
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(stored)
        # Adapters come first: their targets are names of the whole model. FSDP2 comes last, since
        # its groups must have every parameter, factors too, and none of another stage.
        if layout.is_lora:
            add_adapters(model, config.lora)
        if layout.stages > 1:
            kept = layers or divided(facts.costs, layout.stages)[world.stage]
            place = world.stage == 0, world.is_last_stage
            keep_stage(model, facts.layer_list, kept, *place, compute)
        shard(model, layers_in(model, facts.layer_names), facts.cut, world, policy)

    return _on_meta(model_config, layout), adapt_and_shard


def _on_meta(model_config: PreTrainedConfig, layout: Layout) -> PreTrainedModel:
    """Build the architecture without storage. `auto` is sdpa, or eager where there is no sdpa."""
    # A copy, because building changes it, and the export writes it as the source's.
    model_config, attention = copy.deepcopy(model_config), layout.attention
    implementation = None if attention == "auto" else attention
    dtype = DTYPES[layout.weights_dtype]
    try:
        with torch.device("meta"):
            return build_text_model(model_config, attn_implementation=implementation, dtype=dtype)
    except ValueError as error:
        raise UserError(
            f"model.attention={attention} is not available for {model_config.model_type} "
            f"({first_line(error)}) - use model.attention=auto"
        ) from error
