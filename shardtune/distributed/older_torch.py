"""What this project uses of PyTorch 2.13, for PyTorch 2.11 and 2.12.

Importing this module gives it to them. A module that uses one of these names imports this one, so
that every process has it: ranks, a run's plan, `shardtune` and spawned workers.
"""

import functools
import importlib.metadata
import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, cast

import torch
import torch.distributed as dist
from packaging.version import Version
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.nn.attention import varlen

TRIED = {"torch": ("2.11", "2.15"), "transformers": ("5.17", "5.24")}  # oldest and newest
_OLDER_NAMES = {
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}


def untried_versions() -> Iterator[str]:
    """Yield a line for each package of another version than those that were tried."""
    for name, (oldest, newest) in TRIED.items():
        version = importlib.metadata.version(name)
        if not Version(oldest).release <= Version(version).release[:2] <= Version(newest).release:
            yield f"{name} {version} was not tried ({oldest} is the oldest, {newest} the newest)"


def _adapt() -> None:
    """Add what is missing. Pre-releases, which containers have, lack only some of it."""
    for name, older in _OLDER_NAMES.items():
        if not hasattr(dist, name):
            setattr(dist, name, getattr(dist, older))
    kernels, attend = cast(Any, varlen), varlen.varlen_attn
    # PyTorch 2.11 does not check heads, though its kernels take fewer heads of keys and values.
    if "enable_gqa" not in inspect.signature(attend).parameters:
        kernels.varlen_attn = lambda *given, enable_gqa, **options: attend(*given, **options)
    if "recompile_limit" not in inspect.signature(torch.compile).parameters:
        torch.compile = _raising_limit(torch.compile)
    state: Any = FSDPState
    if not hasattr(FSDPState(), "_fsdp_param_groups"):  # one group then, or none
        state._fsdp_param_groups = property(
            lambda self: [self._fsdp_param_group] if self._fsdp_param_group else []
        )
    streams: Any = FSDPCommContext
    if not hasattr(streams, "_last_post_reduce_events"):  # there each group waits for its own event
        streams._last_post_reduce_events = {}
    # Guards of a backward that autograd traces in a GPU's own thread have no frame of a user.
    guards: Any = import_module("torch._guards")
    format_frame = guards.format_frame
    guards.format_frame = lambda frame, **options: (frame and format_frame(frame, **options)) or ""


def _raising_limit(compile_all: Callable[..., Any]) -> Any:
    """Return the function with the option `recompile_limit`, which raises that of the process."""

    @functools.wraps(compile_all)
    def call(*given: Any, recompile_limit: int = 0, **options: Any) -> Any:
        config: Any = import_module("torch._dynamo.config")
        config.recompile_limit = max(config.recompile_limit, recompile_limit)
        return compile_all(*given, **options)

    return call


if torch.__version__ < "2.13":
    _adapt()
varlen_attn = varlen.varlen_attn
