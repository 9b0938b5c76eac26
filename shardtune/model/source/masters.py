"""Master weights on their way to host memory, while the device keeps the weights rounded."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PreTrainedModel, modeling_utils

from shardtune.distributed.tensors import copy_slice, sharded_as, slice_like, to_local
from shardtune.model.parts import ROWS


def keep_master(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Attach a rank's slice of a master weight to the rounded weight on the device."""
    rounded: Any = parameter
    rounded.master = values


def take_master(parameter: nn.Parameter) -> torch.Tensor | None:
    """Return the attached master, if there is one, and detach it."""
    return vars(parameter).pop("master", None)


@contextmanager
def rounded_when_read(stored: torch.dtype) -> Iterator[None]:
    """Round each weight that is loaded into a model to this dtype, and attach its master."""
    # transformers sets one parameter after the other, so that the device has one at a time in all
    # its digits. But first it would allocate as much memory as all masters need, to warm up.

    def hook(module: nn.Module, name: str, parameter: Any) -> nn.Parameter | None:
        is_read = isinstance(parameter, DTensor) and not parameter.is_meta
        if not (is_read and parameter.requires_grad) or parameter.dtype == stored:
            return None
        local = to_local(parameter).detach()
        rounded = nn.Parameter(sharded_as(parameter, local.to(stored)))
        vars(rounded).update(vars(parameter))  # transformers' mark that the parameter is read
        keep_master(rounded, local.cpu())
        return rounded

    handle = register_module_parameter_registration_hook(cast(Any, hook))
    warm_up = modeling_utils.caching_allocator_warmup
    modeling_utils.caching_allocator_warmup = lambda *_: None
    try:
        yield
    finally:
        modeling_utils.caching_allocator_warmup = warm_up
        handle.remove()


@torch.no_grad()
def draw_weights(
    model: PreTrainedModel, seed: int, device: torch.device, master: torch.dtype | None = None
) -> None:
    """Give a sharded model on meta the architecture's own random initialisation.

    `master`: the dtype in which trained weights are drawn, if not their own.
    """
    # Each module is drawn whole on the CPU, from (seed, its name) alone, and each rank keeps its
    # slices: the model is the same on any number of ranks, and one module at a time is in memory.
    model.to_empty(device=device)
    model.tie_weights(recompute_mapping=False)  # with the rows that `lora.rows` has tied
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
        if ROWS in sharded:
            rows = [cast(Any, module).weight[run] for run in cast(Any, module).runs]
            module.get_parameter(ROWS).data.copy_(torch.cat(rows))
        for key, parameter in sharded.items():
            whole = module.get_parameter(key)
            module.register_parameter(key, parameter)
            copy_slice(whole, parameter)
            if whole.dtype != parameter.dtype:
                keep_master(parameter, slice_like(whole, parameter).detach().clone())
