"""Master weights on their way to host memory, while the device keeps the weights rounded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import modeling_utils

from shardtune.distributed.tensors import sharded_as, to_local


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
