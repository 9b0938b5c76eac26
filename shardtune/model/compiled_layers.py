"""Compile the decoder layers, each once for all lengths.

Attention and spread experts are not compiled: they cut a layer into compiled parts. FSDP2's hooks
and activation checkpointing stay outside. The first call compiles.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch._functorch.config as functorch_config
from torch import nn

from shardtune.distributed import compiling
from shardtune.distributed.world import World
from shardtune.errors import RunFailed
from shardtune.log import logger, node_logger
from shardtune.model.parts import is_stack


def compile_layers(layers: list[nn.Module], setting: bool | str, world: World) -> None:
    """Compile the forward of each layer by `setting`, the value of model.compile. Collective.

    If a layer cannot be compiled, its first call raises RunFailed with `true`; with `auto` the log
    says so, and all layers run eager.
    """
    is_required = setting is True
    if not is_required and not (setting and _every_rank_compiles(world)):
        return
    # Compile the backward in the forward: if that fails there, the layer can still run eager.
    functorch_config.force_non_lazy_backward_lowering = True
    # The compiler then keeps products and computes the rest again, as selective checkpointing does.
    is_selective = world.layout.checkpointing == "selective"
    functorch_config.aggressive_recomputation = is_selective
    failed = list[str]()
    for layer in layers:
        keeps_products = is_selective and not any(map(is_stack, layer.parameters()))
        layer.forward = _compiled_forward(layer, keeps_products, is_required, failed)


def _every_rank_compiles(world: World) -> bool:
    """Return whether all ranks have a GPU that they can compile for, and say it. Collective."""
    if world.device.type != "cuda":
        return False
    able = world.all_gather_json(compiling.can_compile(world.device))
    if all(able):
        logger.info("Compile: layers, each at its first use")
    elif able[0]:  # else it has said that nothing is compiled
        logger.info(f"Compile: layers run eager, since rank {able.index(False)} cannot compile")
    return all(able)


def _compiled_forward(
    layer: Any, keeps_products: bool, is_required: bool, failed: list[str]
) -> Callable[..., Any]:
    """Return the compiled forward of a layer.

    `keeps_products`: the compiler keeps the products, so that no checkpointing wraps the layer.
    `failed`: a list that all layers share. Its first entry, a reason, lets all of them run eager.
    """
    # transformers checkpoints inside the forward. Compiled together, a layer whose graph breaks,
    # as it does at attention, would silently stay uncompiled.
    inner = inspect.unwrap(
        type(layer).forward,
        stop=lambda function: function.__code__.co_name != "forward_with_checkpointing",
    )
    eager = partial(inner, layer)
    compiled = compiling.compile_for_all_lengths(eager)

    def checkpointed(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if getattr(layer, "gradient_checkpointing", False) and layer.training:
            return layer._gradient_checkpointing_func(partial(function, **options), *arguments)
        return function(*arguments, **options)

    def forward(*arguments: Any, **options: Any) -> Any:
        if failed:
            return checkpointed(eager, *arguments, **options)
        try:
            if keeps_products:
                return compiled(*arguments, **options)
            return checkpointed(compiled, *arguments, **options)
        except compiling.COMPILE_ERRORS as error:
            name = type(layer).__name__.removeprefix("FSDP")
            reason = compiling.compile_problem(error)
            if is_required:
                raise RunFailed(
                    f"model.compile=true: {name} cannot be compiled here ({reason}) - install the "
                    "missing part, such as a C++ compiler on a CPU, or use model.compile=false"
                ) from error
            failed.append(reason)
            node_logger.info(
                f"Compile: layers run eager, since {name} cannot be compiled ({reason})"
            )
        return checkpointed(eager, *arguments, **options)

    return forward
