"""AdamW of float32 weights and moments in host memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from shardtune.distributed.tensors import sharded_as, to_local
from shardtune.training.host_states import HostStates, piece_rows


class HostAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW(fused=True), piece by piece on the device that the parameters are on.

    Its state is that of PyTorch's, with the moments in host memory.

    Attributes:
        gradient_factor: multiplies each gradient where the next step reads it.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        host: HostStates,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.host, self.gradient_factor = host, 1.0

    def new_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the state of a parameter before its first step."""
        shape = to_local(parameter).shape
        state = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device)}
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = sharded_as(parameter, self.host.zeros(shape, dtype=torch.float32))
        return state

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient. Takes no closure."""
        assert closure is None
        with self.host.updating():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if self.host.gradient(parameter) is not None:
                        self._update(parameter, group)

    def _update(self, parameter: Any, group: dict[str, Any]) -> None:
        if parameter not in self.state:
            self.state[parameter] = self.new_state(parameter)
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        state["step"] += 1
        tensors = {"weight": parameter, "gradient": self.host.gradient(parameter)}
        tensors |= {name: state[name] for name in ("exp_avg", "exp_avg_sq")}
        columns = {name: to_local(each).view(-1) for name, each in tensors.items()}
        numel, size = len(columns["weight"]), piece_rows(1)
        pieces = [slice(begin, begin + size) for begin in range(0, numel, size)]
        for part in self.host.on_device(parameter, columns, pieces):
            if self.gradient_factor < 1:
                part["gradient"].mul_(self.gradient_factor)
            torch._fused_adamw_(
                [part["weight"]],
                [part["gradient"]],
                [part["exp_avg"]],
                [part["exp_avg_sq"]],
                [],
                [state["step"]],
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )
