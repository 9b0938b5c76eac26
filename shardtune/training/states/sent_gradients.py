"""Gradients that leave the device as the backward leaves a layer, and wait in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch

from shardtune.distributed.tensors import to_local
from shardtune.training.states.replica_shards import OwnedParameters

_ROW = 2048  # elements whose squares are summed up in float32


def row_norms(gradient: torch.Tensor) -> torch.Tensor:
    """Return the norms of short rows of a gradient, float32 [rows]."""
    rows = gradient.view(-1, _ROW) if gradient.numel() % _ROW == 0 else gradient
    return torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float32).flatten()


class HostMemory(Protocol):
    """Holds gradients in host memory. Copies run on the current stream."""

    def write(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Begin to copy this rank's part of a parameter's gradient to host memory."""

    def read(self, parameter: torch.Tensor) -> torch.Tensor:
        """Begin to copy this rank's part back to the device, and return its new memory."""


class SentGradients:
    """Sends the gradients that a step reduces to host memory.

    Attributes:
        norms: the norms of short rows of each gradient, on the device.
    """

    def __init__(self, owned: OwnedParameters, memory: HostMemory) -> None:
        """Send all gradients from now on but that of a weight that two stages have and must sum."""
        self._memory = memory
        self._sent: set[torch.Tensor] = set()
        self._on_their_way: list[torch.Tensor] = []
        self.norms: dict[torch.Tensor, torch.Tensor] = {}
        (self._any_group, _), *_ = owned.by_group
        self._device = self._any_group.device
        self._stream = self._device.Stream()
        for group, parameters in owned.by_group:
            sent = [p for p in parameters if p is not owned.shared]
            group.send_to_host = partial(self._send_reduced, sent)

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return parameter in self._sent

    def _send_reduced(self, parameters: Sequence[torch.Tensor]) -> None:
        reduced = [p for p in parameters if p.grad is not None]
        if reduced:
            self._release()  # frees the previous group's, so that at most two groups wait
            self._stream.wait_stream(self._any_group.reductions)
            with self._device.stream(self._stream), torch.no_grad():
                for parameter in reduced:
                    self._send(parameter)

    def _send(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        gradient, parameter.grad = to_local(parameter.grad), None
        if parameter in self._sent:  # by an earlier micro-batch: the device adds up, in their order
            gradient.add_(self._memory.read(parameter))
        self.norms[parameter] = row_norms(gradient)
        self._memory.write(parameter, gradient)
        self._sent.add(parameter)
        self._on_their_way.append(gradient)

    def _release(self) -> None:
        """Free the memory of sent gradients, for reductions that wait until they have arrived."""
        self._any_group.reductions.wait_stream(self._stream)
        self._on_their_way.clear()

    def finish(self) -> None:
        """Let later kernels of the device wait for all gradients on their way."""
        self._release()
        self._device.current_stream().wait_stream(self._stream)

    def clear(self) -> None:
        """Forget the gradients, after an update has read them."""
        self._sent.clear()
        self.norms.clear()
