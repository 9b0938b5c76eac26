"""Measure how evenly routers use their experts, and the ranks that hold these.

All tokens of a step's forwards count, on all ranks; layers that are computed again and evaluations
count nothing. The counts reach the host with the step's other numbers, without a further wait.
"""

from functools import partial

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from shardtune.distributed.world import World
from shardtune.log import logger
from shardtune.metrics_schema import ExpertsEntry, LayerBalance
from shardtune.model.moe.token_exchange import count_tokens
from shardtune.model.parts import stacked_experts
from shardtune.training.observers.metrics import Metrics, StepEnded, StepObserver

_STARVING_STEPS = 100


class ExpertBalance(StepObserver):
    """Counts and reports the tokens of each expert. Does nothing in a model without experts."""

    def __init__(
        self, model: PreTrainedModel, whole: PreTrainedModel, metrics: Metrics, world: World
    ) -> None:
        """`whole`: the model of all stages, on meta. Each rank counts in its own layers."""
        self._metrics, self._device = metrics, world.device
        self._degree = world.expert_mesh["expert"].size() if world.expert_mesh else 1
        # Tokens of each expert of a layer; the last element: choices without an expert.
        self._counts: dict[str, torch.Tensor] = {}
        # Of each expert of a layer, the steps since it last had tokens.
        self._steps_without: dict[str, np.ndarray] = {}
        modules = dict(model.named_modules())
        for name, _, number in stacked_experts(whole):
            counts = torch.zeros(number + 1, dtype=torch.int64, device=world.device)
            self._counts[name], self._steps_without[name] = counts, np.zeros(number, dtype=int)
            if name in modules:
                modules[name].register_forward_pre_hook(partial(_count, counts))

    def take_counts(self) -> torch.Tensor:
        """Return this rank's tokens of each expert since the last call: float64, on the device."""
        layers = [counts[:-1].clone() for counts in self._counts.values()]
        for counts in self._counts.values():
            counts.zero_()
        # A dense model gathers an empty tensor, on the device of the step's other numbers.
        empty = torch.empty(0, dtype=torch.float64, device=self._device)
        return torch.cat([empty, *layers])

    def step_ended(self, ended: StepEnded) -> None:
        if not self._counts:
            return
        layers, tokens = [], ended.stats.expert_tokens
        ends = np.cumsum([len(steps) for steps in self._steps_without.values()])
        per_layer = np.split(tokens, ends[:-1], axis=1)
        for name, layer_tokens in zip(self._counts, per_layer, strict=True):
            layers.append(balance(name, layer_tokens, self._degree))
            idle = layer_tokens.sum(0) == 0
            self._steps_without[name] = np.where(idle, self._steps_without[name] + 1, 0)
        self._warn()
        if ended.is_due:
            self._metrics.write(ExpertsEntry(kind="experts", step=ended.step.number, layers=layers))
            logger.info(_summary(layers))

    def _warn(self) -> None:
        starving = [
            f"expert {expert} of {name}"
            for name, steps in self._steps_without.items()
            for expert in np.flatnonzero(steps == _STARVING_STEPS)
        ]
        if starving:
            logger.warning(
                f"{len(starving)} experts have had no tokens for {_STARVING_STEPS} steps, "
                f"first {starving[0]} - they learn nothing; if they had tokens at first, lower "
                "optimizer.lr, raise train.gradient_accumulation_steps, or add more varied data"
            )


def balance(layer: str, tokens: np.ndarray, degree: int) -> LayerBalance:
    """Return how evenly the tokens of one layer, [groups, experts], are spread.

    `degree`: the number of ranks that share the experts of a group; with 1 no ranks are compared.
    """
    per_expert = tokens.sum(0)
    share = per_expert[per_expert > 0] / max(1, per_expert.sum())
    entropy = -(share * np.log(share)).sum() / np.log(max(2, len(per_expert)))
    values = LayerBalance(
        layer=layer,
        tokens=per_expert.astype(int).tolist(),
        entropy=float(max(0.0, entropy)),
        without_tokens=int((per_expert == 0).sum()),
    )
    if degree > 1:
        per_rank = tokens.reshape(len(tokens), degree, -1).sum(2)
        values["rank_imbalance"] = float((per_rank.max(1) / per_rank.mean(1).clip(1e-9)).max())
    return values


def _summary(layers: list[LayerBalance]) -> str:
    entropies = [layer["entropy"] for layer in layers]
    lowest = min(layers, key=lambda layer: layer["entropy"])
    without = sum(layer["without_tokens"] for layer in layers)
    fields = [
        f"Router entropy {np.mean(entropies):.3f} (lowest {lowest['entropy']:.3f}, "
        f"{lowest['layer']})",
        f"{without} of {sum(len(layer['tokens']) for layer in layers)} experts without tokens",
    ]
    if "rank_imbalance" in lowest:
        worst = max(layers, key=lambda layer: layer["rank_imbalance"])
        fields.append(f"fullest rank {worst['rank_imbalance']:.2f} x the mean ({worst['layer']})")
    return " | ".join(fields)


def _count(counts: torch.Tensor, module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
    if module.training:
        count_tokens(counts, arguments[1])
