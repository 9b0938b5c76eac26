"""The optimizer, its schedule, and the norm that gradients are clipped by."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_
from transformers import PreTrainedModel

from shardtune.config import OptimizerConfig, SchedulerConfig
from shardtune.distributed.world import World
from shardtune.errors import AGAIN, RunFailed

_NORM_PIECE = 1 << 24  # elements


def build_optimizer(model: PreTrainedModel, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the sharded master weights; weight decay reaches matrices and not biases or norms."""
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
    """The learning rate of step `step` (from 1).

    It rises as step / warmup over the first ceil(warmup_ratio x total) steps, then falls to min_lr_ratio x peak,
    reached at the last step: half a cosine, a line, or not at all.
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
    """The sum of the squares of this rank's part of all gradients: float64, a scalar.

    In pieces, because each is copied to float64: on a CPU the float32 sum of a large tensor is wrong by a percent.
    """
    pieces = [
        torch.linalg.vector_norm(piece, dtype=torch.float64)
        for parameter in model.parameters()
        if parameter.grad is not None
        for piece in _local(parameter.grad).flatten().split(_NORM_PIECE)
    ]
    return torch.stack(pieces).square().sum()


def clip_gradients(model: PreTrainedModel, max_norm: float, norm: torch.Tensor) -> None:
    """Scale all gradients by max_norm / norm where the global norm exceeds it."""
    clip_grads_with_norm_([p for p in model.parameters() if p.grad is not None], max_norm, norm)


def require_finite(
    step: int, loss: float, grad_norm: float, model: PreTrainedModel, world: World
) -> None:
    """Look at what all ranks share of a step before its update.

    Raises:
        RunFailed: on every rank, naming a tensor, if the loss or the norm is not finite.
    """
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return
    weights, gradients = zip(*world.all_gather_json(non_finite_tensors(model)), strict=True)
    blamed, remedy = "in no single tensor", "look at this step's data"
    if names := [name for of_rank in weights for name in of_rank]:
        blamed, remedy = f"the weight {names[0]} is not finite", "start from weights that are"
    elif names := [name for of_rank in gradients for name in of_rank]:
        blamed, remedy = (
            f"first in the gradient of {names[0]}",
            "lower optimizer.lr or look at this step's data",
        )
    raise RunFailed(
        f"step {step} was not taken: its loss is {loss} and its gradient norm {grad_norm}, {blamed} - {remedy}; {AGAIN}"
    )


def non_finite_tensors(model: PreTrainedModel) -> tuple[list[str], list[str]]:
    """The parameters of which this rank's slice has a NaN or an infinity, and those of which its gradient has."""

    def names(tensors: Iterable[tuple[str, torch.Tensor | None]]) -> list[str]:
        return [
            name
            for name, tensor in tensors
            if tensor is not None and not _local(tensor).isfinite().all()
        ]

    return names(model.named_parameters()), names(
        (name, p.grad) for name, p in model.named_parameters()
    )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
