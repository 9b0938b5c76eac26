"""NCCL's place in torch.distributed, taken by a gloo group of its own.

The device hands it the memory of its tensors, see `run_collective` in fallback.h.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


class Options:
    """`ProcessGroupNCCL.Options`."""

    is_high_priority_stream = False
    _timeout = datetime.timedelta(minutes=10)


class ProcessGroupNCCL(dist.ProcessGroupGloo):
    """A gloo group that stands for an NCCL one."""

    Options = Options

    def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
        super().__init__(store, rank, size, options._timeout)

    # As a GPU's group it must not be split before it has been used.
    supports_splitting = False


def patch() -> None:
    c10d._NCCL_AVAILABLE = True
    c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = ProcessGroupNCCL
    torch.cuda.nccl.version = lambda: (2, 29, 7)
    dist.is_nccl_available = lambda: True
