"""The optimizer, the schedule of its learning rate, and the global norm of the gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain

import torch
from torch.nn.utils import clip_grads_with_norm_
from transformers import PreTrainedModel

from shardtune.config import OptimizerConfig, SchedulerConfig
from shardtune.distributed.tensors import to_local
from shardtune.distributed.world import World
from shardtune.errors import AGAIN, RunFailed

_NORM_PIECE = 1 << 24  # elements


def build_optimizer(model: PreTrainedModel, config: OptimizerConfig) -> torch.optim.AdamW:
    """Build AdamW over the sharded master weights, with weight decay for matrices alone."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )


def learning_rate(step: int, total_steps: int, peak: float, config: SchedulerConfig) -> float:
    """Return the learning rate of step `step` (from 1).

    It rises as step / warmup over the first ceil(warmup_ratio x total) steps. Then it falls as half
    a cosine or a line to min_lr_ratio x peak, at the last step; with `constant` it stays at `peak`.
    """
    warmup = warmup_steps(total_steps, config)
    if step <= warmup:
        return peak * step / warmup
    if config.name == "constant":
        return peak
    progress = (step - warmup) / max(1, total_steps - warmup)
    left = 1 - progress if config.name == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return peak * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)


def warmup_steps(total_steps: int, config: SchedulerConfig) -> int:
    return math.ceil(config.warmup_ratio * total_steps)


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = value


def squared_gradients(model: PreTrainedModel) -> torch.Tensor:
    """Return the sum of the squares of this rank's part of all gradients, a float64 scalar.

    In float64 because on a CPU the float32 sum of a large tensor is wrong by a percent; in pieces
    because each is copied to float64.
    """
    pieces = [
        torch.linalg.vector_norm(piece, dtype=torch.float64)
        for parameter in model.parameters()
        if parameter.grad is not None
        for piece in to_local(parameter.grad).flatten().split(_NORM_PIECE)
    ]
    return torch.stack(pieces).square().sum()


def clip_gradients(model: PreTrainedModel, max_norm: float, norm: float) -> None:
    """Scale all gradients by max_norm / norm if `norm`, the global one, is above `max_norm`."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    # Filled on the device: the host would wait for a copy.
    on_device = torch.full((), norm, dtype=torch.float32, device=parameters[0].device)
    clip_grads_with_norm_(parameters, max_norm, on_device)


def require_finite(
    step: int, loss: float, grad_norm: float, model: PreTrainedModel, world: World
) -> None:
    """Refuse a step whose loss or gradient norm is not finite, before its update.

    Collective where it refuses.

    Raises:
        RunFailed: on every rank, with the name of a tensor.
    """
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return
    weights, gradients = zip(*world.all_gather_json(non_finite_tensors(model)), strict=True)
    blamed, remedy = "in no single tensor", "look at this step's data"
    if name := next(chain.from_iterable(weights), None):
        blamed, remedy = f"the weight {name} is not finite", "start from weights that are"
    elif name := next(chain.from_iterable(gradients), None):
        blamed = f"first in the gradient of {name}"
        remedy = "lower optimizer.lr or look at this step's data"
    raise RunFailed(
        f"step {step} was not taken: its loss is {loss:.6g} and its gradient norm "
        f"{grad_norm:.6g}, "
        f"{blamed} - {remedy}; {AGAIN}"
    )


def non_finite_tensors(model: PreTrainedModel) -> tuple[list[str], list[str]]:
    """Return the parameters with a NaN or an infinity in this rank's shard, and in its gradient."""

    def names(tensors: Iterable[tuple[str, torch.Tensor | None]]) -> list[str]:
        return [
            name
            for name, tensor in tensors
            if tensor is not None and not to_local(tensor).isfinite().all()
        ]

    return names(model.named_parameters()), names(
        (name, p.grad) for name, p in model.named_parameters()
    )
