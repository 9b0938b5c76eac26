"""Compile functions where this machine can, and run them as they are where it cannot."""

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

import shardtune.distributed.older_torch  # noqa: F401, gives older ones what is used here
from shardtune.errors import first_line
from shardtune.log import logger, node_logger

# Compilers raise these; a compiled function never does.
COMPILE_ERRORS = (TorchDynamoException, FailOnRecompileLimitHit)
_MOST_WORKERS = 32  # PyTorch's own limit per process
_COMPILED = "cuda"  # the type of the devices of `compiled_on_gpus`


def compile_for_all_lengths(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return the function, compiled at its first call, in the thread that calls it."""
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        # Workers of all ranks of a node: as many as it has cores.
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        cores = len(os.sched_getaffinity(0))
        inductor_config.compile_threads = max(1, min(_MOST_WORKERS, cores // ranks))
    # Else Inductor times several kernels for a sum, which add up in different orders, and takes the
    # fastest. As a setting of the process it is lost: PyTorch restores its own behind each graph.
    compile_all: Callable[..., Callable[..., Any]] = torch.compile  # whose types lack some options
    return compile_all(function, dynamic=True, options={"deterministic": True}, **options)


@functools.cache
def can_compile(device: torch.device) -> bool:
    """Return whether this machine compiles for the device; say once where it does not.

    Compiles a line. A missing or broken Triton or C compiler raises errors of many classes, some of
    them only when the kernel is launched.
    """
    is_gpu, problem = device.type == "cuda", ""
    if is_gpu and importlib.util.find_spec("triton") is None:
        problem = "Triton is not installed"  # PyTorch's compiler takes seconds to find that out
    else:
        try:
            compile_for_all_lengths(lambda x: 2 * x + 1)(torch.ones(8, device=device))
        except Exception as error:
            problem = compile_problem(error)
    if problem:
        kind = "GPU" if is_gpu else "CPU"
        logger.info(f"Compile: nothing is compiled for this {kind} ({problem})")
    return not problem


def compile_problem(error: Exception) -> str:
    return first_line(getattr(error, "inner_exception", error))


def compiled_or_eager(
    function: Callable[..., Any],
    name: str,
    device: torch.device,
    eager: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Return the function compiled into one graph for all lengths, else as it is; the log says so.

    It must have no graph breaks: what fails to compile runs again from the beginning. `eager` then
    runs in its place.
    """
    eager = eager or function
    if not can_compile(device):
        return eager
    compiled: Callable[..., Any] | None = compile_for_all_lengths(function, fullgraph=True)

    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal compiled
        if compiled is not None:
            try:
                return compiled(*arguments, **options)
            except COMPILE_ERRORS as error:
                compiled = None
                node_logger.info(f"Compile: {name} runs eager ({compile_problem(error)})")
        return eager(*arguments, **options)

    return call


def compiled_on_gpus(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile the decorated function for the GPU of its tensors; `name` says what it is.

    On CPUs it runs as it is, and so it does on the fake tensors of a plan. A compiled layer takes
    it into its own graph. Autograd sees nothing of it.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.cache
        def on_device(device: torch.device) -> Callable[..., Any]:
            return compiled_or_eager(function, name, device)

        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            if torch.compiler.is_compiling():  # a part of a layer
                return function(*arguments)
            # `.data` hides the base of a view: for another base torch.compile would compile again.
            given = [x.data if isinstance(x, torch.Tensor) else x for x in arguments]
            tensor = next(x for x in given if isinstance(x, torch.Tensor))
            is_real = type(tensor) is torch.Tensor
            if is_real and tensor.device.type == _COMPILED:
                return on_device(tensor.device)(*given)
            return function(*given)

        return call

    return decorate
