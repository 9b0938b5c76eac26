"""What a rank needs for the state of training: parameters, gradients and the optimizer's state."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from shardtune.config import Config
from shardtune.distributed.tensors import DTYPES, to_local
from shardtune.model.build import gradient_dtype
from shardtune.training.low_precision_optim import LowPrecisionAdamW


@dataclass(frozen=True)
class StateBytes:
    """The bytes of this rank's parameters, of their gradients and of the optimizer's state."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def state_bytes(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, config: Config
) -> StateBytes:
    """Compute what the state takes after the first step; nothing is allocated."""
    reduce_dtype = DTYPES[config.model.reduce_dtype]
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    if isinstance(optimizer, LowPrecisionAdamW):
        moments = sum(map(optimizer.state_bytes, trained))
    else:
        moments = 2 * sum(map(_local_bytes, trained))
    return StateBytes(
        parameters=sum(map(_local_bytes, model.parameters())),
        gradients=sum(
            to_local(p).numel() * gradient_dtype(p, reduce_dtype).itemsize for p in trained
        ),
        optimizer=moments + 4 * len(trained),  # each has the number of its step
    )


def _local_bytes(tensor: torch.Tensor) -> int:
    return to_local(tensor).nbytes
