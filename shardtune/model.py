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

from .config import Config
from .errors import Refused, Stopped
from .world import World

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

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
        Refused: the attention implementation is not the architecture's, its loss would depend on the batch or its
            layers on the rank, or the files lack tensors of the model.
    """
    master = DTYPES[config.model.master_dtype]
    skeleton = _on_meta(model_config, config.model.attention, master)
    if problems := list(_problems(skeleton, config, world)):
        raise Refused(*problems)
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype(config.model.compute_dtype, world.device),
        reduce_dtype=DTYPES[config.model.reduce_dtype],
    )
    if config.model.init == "random":
        model = skeleton
        shard(model, world, policy)
        draw_weights(model, config.run.seed, world.device)
    else:
        model = _load_sharded(type(skeleton), config.model.path, skeleton.config, master, world, policy)
    if config.model.activation_checkpointing != "none":
        how: dict[str, Any] = {"use_reentrant": False}
        if config.model.activation_checkpointing == "selective":
            how["context_fn"] = lambda: create_selective_checkpoint_contexts(_PRODUCTS)
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=how)
    model.config.use_cache = False
    return model.train()


def local_bytes(model: PreTrainedModel) -> int:
    """What this rank holds of the master weights."""
    return sum(p.to_local().numel() * p.element_size() for p in model.parameters() if isinstance(p, DTensor))


def _on_meta(model_config: PreTrainedConfig, attention: str, dtype: torch.dtype) -> PreTrainedModel:
    """The architecture without storage. `auto` is sdpa, or eager for an architecture that has no sdpa."""
    model_config = copy.deepcopy(model_config)  # its own would be changed, which the export writes as the source's
    refusals = []
    for implementation in ("sdpa", "eager") if attention == "auto" else (attention,):
        try:
            with torch.device("meta"):
                return AutoModelForCausalLM.from_config(model_config, attn_implementation=implementation, dtype=dtype)
        except ValueError as error:
            refusals.append(str(error).splitlines()[0])
    raise Refused(
        f"model.attention={attention} is not for {model_config.model_type} ({refusals[0]}) - use model.attention=auto"
    )


def _problems(model: PreTrainedModel, config: Config, world: World) -> Iterator[str]:
    """What of the architecture would make a record's loss depend on the others, or ranks part, as it is configured."""
    kind = model.config.model_type
    if config.data.packing and not can_be_packed(type(model)):
        yield (
            f"{kind} keeps a state or takes no positions, so documents in one row would not be apart - "
            "use data.packing=false"
        )
    short = _short_rope_length(model.config)
    is_alone = not config.data.packing and config.train.micro_batch_size == 1
    if short is not None and config.data.max_length > short and not is_alone:
        yield (
            f"{kind} turns to other rope factors for a whole forward once one of its records is longer than {short} "
            f"tokens - use data.max_length={short} or less, or data.packing=false with train.micro_batch_size=1"
        )
    text = model.config.get_text_config()
    # Llama 4 counts them from the beginning of the row, whatever positions it is given.
    scaled_from = getattr(text, "floor_scale", None) if getattr(text, "attn_temperature_tuning", False) else None
    if (
        scaled_from is not None
        and not is_alone
        and config.data.max_length * config.train.micro_batch_size > scaled_from
    ):
        yield (
            f"{kind} scales queries by their place in the row from {scaled_from:.0f} tokens on, so a record's loss "
            "would depend on those before it - lower data.max_length x train.micro_batch_size to that, or use "
            "data.packing=false with train.micro_batch_size=1"
        )
    tokens = config.data.max_length * config.train.micro_batch_size
    if config.data.packing and (table := _causal_table(model)) and tokens > table:
        yield (
            f"{kind} has a causal mask of {table} x {table} positions, and the rows of a micro-batch, one behind the "
            f"other, have {tokens} tokens - lower data.max_length x train.micro_batch_size to {table}, or use "
            "data.packing=false"
        )
    if world.size > 1 and any(getattr(module, "layerdrop", 0) for module in model.modules()):
        yield (
            f"{kind} drops layers at random (layerdrop), each rank others, while all have to gather them together - "
            "set the layerdrop of its config.json to 0"
        )


def _causal_table(model: PreTrainedModel) -> int | None:
    """The positions of the table that a layer takes its causal mask from, as GPT-Neo's do; None without one."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    shapes = {tuple(buffer.shape[-2:]) for layer in _layers(model) for buffer in layer.buffers()}
    return positions if (positions, positions) in shapes else None


def _short_rope_length(model_config: PreTrainedConfig) -> int | None:
    """The longest forward, in tokens, for which longrope (arXiv 2402.13753) takes its short factors; None without it.

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
    """Whether restarting positions can tell it documents apart; `choose_attention` sees whether they do."""
    return "position_ids" in inspect.signature(model_class.forward).parameters and not model_class._is_stateful


def shard(model: PreTrainedModel, world: World, policy: MixedPrecisionPolicy) -> None:
    """Apply FSDP2: one group per decoder layer, and the root's for what is left.

    Raises:
        Refused: stacked experts that neither their number nor their width spreads over the ranks.
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
        raise Refused(
            f"{experts} experts of width {parameter.shape[-1]} do not spread over {shards} ranks, one of "
            "them would hold none - use a number of ranks that divides the experts or their width"
        )

    layers = _layers(model)
    if not layers:
        world.say(f"{type(model).__name__} names no layers to shard by: every forward gathers the whole model at once")
    for layer in reversed(layers):  # inner layers before those around them
        fully_shard(layer, mesh=world.mesh, mp_policy=policy, shard_placement_fn=placement)
        _always_give_expert_gradients(layer)
    fully_shard(model, mesh=world.mesh, mp_policy=policy, shard_placement_fn=placement)


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers, which FSDP2 may have made classes of its own."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if names & {kind.__name__ for kind in type(module).__mro__}]


def compile_layers(model: PreTrainedModel, config: Config, world: World) -> None:
    """Compile the forward of each layer, once for all lengths; FSDP2's hooks and the checkpoint stay outside.

    It happens at the first call, which raises Stopped where it fails.
    """

    def compiled(layer: Any) -> Callable[..., Any]:
        # transformers has the checkpoint in the forward: compiled with it, a layer whose graph breaks, as it does at
        # attention, would not be compiled at all, and nothing would say so.
        inner = inspect.unwrap(
            type(layer).forward, stop=lambda function: function.__code__.co_name != "forward_with_checkpointing"
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
                raise Stopped(
                    f"model.compile=true: {name} cannot be compiled here ({reason}) - install what it lacks, such as a "
                    "C++ compiler on a CPU, or use model.compile=false"
                ) from error

        return forward

    for layer in _layers(model):
        layer.forward = compiled(layer)
    world.say(
        "Each layer is compiled at its first use, so the first steps take minutes and count in the first estimates"
    )
    if config.model.activation_checkpointing == "selective":
        world.say(
            "Compiled layers keep attention and compute their matrix products again: what selective checkpointing "
            "would keep of them is out of its sight"
        )


def _always_give_expert_gradients(layer: nn.Module) -> None:
    """Make every backward through the layer give its stacked experts a gradient, zero where no token reached one.

    LongCat's and Zaya's tokens may all go to experts without parameters. A rank with fewer gradients than the others
    reduces less than they do, and the collective fails. FSDP2's `set_reduce_scatter_unused_params` would make gradients
    for what has none on any rank as well, such as DeepSeek's indexers, and weight decay would then shrink those.
    """

    def fill(_: torch.Tensor) -> None:
        for parameter in layer.parameters():
            if parameter.dim() >= 3 and parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def watch(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        for argument in arguments:
            if isinstance(argument, torch.Tensor) and argument.requires_grad:
                # Its gradient is complete after those of the experts, and before FSDP2 reduces the layer's.
                argument.register_hook(fill)

    if any(parameter.dim() >= 3 for parameter in layer.parameters()):
        layer.register_forward_pre_hook(watch)


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

    def prepare_distribute_model(cls: type, distributed_config: Any, device_map: Any = None) -> tuple[Any, Any, None]:
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
    misshapen = sorted(f"{name} {list(stored)}, not {list(built)}" for name, stored, built in info["mismatched_keys"])
    problems = [
        f"{path}: {kind} {names[0]} ({len(names)} in all) - fetch the model again, or correct its config.json"
        for kind, names in (
            ("the files lack the model's tensor", missing),
            ("another shape than the model's has", misshapen),
        )
        if names
    ]
    if problems:
        raise Refused(*problems)
    if unexpected := sorted(info["unexpected_keys"]):
        world.say(f"Not in the model, left unread: {unexpected[0]} ({len(unexpected)} tensors in all)")
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
        sharded = {key: p for key, p in module.named_parameters(recurse=False) if id(p) not in drawn}
        if not sharded and (not any(True for _ in module.buffers(recurse=False)) or any(module.parameters(False))):
            continue
        drawn |= {id(parameter) for parameter in sharded.values()}
        for key, parameter in sharded.items():
            module.register_parameter(key, nn.Parameter(torch.zeros(parameter.shape, dtype=parameter.dtype)))
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
            index = tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))
            parameter.to_local().copy_(whole[index])


def _owner(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """The innermost transformers model around the module: its `_init_weights` is the module's."""
    while name:
        module = model.get_submodule(name)
        if isinstance(module, PreTrainedModel):
            return module
        name = name.rpartition(".")[0]
    return model
