"""Build the model sharded: every rank reads or draws its own slices, never the whole model.

The parameters of each decoder layer form one FSDP group. Embeddings, final norm and head stay in
the root's group, where tied weights stay tied: in a group of its own, a tied embedding is untied at
its first forward.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.attention.varlen  # registers its operator
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)
from transformers import PreTrainedConfig, PreTrainedModel

import shardtune.model.older_transformers  # noqa: F401, gives older ones what is used here
from shardtune.config import Config
from shardtune.distributed.layout import Layout
from shardtune.distributed.tensors import DTYPES, copy_slice, slice_like
from shardtune.distributed.world import World
from shardtune.errors import UserError, first_line
from shardtune.model.documents import cpu_attention
from shardtune.model.documents.shared_rows import context_problems
from shardtune.model.fsdp_groups import gather_ahead, groups_of, is_sharded
from shardtune.model.host_inputs import Copies, PinnedCopies, keep_inputs_on_host
from shardtune.model.kept_choices import keep_choices
from shardtune.model.lora import add_adapters, choose_targets, draw_factors
from shardtune.model.moe.experts import (
    always_give_gradients,
    require_whole_blocks,
    shard_placement,
    spread_experts,
    spread_problems,
)
from shardtune.model.moe.grouped_experts import gather_both_ways
from shardtune.model.source.load import load_sharded
from shardtune.model.source.masters import keep_master, rounded_when_read
from shardtune.model.source.text_model import build_text_model
from shardtune.model.stages import keep_stage, layers_of_stages, stage_problems
from shardtune.model.support import unsupported
from shardtune.model.traits import decoder_layers
from shardtune.optimizers.rules import find_rule

# Selective checkpointing keeps the outputs of these, which are most of a layer's cost, and
# recomputes the rest.
_KEPT_OPERATORS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.torch_attn._varlen_attn.default,
    cpu_attention.OPERATOR,
]
# transformers adds the biases of stacked experts (GPT-OSS) into these, and PyTorch refuses to keep
# an output that is changed afterwards. Gemma 3n adds to products in its AltUp, behind a view, where
# PyTorch does not notice it and makes wrong gradients.
_CHANGED_IN_PLACE = [torch.ops.aten.bmm.default, torch.ops.aten._grouped_mm.default]
# Spread experts have FSDP2's hooks within their layer, and the hooks label what they do for the
# profiler, more often in recomputation than in the forward. Selective checkpointing takes each
# operator for part of the layer, unless it is one of these, and ends such a run.
SAC_IGNORED_OPS.update(
    {
        torch.ops.profiler._record_function_enter_new.default,
        torch.ops.profiler._record_function_exit._RecordFunction,
    }
)


def require_trainable(config: Config, model_config: PreTrainedConfig, world: World) -> None:
    """Check that the architecture can be trained as configured; its config.json is enough.

    Raises:
        UserError: the architecture lacks the attention implementation, or, all at once: it cannot
            be trained exactly or its experts not be spread, adapters have no such targets, or
            shards cut the optimizer's blocks.
    """
    model, distribute = _sharding(config, model_config, world)
    layout = world.layout
    rule = find_rule(layout.optimizer, layout.master_dtype)
    not_spread = list(spread_problems(model, layout.expert, layout.expert_shards))
    not_cut = list(stage_problems(model, layout))
    not_shared = context_problems(model, layout.context, layout.max_length)
    problems = [*unsupported(model, layout), *not_shared, *not_spread, *not_cut]
    try:
        if layout.is_lora:
            choose_targets(model, config.lora)
        elif rule.has_blocks and not (not_spread or not_cut):
            distribute(model)
            require_whole_blocks(model, layout.optimizer)
    except UserError as error:
        problems += error.problems
    if problems:
        raise UserError(*problems)


def build_model(config: Config, model_config: PreTrainedConfig, world: World) -> PreTrainedModel:
    """Build the model sharded over `world.mesh`, in training mode, its master weights on
    `world.device`. `require_trainable` has accepted it.

    Raises:
        UserError: the files lack tensors of the model.
    """
    skeleton, distribute = _sharding(config, model_config, world)
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
    model = _for_training(model, world.layout)
    if world.device.type == "cuda":
        run_as_on_gpus(model, world.layout, partial(PinnedCopies, world.device))
    return model


def run_as_on_gpus(model: PreTrainedModel, layout: Layout, copies: Callable[[], Copies]) -> None:
    """Change what a model does on GPUs alone, where `copies` keep layers' inputs."""
    gather_both_ways(model)
    if layout.checkpointing == "offload":
        keep_inputs_on_host(model, copies())


def build_on_meta(
    config: Config, model_config: PreTrainedConfig, world: World, own: range | None = None
) -> PreTrainedModel:
    """Build the model as `build_model` does, but without storage.

    `own`: the layers of this stage, or those that it would have of the whole model.
    """
    model, distribute = _sharding(config, model_config, world, own)
    distribute(model, DTYPES[world.layout.device_dtype])
    return _for_training(model, world.layout)


def whole_on_meta(config: Config, model_config: PreTrainedConfig, world: World) -> PreTrainedModel:
    """Build the model of all stages, neither sharded nor with storage, with its adapters."""
    model, _ = _sharding(config, model_config, world)
    if world.layout.is_lora:
        add_adapters(model, config.lora)
    return model


def _sharding(
    config: Config, model_config: PreTrainedConfig, world: World, own: range | None = None
) -> tuple[PreTrainedModel, Callable[..., None]]:
    """Return the model on meta, and the function that shards it.

    That function also takes the dtype of trained weights on the device, if not that of masters.

    Raises:
        UserError: the architecture lacks the attention implementation.
    """
    layout = world.layout
    compute, dtype = DTYPES[layout.compute_dtype], DTYPES[layout.weights_dtype]
    skeleton = _on_meta(model_config, layout.attention, dtype)
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=DTYPES[layout.reduce_dtype])

    def adapt_and_shard(model: PreTrainedModel, stored: torch.dtype = dtype) -> None:
        # Some routers are float32 whatever is asked for, and FSDP2 takes one dtype for a group.
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(stored)
        if layout.is_lora:
            add_adapters(model, config.lora)
        if layout.stages > 1:
            layers = own or layers_of_stages(model, layout.stages)[world.stage]
            keep_stage(model, layers, world.stage == 0, world.is_last_stage, compute)
        shard(model, world, policy)

    return skeleton, adapt_and_shard


def _for_training(model: PreTrainedModel, layout: Layout) -> PreTrainedModel:
    if layout.recomputes:
        contexts: Callable[[], Any] = noop_context_fn
        if layout.checkpointing == "selective":
            contexts = partial(create_selective_checkpoint_contexts, kept_operators(model))
        if layout.expert > 1:
            contexts = partial(keep_choices, contexts)
        # transformers before 5.23 has the older name alone.
        older: Any = model.gradient_checkpointing_enable
        enable = getattr(model, "activation_checkpointing_enable", older)
        enable({"use_reentrant": False, "context_fn": contexts})
    # A cache would keep all keys, and with one no mask keeps documents apart.
    model.config.use_cache = model.config.get_text_config().use_cache = False
    return model.train()


def kept_operators(model: PreTrainedModel) -> list[Any]:
    """Return the operators whose outputs selective checkpointing keeps in this model."""
    is_changed = any(
        getattr(module, "has_bias", False) or hasattr(module, "altup") for module in model.modules()
    )
    return [op for op in _KEPT_OPERATORS if not (is_changed and op in _CHANGED_IN_PLACE)]


def _on_meta(model_config: PreTrainedConfig, attention: str, dtype: torch.dtype) -> PreTrainedModel:
    """Build the architecture without storage. `auto` is sdpa, or eager where there is no sdpa."""
    # A copy, because building changes it, and the export writes it as the source's.
    model_config = copy.deepcopy(model_config)
    implementation = None if attention == "auto" else attention
    try:
        with torch.device("meta"):
            return build_text_model(model_config, attn_implementation=implementation, dtype=dtype)
    except ValueError as error:
        raise UserError(
            f"model.attention={attention} is not available for {model_config.model_type} "
            f"({first_line(error)}) - use model.attention=auto"
        ) from error


def shard(model: PreTrainedModel, world: World, policy: MixedPrecisionPolicy) -> None:
    """Apply FSDP2: one group per decoder layer, and the root's group for all other parameters.

    With parallel.expert above 1, the experts of each layer are spread, a group of their own. What
    needs no copy is left as it is, in no group.
    """
    if world.expert_mesh:
        _shard_experts(model, world.expert_mesh, world, policy)
    # FSDP2 works within a replica. What replicas exchange is OwnedParameters' work.
    mesh = world.mesh["shard"]
    fully = partial(
        fully_shard,
        mesh=mesh,
        mp_policy=policy,
        shard_placement_fn=partial(shard_placement, shards=mesh.size()),
        ignored_params={p for p in model.parameters() if _needs_no_copy(p, world, policy)},
    )
    layers = decoder_layers(model)
    for layer in reversed(layers):  # inner layers before those around them
        fully(layer)
        always_give_gradients(layer)
    fully(model)
    gather_ahead(model, layers)
    for group in groups_of(model):
        group.reduce_in(world.meshes.for_reductions, DTYPES[world.layout.gradient_dtype])
    for module in (*layers, model) if world.layout.replicate > 1 else ():
        _average_over_stage(module, world.layout.shards, world)


def _needs_no_copy(parameter: nn.Parameter, world: World, policy: MixedPrecisionPolicy) -> bool:
    """Return whether a rank computes with a weight as it stores it.

    FSDP2 would copy it all the same, and hold it twice. The gradient of a trained one then is
    autograd's alone, which sums micro-batches in the weight's dtype and sends nothing.
    """
    layout = world.layout
    if layout.shards > 1 or parameter.dtype != policy.param_dtype:
        return False
    is_autograds = layout.stage_ranks == 1 and parameter.dtype == policy.reduce_dtype
    return not parameter.requires_grad or (is_autograds and not layout.offloads)


def _shard_experts(
    model: PreTrainedModel, mesh: DeviceMesh, world: World, policy: MixedPrecisionPolicy
) -> None:
    """Spread the experts over `expert`, and apply FSDP2 to each rank's over `expert_shard`."""
    copies = mesh["expert_shard"].size()
    for experts in spread_experts(model, mesh["expert"], world.progress):
        fully_shard(
            experts,
            mesh=mesh["expert_shard"],
            # As without a group of their own: the router's weights stay in float32.
            mp_policy=replace(policy, cast_forward_inputs=False),
            shard_placement_fn=partial(shard_placement, shards=copies),
        )
        _average_over_stage(experts, copies, world)


def _average_over_stage(module: Any, shards: int, world: World) -> None:
    """Divide a module's gradients by the ranks of the stage, more than the `shards` of its group.

    Those of other replicas are added later, and all ranks' tokens have reached spread experts.
    """
    module.set_gradient_divide_factor(world.layout.stage_ranks)
    # FSDP2 scales within the collective, as gloo cannot. Groups of one rank divide by themselves,
    # and would twice.
    module.set_force_sum_reduction_for_comms(shards > 1)


@contextmanager
def forward_only(model: PreTrainedModel) -> Iterator[None]:
    """Run forwards without dropout or gradients, and shard every parameter again at the end.

    FSDP2 keeps the root's parameters gathered until a backward comes, and their shards out of reach
    meanwhile.
    """
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()
        for module in filter(is_sharded, model.modules()):
            cast(Any, module).reshard()


@torch.no_grad()
def draw_weights(
    model: PreTrainedModel, seed: int, device: torch.device, master: torch.dtype | None = None
) -> None:
    """Give a sharded model on meta the architecture's own random initialisation.

    A module's parameters are drawn whole on the CPU, from (seed, the module's name) alone, and
    each rank keeps its slices: the same model on any number of ranks, with one module's parameters
    in memory at a time. `master`: the dtype in which trained ones are drawn, if not their own.
    """
    model.to_empty(device=device)
    model.tie_weights()
    # The innermost transformers model around a module initialises it.
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    owners = {module: owner for owner in models for module in owner.modules()}
    drawn: set[int] = set()
    for name, module in model.named_modules():
        parameters = dict(module.named_parameters(recurse=False))
        sharded = {key: p for key, p in parameters.items() if id(p) not in drawn}
        # A module with nothing but buffers has them initialised too.
        if not sharded and (parameters or not list(module.buffers(recurse=False))):
            continue
        drawn |= {id(parameter) for parameter in sharded.values()}
        for key, parameter in sharded.items():
            dtype = master if master and parameter.requires_grad else parameter.dtype
            whole = torch.zeros(parameter.shape, dtype=dtype)
            module.register_parameter(key, nn.Parameter(whole))
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            owners[module]._init_weights(module)
        for key, parameter in sharded.items():
            whole = module.get_parameter(key)
            module.register_parameter(key, parameter)
            copy_slice(whole, parameter)
            if whole.dtype != parameter.dtype:
                keep_master(parameter, slice_like(whole, parameter).detach().clone())
