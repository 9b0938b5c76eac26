"""Build the model sharded: every rank reads or draws its own slices and never holds the whole.

FSDP2 does the sharding and transformers the reading; this module only joins them. The parameters of each decoder
layer form one FSDP group; embeddings, final norm and head stay in the root's group, where tied weights stay tied
(in a group of its own, a tied embedding is untied at its first forward).
"""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.nn.attention.varlen  # makes its operator known
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import InductorError
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig as NoParallelism

from shardtune.config import Config
from shardtune.distributed.tensors import DTYPES
from shardtune.distributed.world import World
from shardtune.errors import RunFailed, UserError
from shardtune.log import logger
from shardtune.model.experts import always_give_expert_gradients
from shardtune.model.support import decoder_layers, unsupported

# What selective checkpointing keeps of a layer, as the layer's cost lies here: everything else is computed again.
_PRODUCTS = [
    getattr(torch.ops.aten, name).default
    for name in (
        "mm",
        "addmm",
        "bmm",
        "_grouped_mm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
] + [torch.ops.torch_attn._varlen_attn.default]


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of forward and backward; `auto` is bfloat16 where the device multiplies it natively."""
    if name != "auto":
        return DTYPES[name]
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        capabilities = torch.cpu.get_capabilities()
        native = bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
    return torch.bfloat16 if native else torch.float32


def build_model(config: Config, model_config: PreTrainedConfig, world: World) -> PreTrainedModel:
    """The model sharded over `world.mesh`, in training mode, with its master weights on `world.device`.

    Raises:
        UserError: the attention implementation is not the architecture's, its loss would depend on the batch or its
            layers on the rank, or the files lack tensors of the model.
    """
    master = DTYPES[config.model.master_dtype]
    skeleton = _on_meta(model_config, config.model.attention, master)
    if problems := list(unsupported(skeleton, config, world)):
        raise UserError(*problems)
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype(config.model.compute_dtype, world.device),
        reduce_dtype=DTYPES[config.model.reduce_dtype],
    )
    if config.model.init == "random":
        model = skeleton
        shard(model, world, policy)
        draw_weights(model, config.run.seed, world.device)
    else:
        model = _load_sharded(
            type(skeleton), config.model.path, skeleton.config, master, world, policy
        )
    if config.model.activation_checkpointing != "none":
        how: dict[str, Any] = {"use_reentrant": False}
        if config.model.activation_checkpointing == "selective":
            how["context_fn"] = lambda: create_selective_checkpoint_contexts(_PRODUCTS)
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=how)
    model.config.use_cache = False
    return model.train()


def local_bytes(model: PreTrainedModel) -> int:
    """What this rank holds of the master weights."""
    return sum(
        p.to_local().numel() * p.element_size()
        for p in model.parameters()
        if isinstance(p, DTensor)
    )


def _on_meta(model_config: PreTrainedConfig, attention: str, dtype: torch.dtype) -> PreTrainedModel:
    """The architecture without storage. `auto` is sdpa, or eager for an architecture that has no sdpa."""
    model_config = copy.deepcopy(
        model_config
    )  # its own would be changed, which the export writes as the source's
    refusals = []
    for implementation in ("sdpa", "eager") if attention == "auto" else (attention,):
        try:
            with torch.device("meta"):
                return AutoModelForCausalLM.from_config(
                    model_config, attn_implementation=implementation, dtype=dtype
                )
        except ValueError as error:
            refusals.append(str(error).splitlines()[0])
    raise UserError(
        f"model.attention={attention} is not for {model_config.model_type} ({refusals[0]}) - use model.attention=auto"
    )


def shard(model: PreTrainedModel, world: World, policy: MixedPrecisionPolicy) -> None:
    """Apply FSDP2: one group per decoder layer, and the root's for what is left.

    Raises:
        UserError: stacked experts that neither their number nor their width spreads over the ranks.
    """

    shards = world.mesh["shard"].size()

    def placement(parameter: nn.Parameter) -> Shard:
        """FSDP2's own choice, the first dimension, unless stacked experts would leave a rank without any."""
        experts = parameter.shape[0]
        if parameter.dim() < 3 or -(-experts // shards) * (shards - 1) < experts:
            return Shard(0)
        # The last dimension: the second is where the files' gate and up projections are joined.
        if parameter.shape[-1] % shards == 0:
            return Shard(parameter.dim() - 1)
        raise UserError(
            f"{experts} experts of width {parameter.shape[-1]} do not spread over {shards} ranks, one of "
            "them would hold none - use a number of ranks that divides the experts or their width"
        )

    layers = decoder_layers(model)
    if not layers:
        logger.info(
            f"{type(model).__name__} names no layers to shard by: every forward gathers the whole model at once"
        )
    for layer in reversed(layers):  # inner layers before those around them
        fully_shard(layer, mesh=world.mesh, mp_policy=policy, shard_placement_fn=placement)
        always_give_expert_gradients(layer)
    fully_shard(model, mesh=world.mesh, mp_policy=policy, shard_placement_fn=placement)


def compile_layers(model: PreTrainedModel, config: Config, world: World) -> None:
    """Compile the forward of each layer, once for all lengths; FSDP2's hooks and the checkpoint stay outside.

    It happens at the first call, which raises Stopped where it fails.
    """

    def compiled(layer: Any) -> Callable[..., Any]:
        # transformers has the checkpoint in the forward: compiled with it, a layer whose graph breaks, as it does at
        # attention, would not be compiled at all, and nothing would say so.
        inner = inspect.unwrap(
            type(layer).forward,
            stop=lambda function: function.__code__.co_name != "forward_with_checkpointing",
        )
        fast = torch.compile(partial(inner, layer), dynamic=True)

        def forward(*arguments: Any, **options: Any) -> Any:
            try:
                if getattr(layer, "gradient_checkpointing", False) and layer.training:
                    return layer._gradient_checkpointing_func(partial(fast, **options), *arguments)
                return fast(*arguments, **options)
            except (TorchDynamoException, InductorError) as error:
                reason = str(error).strip().splitlines()[0]
                name = type(layer).__name__.removeprefix("FSDP")
                raise RunFailed(
                    f"model.compile=true: {name} cannot be compiled here ({reason}) - install what it lacks, such as a "
                    "C++ compiler on a CPU, or use model.compile=false"
                ) from error

        return forward

    for layer in decoder_layers(model):
        layer.forward = compiled(layer)
    logger.info(
        "Each layer is compiled at its first use, so the first steps take minutes and count in the first estimates"
    )
    if config.model.activation_checkpointing == "selective":
        logger.info(
            "Compiled layers keep attention and compute their matrix products again: what selective checkpointing "
            "would keep of them is out of its sight"
        )


def _load_sharded(
    model_class: type[PreTrainedModel],
    path: str,
    model_config: PreTrainedConfig,
    master: torch.dtype,
    world: World,
    policy: MixedPrecisionPolicy,
) -> PreTrainedModel:
    """`from_pretrained`, with FSDP2 applied between construction on meta and reading.

    transformers reads slices for whatever parameters are DTensors at that point, and calls these two methods to make
    them so; its own default groups would untie tied embeddings and know neither a world of one nor our dtypes.
    """

    def prepare_distribute_model(
        cls: type, distributed_config: Any, device_map: Any = None
    ) -> tuple[Any, Any, None]:
        return distributed_config, world.device, None

    def maybe_distribute_model(cls: type, model: PreTrainedModel, *_: Any) -> PreTrainedModel:
        model.tie_weights()  # from_pretrained ties only after reading; FSDP2 must know tied weights as one parameter
        shard(model, world, policy)
        return model

    sharded_class = type(
        model_class.__name__,
        (model_class,),
        {
            "__module__": model_class.__module__,
            "prepare_distribute_model": classmethod(prepare_distribute_model),
            "maybe_distribute_model": classmethod(maybe_distribute_model),
        },
    )
    loader: Any = sharded_class
    model, info = loader.from_pretrained(
        path,
        config=model_config,
        dtype=master,
        attn_implementation=model_config._attn_implementation,
        distributed_config=NoParallelism(),
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    del model.config.distributed_config
    missing = sorted(info["missing_keys"])
    misshapen = sorted(
        f"{name} {list(stored)}, not {list(built)}"
        for name, stored, built in info["mismatched_keys"]
    )
    problems = [
        f"{path}: {kind} {names[0]} ({len(names)} in all) - fetch the model again, or correct its config.json"
        for kind, names in (
            ("the files lack the model's tensor", missing),
            ("another shape than the model's has", misshapen),
        )
        if names
    ]
    if problems:
        raise UserError(*problems)
    if unexpected := sorted(info["unexpected_keys"]):
        logger.info(
            f"Not in the model, left unread: {unexpected[0]} ({len(unexpected)} tensors in all)"
        )
    return cast(PreTrainedModel, model)


@contextmanager
def forward_only(model: PreTrainedModel) -> Iterator[None]:
    """Forwards without dropout, gradients or trace: afterwards every parameter is sharded again.

    FSDP2 keeps the root's parameters gathered until a backward comes, and their shards out of reach meanwhile.
    """
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


@torch.no_grad()
def draw_weights(model: PreTrainedModel, seed: int, device: torch.device) -> None:
    """Give a sharded model on meta the architecture's own random initialisation.

    The parameters of each module are drawn whole on the CPU, from (seed, the module's name) alone, and each rank
    keeps its slices: the same model on any number of ranks, and at most one module's parameters in memory.
    """
    model.to_empty(device=device)
    model.tie_weights()
    drawn: set[int] = set()
    for name, module in model.named_modules():
        sharded = {
            key: p for key, p in module.named_parameters(recurse=False) if id(p) not in drawn
        }
        if not sharded and (
            not any(True for _ in module.buffers(recurse=False)) or any(module.parameters(False))
        ):
            continue
        drawn |= {id(parameter) for parameter in sharded.values()}
        for key, parameter in sharded.items():
            module.register_parameter(
                key, nn.Parameter(torch.zeros(parameter.shape, dtype=parameter.dtype))
            )
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            _owner(model, name)._init_weights(module)
        for key, parameter in sharded.items():
            whole = module.get_parameter(key)
            module.register_parameter(key, parameter)
            assert isinstance(parameter, DTensor)
            shape, offset = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            index = tuple(
                slice(start, start + length) for start, length in zip(offset, shape, strict=True)
            )
            parameter.to_local().copy_(whole[index])


def _owner(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """The innermost transformers model around the module: its `_init_weights` is the module's."""
    while name:
        module = model.get_submodule(name)
        if isinstance(module, PreTrainedModel):
            return module
        name = name.rpartition(".")[0]
    return model
