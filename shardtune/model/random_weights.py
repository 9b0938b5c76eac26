"""Random weights for a sharded model: the same on any number of ranks."""

from __future__ import annotations

import hashlib

import torch
from torch import nn
from transformers import PreTrainedModel

from shardtune.distributed.tensors import copy_slice, slice_like
from shardtune.model.source.masters import keep_master


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
