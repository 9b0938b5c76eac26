"""The optimizers on the GPU: against float64 and a CPU, and the time of an update."""

from functools import partial
from typing import Any

import torch
from torch import nn

from distTest.gpu_check.checks import Outcome, is_tiny, require
from distTest.gpu_check.device import seconds
from distTest.gpu_check.exactness import error
from shardtune.distributed.compiling import can_compile
from shardtune.optimizers.rules import AdamW, AdamW8bit
from shardtune.training.states.sharded_optimizer import ShardedOptimizer

# The share of weights that may differ from a CPU's: a product that is rounded once less moves a few
# values across their random thresholds.
_SHARE = 5e-3
_WIDTH = 1408  # the width of an expert of GLM-4.5-Air, 5.5 blocks
_SETTINGS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def optimizer() -> Outcome:
    """Compare the updates, and time them for 1e6 parameters, low precision eager and compiled."""
    problems, figures = list[str](), dict[str, Any]()
    size = 1 << 10 if is_tiny() else 1 << 20
    fused, exact = _fused(size), _exact_update(size)
    figures["fused_error"] = error(fused.cpu() - _start(size), exact - _start(size))
    # Relative to the change, of which float32 keeps few digits.
    if not figures["fused_error"] <= 1e-3:
        problems.append(f"fused AdamW is {figures['fused_error']:.1e} from float64")
    ways = {"eager": False}
    if can_compile(torch.device("cuda")):
        ways["compiled"] = True
    times = {"float32, fused": _fused_seconds}
    texts = [f"fused AdamW is {figures['fused_error']:.1e} from float64"]
    for name, eight_bit in {"bfloat16": False, "adamw8bit": True}.items():
        expected = _low_precision(size, eight_bit, "cpu")
        for way, compiled in ways.items():
            times[f"{name}, {way}"] = partial(_low_precision_seconds, eight_bit, compiled)
            here = _low_precision(size, eight_bit, "cuda", compiled)
            share = (here.cpu() != expected).double().mean().item()
            figures[f"{name}_{way}_differs_from_cpu"] = share
            texts.append(f"{share:.2%} of the weights of {name}, {way}, are not those of a CPU")
            if not share <= _SHARE:
                problems.append(texts[-1])
    numel = _WIDTH << (6 if is_tiny() else 16)
    ms = {way: 1e9 * measure(numel) / numel for way, measure in times.items()}
    figures["ms_per_1e6_parameters"] = ms
    texts.append(f"ms for 1e6 parameters: {', '.join(f'{v:.3g} ({w})' for w, v in ms.items())}")
    if len(ways) == 1:
        texts.append("compiled: skipped, since nothing is compiled here")
    return require(problems, "; ".join(texts), figures)


def _start(size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0))


def _gradient(size: int, step: int) -> torch.Tensor:
    return 1e-3 * torch.randn(size, generator=torch.Generator().manual_seed(step))


def _fused(size: int) -> torch.Tensor:
    weight = nn.Parameter(_start(size).cuda())
    adamw = torch.optim.AdamW([weight], **_SETTINGS, fused=True)
    for step in range(1, 4):
        weight.grad = _gradient(size, step).cuda()
        adamw.step()
    return weight.detach()


def _exact_update(size: int) -> torch.Tensor:
    """Return that weight by AdamW's definition (arXiv 1711.05101), in float64 on the CPU."""
    weight = _start(size).double()
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    (beta1, beta2), lr = _SETTINGS["betas"], _SETTINGS["lr"]
    for step in range(1, 4):
        gradient = _gradient(size, step).double()
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient**2
        weight *= 1 - lr * _SETTINGS["weight_decay"]
        root = (second / (1 - beta2**step)).sqrt() + _SETTINGS["eps"]
        weight -= lr * first / (1 - beta1**step) / root
    return weight


def _low_precision(size: int, eight_bit: bool, device: str, compiled: bool = False) -> torch.Tensor:
    weight = nn.Parameter(_start(size).view(-1, 256).bfloat16().to(device))
    adamw = _adamw(weight, eight_bit, compiled)
    for step in range(1, 4):
        weight.grad = _gradient(size, step).view(-1, 256).bfloat16().to(device)
        adamw.step()
    return weight.detach()


def _adamw(weight: nn.Parameter, eight_bit: bool, compiled: bool) -> ShardedOptimizer:
    groups = [{"params": [("weight", weight)], "weight_decay": _SETTINGS["weight_decay"]}]
    settings = {name: _SETTINGS[name] for name in ("lr", "betas", "eps")}
    adamw = ShardedOptimizer(groups, AdamW8bit if eight_bit else AdamW, seed=1, **settings)
    if compiled:
        adamw.compile_update()
    return adamw


def _fused_seconds(numel: int) -> float:
    weight = _with_gradient(numel, torch.float32)
    return seconds(torch.optim.AdamW([weight], **_SETTINGS, fused=True).step, 5)


def _low_precision_seconds(eight_bit: bool, compiled: bool, numel: int) -> float:
    weight = _with_gradient(numel, torch.bfloat16)
    return seconds(_adamw(weight, eight_bit, compiled).step, 5)


def _with_gradient(numel: int, dtype: torch.dtype) -> nn.Parameter:
    # Random values: equal codes would be looked up at one address, many times faster.
    values = torch.randn(2, numel // _WIDTH, _WIDTH, device="cuda", dtype=dtype)
    weight = nn.Parameter(0.02 * values[0])
    weight.grad = 1e-3 * values[1]
    return weight
