"""NCCL's place in torch.distributed, taken by a gloo group of its own.

The device hands it the memory of its tensors, see `run_collective` in fallback.h.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_made: list[object] = []  # PyTorch keeps the C++ part alone


class Options:
    """`ProcessGroupNCCL.Options`."""

    is_high_priority_stream = False
    _timeout = datetime.timedelta(minutes=10)


class _Copyable:
    """Options of gloo, which Python cannot copy as it copies NCCL's."""

    def __init__(self, options: Any) -> None:
        self._options = options

    def __deepcopy__(self, _: Any) -> Any:
        return self._options


class ProcessGroupNCCL(dist.ProcessGroupGloo):
    """A gloo group that stands for an NCCL one: it can be split, and connects when it is made."""

    Options = Options
    supports_splitting = True

    def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
        super().__init__(store, rank, size, options._timeout)
        _made.append(self)

    @property
    def options(self) -> _Copyable:
        return _Copyable(super().options)

    def eager_connect_single_device(self, device: torch.device) -> None:
        assert device.type == "cuda"


def patch() -> None:
    c10d._NCCL_AVAILABLE = True
    c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = ProcessGroupNCCL
    torch.cuda.nccl.version = lambda: (2, 29, 7)
    dist.is_nccl_available = lambda: True
