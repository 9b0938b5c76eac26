"""The optimizer, the schedule of its learning rate, and the global norm of the gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_

from shardtune.config import Config, SchedulerConfig
from shardtune.distributed.tensors import to_local
from shardtune.distributed.world import World
from shardtune.errors import AGAIN, RunFailed
from shardtune.model.experts import is_spread
from shardtune.training.low_precision_optim import LowPrecisionAdamW
from shardtune.training.metrics import StepStats
from shardtune.training.replica_shards import OwnedParameters

_NORM_PIECE = 1 << 24  # elements


def build_optimizer(owned: OwnedParameters, config: Config) -> torch.optim.Optimizer:
    """Build AdamW over the sharded master weights, with weight decay for matrices alone.

    Its step ends when every replica has the new weights.
    """
    optimizer = _build_adamw(owned.by_name, config)
    optimizer.register_step_post_hook(owned.gather)
    return optimizer


def _build_adamw(named: Mapping[str, nn.Parameter], config: Config) -> torch.optim.Optimizer:
    settings, is_lora = config.optimizer, config.lora.rank is not None
    decayed = {
        "params": [(name, p) for name, p in named.items() if p.dim() >= 2],
        "weight_decay": settings.weight_decay,
    }
    others = {"params": [(n, p) for n, p in named.items() if p.dim() < 2], "weight_decay": 0.0}
    groups = [group for group in (decayed, others) if group["params"]]
    # Adapters are float32, with float32 moments.
    if is_lora or (settings.name == "adamw" and config.model.master_dtype == "float32"):
        return torch.optim.AdamW(
            groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True
        )
    return LowPrecisionAdamW(
        groups,
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        seed=config.run.seed,
        eight_bit=settings.name == "adamw8bit",
        compiled=config.model.compile is True,
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


def squared_gradients(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """Return the sum of the squares of this rank's part of all gradients, a float64 scalar.

    In float64 because on a CPU the float32 sum of a large tensor is wrong by a percent; in pieces
    because each is copied to float64.
    """
    pieces = [
        torch.linalg.vector_norm(piece, dtype=torch.float64)
        for parameter in parameters
        if parameter.grad is not None
        for piece in to_local(parameter.grad).flatten().split(_NORM_PIECE)
    ]
    return torch.stack(pieces).square().sum()


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, norm: float) -> None:
    """Scale all gradients by max_norm / norm if `norm`, the global one, is above `max_norm`."""
    parameters = [p for p in parameters if p.grad is not None]
    # Filled on the device: the host would wait for a copy.
    on_device = torch.full((), norm, dtype=torch.float32, device=parameters[0].device)
    # PyTorch scales no gradients of different meshes together.
    spread = [p for p in parameters if is_spread(p)]
    for group in (spread, [p for p in parameters if not is_spread(p)]):
        clip_grads_with_norm_(group, max_norm, on_device)


def require_finite(
    step: int, stats: StepStats, model: nn.Module, owned: OwnedParameters, world: World
) -> None:
    """Refuse a step whose loss or gradient norm is not finite, before its update.

    Collective where it refuses.

    Raises:
        RunFailed: on every rank, with the name of a tensor.
    """
    if math.isfinite(stats.loss) and math.isfinite(stats.grad_norm):
        return
    found = first_non_finite(model, owned.by_name)
    per_rank = world.all_gather_json(found and (found[0], world.stage, *found[1:]))
    *_, blamed = min(filter(None, per_rank), default=["no single tensor"])
    raise RunFailed(
        f"step {step} was not taken: its loss is {stats.loss:.6g} and its gradient "
        f"norm {stats.grad_norm:.6g}, first in {blamed} - look at this step's data and at the "
        f"weights that the run started from, or lower optimizer.lr; {AGAIN}"
    )


def first_non_finite(
    model: nn.Module, owned: Mapping[str, nn.Parameter]
) -> tuple[bool, int, str] | None:
    """Return the first weight, else gradient, with a NaN or an infinity in this rank's shard.

    Before its name stand whether it is a gradient, and its number, alike on all ranks of a stage.
    """
    weights = [(f"the weight {name}", p) for name, p in model.named_parameters()]
    gradients = [(f"the gradient of {name}", p.grad) for name, p in owned.items()]
    for number, (name, tensor) in enumerate(weights + gradients):
        if tensor is not None and not to_local(tensor).isfinite().all():
            return number >= len(weights), number, name
    return None
