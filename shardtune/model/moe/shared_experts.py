"""Run shared experts, which every token has, while tokens travel to routed experts."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn


class SharedExperts:
    """Runs the module of shared experts while tokens travel to the experts of a router.

    A later call of the module on the same input returns that output. If an architecture calls the
    module first, or on another input, it runs only then.
    """

    def __init__(self, module: nn.Module) -> None:
        self._forward = module.forward
        self._ahead: tuple[Any, torch.Tensor] | None = None  # the input's elements, and output
        self._came_first = self._has_another_input = False
        module.forward = torch.compiler.disable(self._output)

    def run_ahead(self, tokens: torch.Tensor) -> None:
        """Compute the output for tokens, [tokens, width], and keep it for the module's call."""
        if not self._came_first and not self._has_another_input:
            self._ahead = _elements(tokens), self._forward(tokens)
        self._came_first = False

    def forget(self) -> None:
        self._ahead = None

    def _output(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._ahead is None:
            self._came_first = True
            return cast(torch.Tensor, self._forward(hidden))
        (elements, output), self._ahead = self._ahead, None
        if elements != _elements(hidden):
            self._has_another_input = True
            return cast(torch.Tensor, self._forward(hidden))
        return output.view(*hidden.shape[:-1], -1)


def _elements(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for tensors with the same memory, until its contents change."""
    storage = tensor.untyped_storage()
    return storage, tensor.storage_offset(), tensor.numel(), tensor._version
