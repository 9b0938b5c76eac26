"""Keep the inputs of layers in host memory between their forward and their backward.

Full activation checkpointing keeps the input of each layer and nothing else. Here it goes to host
memory while its layer computes, and comes back while the layer behind it is computed again, so that
a GPU holds two of them. Copies change no bit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel

from shardtune.distributed.host_memory import pinned_zeros, unpin


class Copies(Protocol):
    """Copies tensors to host memory and back while the device computes."""

    def to_host(self, tensor: torch.Tensor) -> Any:
        """Begin to copy a tensor, and return its copy."""

    def to_device(self, copy: Any) -> torch.Tensor:
        """Begin to copy a tensor back."""

    def wait(self) -> None:
        """Let later kernels of the device wait for all copies that have begun."""

    def drop(self, copy: Any) -> None:
        """Use the memory of a copy again, which the device may still read."""


class _LayerInput:
    """Holds the copy of one input in host memory and, for a while, the tensor on the device."""

    def __init__(self, copy: Any, tensor: torch.Tensor, previous: _LayerInput | None) -> None:
        self.copy = copy
        self.tensor: torch.Tensor | None = tensor
        # A weak reference: autograd alone knows how long an input is needed.
        self._previous = weakref.ref(previous) if previous else None

    @property
    def previous(self) -> _LayerInput | None:
        """Return the input of the layer before, unless that layer has been computed again."""
        return self._previous() if self._previous else None


class LayerInputs:
    """Holds the inputs of a model's layers in host memory until each layer is computed again."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._last: weakref.ref[_LayerInput] | None = None

    def around(self, checkpointed: Callable[..., Any]) -> Callable[..., Any]:
        """Return a checkpointing function of transformers' that keeps inputs in host memory."""

        def forward(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
            # Tensors without a gradient, such as masks, stay: all layers share them.
            inputs = {_storage(x) for x in arguments if torch.is_tensor(x) and x.requires_grad}

            def keep(tensor: torch.Tensor) -> Any:
                return self._keep(tensor) if _storage(tensor) in inputs else tensor

            with saved_tensors_hooks(keep, self._restore):
                return checkpointed(function, *arguments, **options)

        return forward

    def _keep(self, tensor: torch.Tensor) -> _LayerInput:
        last = self._last() if self._last else None
        if last:
            # The copy has had a whole layer's time. The device must not reuse the memory of the
            # tensor before the copy has ended.
            self._copies.wait()
            last.tensor = None
        kept = _LayerInput(self._copies.to_host(tensor), tensor, last)
        weakref.finalize(kept, self._copies.drop, kept.copy)
        self._last = weakref.ref(kept)
        return kept

    def _restore(self, kept: _LayerInput | torch.Tensor) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        # The input of the last layer has not left the device.
        tensor = self._copies.to_device(kept.copy) if kept.tensor is None else kept.tensor
        self._copies.wait()
        kept.tensor = None
        # The input of the layer before comes back while this layer computes.
        if (previous := kept.previous) and previous.tensor is None:
            previous.tensor = self._copies.to_device(previous.copy)
        return tensor


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class PinnedCopies:
    """Copies in pinned host memory, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._free: list[torch.Tensor] = []  # uint8

    def to_host(self, tensor: torch.Tensor) -> _PinnedCopy:
        buffer = self._take(tensor.nbytes)
        copy = _PinnedCopy(buffer, buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            copy.values.copy_(tensor, non_blocking=True)
        return copy

    def to_device(self, copy: _PinnedCopy) -> torch.Tensor:
        # The tensor is allocated on the computing stream, whose earlier kernels may still use this
        # memory. So the copy waits for them.
        tensor = torch.empty_like(copy.values, device=self._stream.device)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            tensor.copy_(copy.values, non_blocking=True)
        return tensor

    def wait(self) -> None:
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def drop(self, copy: _PinnedCopy) -> None:
        self._free.append(copy.buffer)  # the next copy into it comes later on the stream

    def _take(self, n_bytes: int) -> torch.Tensor:
        """Return pinned memory of `n_bytes` or more. Soon all buffers fit the longest row."""
        if not self._free:
            return _pinned(n_bytes)
        self._free.sort(key=len)
        buffer = self._free.pop()
        if len(buffer) >= n_bytes:
            return buffer
        self._stream.synchronize()
        unpin(buffer)
        return _pinned(n_bytes)


class _PinnedCopy(NamedTuple):
    buffer: torch.Tensor
    values: torch.Tensor


def _pinned(n_bytes: int) -> torch.Tensor:
    return pinned_zeros(n_bytes, "the layers' inputs", "use model.activation_checkpointing=full")


def keep_inputs_on_host(model: PreTrainedModel, copies: Copies) -> None:
    """Let each layer whose activations are computed again have its input in host memory."""
    inputs = LayerInputs(copies)
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            layer: Any = module
            layer._gradient_checkpointing_func = inputs.around(layer._gradient_checkpointing_func)
