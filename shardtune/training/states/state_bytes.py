"""Count the bytes of a rank's state of training: parameters, gradients, the optimizer's state."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from transformers import PreTrainedModel

from shardtune.distributed.layout import BYTES, Layout
from shardtune.distributed.tensors import DTYPES, to_local
from shardtune.model.fsdp_groups import gathered_groups
from shardtune.training.states.sharded_optimizer import ShardedOptimizer


@dataclass(frozen=True)
class StateBytes:
    """The bytes of this rank's parameters, of their gradients and of the optimizer's state.

    With `optimizer.offload` the first three attributes count the device's part alone.
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
        return self.host_masters + self.host_gradients + self.host_optimizer

    @property
    def saved_optimizer(self) -> int:
        """Return the bytes of the optimizer's state, on the device or in host memory."""
        return self.optimizer + self.host_optimizer


def state_bytes(model: PreTrainedModel, optimizer: ShardedOptimizer, layout: Layout) -> StateBytes:
    """Compute the bytes of the state after the first step; nothing is allocated."""
    trained, gradient_bytes = optimizer.trained, BYTES[layout.gradient_dtype]
    gradients = sum(to_local(p).numel() for p in trained) * gradient_bytes
    states = sum(chain(*map(optimizer.state_sizes, trained)))
    parameters = sum(to_local(p).nbytes for p in model.parameters())
    steps = 4 * len(trained)  # each parameter's `step` is a float32 scalar
    if not layout.offloads:
        return StateBytes(parameters, gradients, states + steps)
    # A group's gradients leave the device while the next group's gradients are reduced.
    groups = gathered_groups(model).values()
    largest = max(sum(to_local(p).numel() for p in g if p.requires_grad) for g in groups)
    master = DTYPES[layout.master_dtype]
    masters = sum(to_local(p).numel() * master.itemsize for p in trained if p.dtype != master)
    in_flight = 2 * largest * gradient_bytes
    return StateBytes(parameters, in_flight, steps, masters, gradients, states)
