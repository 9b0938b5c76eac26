"""What a rank needs for the state of training: parameters, gradients and the optimizer's state."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import torch
from transformers import PreTrainedModel

from shardtune.distributed.layout import BYTES, Layout
from shardtune.distributed.tensors import DTYPES, to_local
from shardtune.model.fsdp_groups import gathered_groups
from shardtune.training.states.sharded_optimizer import ShardedOptimizer


@dataclass(frozen=True)
class StateBytes:
    """The bytes of this rank's parameters, of their gradients and of the optimizer's state.

    With `optimizer.offload` they are what the device has of these at once.
    """

    parameters: int
    gradients: int
    optimizer: int
    host_masters: int = 0
    host_gradients: int = 0
    host_optimizer: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    @property
    def host(self) -> int:
        """Bytes of pinned host memory."""
        return self.host_masters + self.host_gradients + self.host_optimizer

    @property
    def saved_optimizer(self) -> int:
        """Bytes of the optimizer's state, wherever they are."""
        return self.optimizer + self.host_optimizer


def state_bytes(model: PreTrainedModel, optimizer: ShardedOptimizer, layout: Layout) -> StateBytes:
    """Compute what the state takes after the first step; nothing is allocated."""
    trained, gradient_bytes = optimizer.trained, BYTES[layout.gradient_dtype]
    gradients = sum(to_local(p).numel() for p in trained) * gradient_bytes
    states = sum(chain(*map(optimizer.state_sizes, trained)))
    parameters = sum(map(_local_bytes, model.parameters()))
    steps = 4 * len(trained)  # each has the number of its step
    if not layout.offloads:
        return StateBytes(parameters, gradients, states + steps)
    # A group's gradients leave the device while those of the next one are reduced.
    groups = (filter(_is_trained, group) for group in gathered_groups(model).values())
    largest = max(sum(to_local(p).numel() for p in group) for group in groups)
    master = DTYPES[layout.master_dtype]
    masters = sum(to_local(p).numel() * master.itemsize for p in trained if p.dtype != master)
    in_flight = 2 * largest * gradient_bytes
    return StateBytes(parameters, in_flight, steps, masters, gradients, states)


def _is_trained(parameter: torch.Tensor) -> bool:
    return parameter.requires_grad


def _local_bytes(tensor: torch.Tensor) -> int:
    return to_local(tensor).nbytes
