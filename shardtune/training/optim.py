"""The optimizer, the schedule of its learning rate, and the global norm of the gradients."""

import math
from collections.abc import Iterable, Mapping
from itertools import chain

import numpy as np
import torch
from torch import nn

from shardtune.config import Config, SchedulerConfig
from shardtune.distributed import compiling
from shardtune.distributed.tensors import DTYPES, to_local
from shardtune.distributed.world import World
from shardtune.errors import AGAIN, RunFailed, first_line
from shardtune.log import logger
from shardtune.metrics_schema import RefusedEntry
from shardtune.optimizers.rules import find_rule
from shardtune.training.context import TrainContext
from shardtune.training.observers.metrics import StepStats
from shardtune.training.observers.step_log import inspect_command
from shardtune.training.states.host_states import HostStates, row_norms
from shardtune.training.states.replica_shards import OwnedParameters
from shardtune.training.states.sharded_optimizer import ShardedOptimizer

_NORM_PIECE = 1 << 24  # elements that are float64 at the same time


def build_optimizer(
    owned: OwnedParameters, config: Config, host: HostStates | None = None
) -> ShardedOptimizer:
    """Build the optimizer of the sharded master weights, with weight decay for matrices alone.

    `host` holds its states, if the device does not.
    """
    settings, layout, named = config.optimizer, owned.layout, owned.by_name.items()
    rule = find_rule(layout.optimizer, layout.master_dtype)
    decayed = {
        "params": [(name, p) for name, p in named if p.dim() >= 2],
        "weight_decay": settings.weight_decay,
    }
    others = {"params": [(name, p) for name, p in named if p.dim() < 2]}
    optimizer = ShardedOptimizer(
        (group for group in (decayed, others) if group["params"]),
        rule,
        config.run.seed,
        DTYPES[layout.master_dtype],
        host,
        **{key: getattr(settings, key) for key in ("lr", *rule.hyperparameters)},
    )
    if host:
        host.reserve(chain(*map(optimizer.state_sizes, optimizer.trained)))
    # A step ends when every replica has the new weights.
    optimizer.register_step_post_hook(owned.gather)
    return optimizer


def compile_update(optimizer: ShardedOptimizer, config: Config, world: World) -> None:
    """Compile an update that is not fused: on GPUs always, on CPUs with model.compile=true.

    Collective. If a rank cannot compile, all ranks update eagerly, or with model.compile=true all
    raise RunFailed.
    """
    # All ranks decide alike: a compiled update rounds otherwise, and parts of one weight must not
    # be updated in two ways.
    is_asked_for, device = config.model.compile is True, world.device
    if optimizer.rule.is_fused or not (is_asked_for or device.type == "cuda"):
        return
    problem = ""
    if not (is_asked_for or compiling.can_compile(device)):
        problem = "nothing is compiled there"
    else:
        try:
            optimizer.compile_update()
        except Exception as error:  # compilers, linkers and drivers raise anything
            problem = first_line(error)
    per_rank = world.all_gather_json(problem)
    if not any(per_rank):
        return
    optimizer.update_eagerly()
    rank = next(rank for rank, problem in enumerate(per_rank) if problem)
    if is_asked_for:
        raise RunFailed(
            f"model.compile=true: the optimizer cannot be compiled here ({per_rank[rank]}) - "
            "install the missing part, such as a C++ compiler on a CPU, or use model.compile=false"
        )
    if compiling.can_compile(device):  # if not, `can_compile` has logged it
        logger.info(f"Compile: the weights' update runs eager (rank {rank}: {per_rank[rank]})")


def learning_rate(step: int, total_steps: int, peak: float, config: SchedulerConfig) -> float:
    """Return the learning rate of step `step` (from 1).

    It rises in a line over the first ceil(warmup_ratio x total) steps. Then it falls as half a
    cosine or a line to min_lr_ratio x peak, at the last step; with `constant` it stays at `peak`.
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


def squared_gradients(
    parameters: Iterable[nn.Parameter], host: HostStates | None = None
) -> torch.Tensor:
    """Return the sum of the squares of this rank's part of all gradients, a float64 scalar."""
    # A CPU's float32 sum of a large tensor is wrong by 1%, so a CPU sums copies in float64, made
    # piece by piece. A GPU reads each gradient once: it takes norms of short rows in float32, right
    # to 1e-6, and sums their squares in float64.
    if host:
        host.sent.finish()
    norms: list[torch.Tensor] = []
    for parameter in parameters:
        if host and parameter in host.sent:
            norms.append(host.sent.norms[parameter])
        elif parameter.grad is not None:
            norms += _norms(to_local(parameter.grad))
    return torch.cat(norms).double().square().sum()


def _norms(gradient: torch.Tensor) -> list[torch.Tensor]:
    if gradient.is_cuda:
        return [row_norms(gradient)]
    pieces = gradient.flatten().split(_NORM_PIECE)
    return [torch.linalg.vector_norm(piece, dtype=torch.float64)[None] for piece in pieces]


def clip_gradients(optimizer: ShardedOptimizer, max_norm: float, norm: float) -> None:
    """Let the next step scale all gradients by max_norm / norm if the global norm is larger."""
    # PyTorch computes this factor in float32, on the device.
    inverse = 1 / (np.float32(norm) + np.float32(1e-6))
    optimizer.gradient_factor = min(float(np.float32(max_norm) * inverse), 1.0)


def require_finite(context: TrainContext, step: int, stats: StepStats) -> None:
    loss, norm, world = stats.loss, stats.grad_norm, context.run.world
    if math.isfinite(loss) and math.isfinite(norm):
        return
    context.metrics.write(RefusedEntry(kind="refused", step=step, loss=loss, grad_norm=norm))
    broken = first_non_finite(context.model, context.owned.by_name, context.host)
    per_rank = world.all_gather_json(broken and (broken[0], world.stage, *broken[1:]))
    # A broken weight breaks gradients everywhere, so that weights are blamed first.
    *_, blamed = min(filter(None, per_rank), default=["no single tensor"])
    raise RunFailed(
        f"step {step} was not taken: its loss is {loss:.6g} and its gradient norm {norm:.6g}, "
        f"first in {blamed} - look at this step's data "
        f"({inspect_command(context.run.config, step)}) and at the weights that the run started "
        f"from, or lower optimizer.lr; {AGAIN}"
    )


def first_non_finite(
    model: nn.Module, owned: Mapping[str, nn.Parameter], host: HostStates | None = None
) -> tuple[bool, int, str] | None:
    """Return the first weight, else gradient, with a NaN or an infinity in this rank's shard.

    Returns whether it is a gradient, its number, equal on all ranks of a stage, and its name.
    """
    if host:
        host.wait()
    weights = [(f"the weight {name}", p) for name, p in model.named_parameters()]
    gradients = [
        (f"the gradient of {name}", host.gradient(p) if host else p.grad)
        for name, p in owned.items()
    ]
    for number, (name, tensor) in enumerate(weights + gradients):
        if tensor is not None and not to_local(tensor).isfinite().all():
            return number >= len(weights), number, name
    return None
