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

    def __init__(self, store: dist.Store, rank: int, size: int, options: Any, *_: Any) -> None:
        super().__init__(store, rank, size, options._timeout)

    def split(self, store: dist.Store, ranks: list[int], options: Any) -> ProcessGroupNCCL:
        """Make the group anew: PyTorch from 2.15 on asks for this whenever there is a device."""
        return ProcessGroupNCCL(store, ranks.index(dist.get_rank()), len(ranks), options)


def patch() -> None:
    c10d._NCCL_AVAILABLE = True
    c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = ProcessGroupNCCL
    vars(c10d)["ProcessGroupNCCL2"] = ProcessGroupNCCL  # NCCL's from PyTorch 2.15 on
    torch.cuda.nccl.version = lambda: (2, 29, 7)
    dist.is_nccl_available = lambda: True
    init_process_group = dist.init_process_group

    def without_splitting(*arguments: Any, device_id: Any = None, **options: Any) -> None:
        """Make each group anew: where the device is named NCCL splits one, and gloo may hang."""
        assert device_id is None or (device_id.type == "cuda" and device_id.index is not None)
        init_process_group(*arguments, **options)

    dist.init_process_group = c10d.init_process_group = without_splitting
