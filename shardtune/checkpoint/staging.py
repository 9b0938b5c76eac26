"""Host memory for one copy of a rank's tensors, which every save writes over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardtune.distributed.host_memory import available_memory, pinned_zeros
from shardtune.distributed.world import World
from shardtune.log import logger
from shardtune.units import gb


class Staging:
    """A copy of tensors in host memory that is allocated once.

    Memory for GPUs is pinned, and copied to on a side stream: training goes on meanwhile, and the
    next update of the weights waits for the copy. Only one save at a time may use it.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None
        n_bytes = staged_bytes(tensors)
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            memory = pinned_zeros(n_bytes, "checkpoints", "use checkpoint.mode=sync")
        else:
            memory = torch.empty(n_bytes, dtype=torch.uint8)
        self._copies: dict[str, torch.Tensor] = {}
        begin = 0
        for name, tensor in tensors.items():
            part = memory[begin : begin + tensor.nbytes]
            self._copies[name] = part.view(tensor.dtype).view(tensor.shape)
            begin += _aligned(tensor.nbytes)

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Begin to copy these tensors, over earlier copies that must have been written."""
        if self._stream is None:
            for name, tensor in tensors.items():
                self._copies[name].copy_(tensor)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            for name, tensor in tensors.items():
                self._copies[name].copy_(tensor, non_blocking=True)
        self._copied = torch.cuda.Event(blocking=True)
        self._copied.record(self._stream)

    def before_update(self, *_: Any) -> None:
        """Make the current stream wait for the copy, before the tensors change."""
        if self._stream is not None and self._copied is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._copied)

    def wait(self) -> dict[str, torch.Tensor]:
        """Return the copies once they are whole. May be called in another thread."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._copies


def make_staging(tensors: Mapping[str, torch.Tensor], world: World) -> Staging | None:
    """Allocate memory for a rank's tensors, or return None where a node lacks it. Collective.

    Raises:
        RunFailed: the memory cannot be pinned.
    """
    size, available = staged_bytes(tensors), available_memory()
    per_rank = world.all_gather_json([world.node_rank, size, available])
    for node in sorted({node for node, _, _ in per_rank}):
        needed = sum(size for of_node, size, _ in per_rank if of_node == node)
        free = min(available for of_node, _, available in per_rank if of_node == node)
        if needed > free:
            logger.info(
                f"Checkpoint staging: checkpoint.mode=async needs {gb(needed)} GB of host "
                f"memory on node {node}, and {gb(free)} GB are free. Saves are "
                "synchronous: training waits for the disk"
            )
            return None
    largest = max(size for _, size, _ in per_rank)
    logger.info(f"Checkpoint staging: {gb(largest, 2)} GB of host memory per rank")
    return Staging(tensors, world.device)


def staged_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return the bytes of host memory that a copy of these tensors takes."""
    return sum(_aligned(tensor.nbytes) for tensor in tensors.values())


def _aligned(size: int) -> int:
    return -(-size // 64) * 64
