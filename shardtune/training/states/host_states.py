"""Master weights, moments and gradients in pinned host memory (`optimizer.offload`).

A GPU keeps its slices of the weights in the compute dtype. An update brings pieces of masters,
moments and gradients to the GPU and takes them back, so that copies both ways and kernels overlap.
Kernels and numbers equal those of a run without offload. Gradients leave the device as the backward
leaves a layer.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch

from shardtune.distributed.host_memory import pinned_zeros
from shardtune.distributed.tensors import DTYPES, sharded_as, to_local
from shardtune.training.states.replica_shards import OwnedParameters

PIECE = 1 << 22  # elements of a piece
PIECES = 2  # on the device at the same time
_ALIGNED = 64  # bytes
_ROW = 2048  # elements whose squares are summed up in float32


def piece_rows(n_columns: int) -> int:
    return max(1, PIECE // n_columns)


class HostStates:
    """Holds masters, moments and gradients of the parameters that this rank updates.

    Attributes:
        masters: weights in `master_dtype`; the device has them in the compute dtype.
        sent: the gradients.
    """

    def __init__(self, owned: OwnedParameters) -> None:
        """Move the masters to pinned memory. Raises RunFailed if the node cannot pin it."""
        self._parameters = list(owned.by_name.values())
        self._device, master = self._parameters[0].device, DTYPES[owned.layout.master_dtype]
        self._gradient_dtype = DTYPES[owned.layout.gradient_dtype]
        rounded = [p for p in self._parameters if p.dtype != master]
        self._free = _pinned(sum(_size(p, master) for p in rounded))
        self.masters: dict[torch.Tensor, torch.Tensor] = {}
        for parameter in rounded:
            local = self.zeros(to_local(parameter).shape, dtype=master)
            if (values := owned.take_master(parameter)) is not None:  # else it has no contents yet
                local.copy_(values)
            self.masters[parameter] = sharded_as(parameter, local)
        self._gradients: dict[torch.Tensor, torch.Tensor] = {}
        self.sent = SentGradients(owned, self)
        self._in, self._out = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)
        # Pieces on the device, each with the event after which it is back in host memory.
        self._pieces: deque[tuple[torch.cuda.Event, dict[str, torch.Tensor]]] = deque()

    def reserve(self, state_sizes: Iterable[int]) -> None:
        """Pin memory for gradients and for the optimizer's states. Raises RunFailed.

        `state_sizes`: the bytes of each tensor that `zeros` will return.
        """
        dtype = self._gradient_dtype
        gradients = sum(_size(p, dtype) for p in self._parameters)
        self._free = _pinned(gradients + sum(map(_aligned, state_sizes)))
        for parameter in self._parameters:
            self._gradients[parameter] = self.zeros(to_local(parameter).shape, dtype=dtype)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return zeros in the next free part of the pinned memory."""
        n_bytes = torch.Size(shape).numel() * dtype.itemsize
        part, self._free = self._free[:n_bytes], self._free[_aligned(n_bytes) :]
        return part.view(dtype).view(shape)

    def write(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        self._gradients[parameter].copy_(gradient, non_blocking=True)

    def read(self, parameter: torch.Tensor) -> torch.Tensor:
        return self._gradients[parameter].to(self._device, non_blocking=True)

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return this step's gradient of a parameter, in host memory or on the device, or None."""
        return self._gradients[parameter] if parameter in self.sent else parameter.grad

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Let an update within this context begin and end in the order of the device's kernels."""
        # Copies in wait for the last gradients. Later kernels wait until all copies out have ended.
        self._in.wait_stream(torch.cuda.current_stream())
        yield
        while self._pieces:
            self._drop_piece()
        torch.cuda.current_stream().wait_stream(self._out)
        self.sent.clear()

    def on_device(
        self,
        parameter: torch.Tensor,
        matrices: Mapping[str, torch.Tensor],  # this rank's weight, gradient and states
        pieces: Sequence[slice],  # their rows
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Yield pieces of a parameter's tensors on the device, to be updated in place."""
        # Three streams overlap: copies in, kernels, copies out. At most PIECES pieces are on the
        # device, so that memory does not grow with a weight. A weight's master, if there is one, is
        # updated and then rounded into the weight.
        weight, master = matrices["weight"], self.masters.get(parameter)
        if master is not None:
            matrices = {**matrices, "weight": to_local(master).view(weight.shape)}
        for piece in pieces:
            there = {name: each[piece] for name, each in matrices.items()}
            if len(self._pieces) == PIECES:
                self._drop_piece()
            with torch.cuda.stream(self._in):
                part = {n: each.to(self._device, non_blocking=True) for n, each in there.items()}
            torch.cuda.current_stream().wait_stream(self._in)
            yield part
            if master is not None:
                weight[piece].copy_(part["weight"])
            self._out.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._out):
                for name, each in there.items():
                    if not each.is_cuda and name != "gradient":
                        each.copy_(part[name], non_blocking=True)
            self._pieces.append((self._out.record_event(), part))

    def _drop_piece(self) -> None:
        """Give back the device memory of the oldest piece, once it is in host memory."""
        stored, _ = self._pieces.popleft()
        self._in.wait_event(stored)

    @torch.no_grad()
    def round_masters(self) -> None:
        """Round the device's weights from the masters, which a checkpoint has."""
        for parameter, master in self.masters.items():
            to_local(parameter).copy_(to_local(master))

    def wait(self) -> None:
        """Let the host wait until all sent gradients are in its memory."""
        torch.cuda.current_stream().synchronize()


def _size(parameter: torch.Tensor, dtype: torch.dtype) -> int:
    return _aligned(to_local(parameter).numel() * dtype.itemsize)


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // _ALIGNED) * _ALIGNED


def _pinned(n_bytes: int) -> torch.Tensor:
    return pinned_zeros(n_bytes, "masters, moments and gradients", "use optimizer.offload=false")


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
