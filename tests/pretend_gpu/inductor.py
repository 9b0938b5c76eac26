"""The kernels that PyTorch's compiler makes of a function, and the bytes that they read and write.

They are those of its backend for CPUs, which divides a function into kernels as the one for GPUs
does where a number is either summed up or used where it stands.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch._inductor import config, metrics
from torch._inductor.graph import GraphLowering


class CompiledKernels(NamedTuple):
    """Those of one call. `n_bytes`: each reads what it needs of a tensor once."""

    number: int
    n_bytes: int


class _Counted(BaseException):
    """Ends a compilation before the generated code is built."""


def count_compiled(function: Callable[..., Any], *arguments: Any) -> CompiledKernels:
    """Count what one call becomes where it is compiled for all lengths. Nothing is computed."""
    counts = []

    def count(graph: Any) -> None:
        before = metrics.generated_kernel_count
        graph.codegen()
        n_bytes = 0
        for node in graph.scheduler.nodes:
            accesses = node.get_read_write_buffer_accesses(include_reads=True, include_writes=True)
            # A buffer that lives in one kernel takes no memory.
            kept = [size for name, size in accesses.items() if name not in graph.removed_buffers]
            n_bytes += sum(kept)
        counts.append(CompiledKernels(metrics.generated_kernel_count - before, n_bytes))
        raise _Counted

    torch._dynamo.reset()
    compiled = torch.compile(function, dynamic=True, fullgraph=True)
    with (
        patch.object(GraphLowering, "compile_to_module", count),
        config.patch(force_disable_caches=True),
        torch.no_grad(),
        contextlib.suppress(_Counted),
    ):
        compiled(*arguments)
    torch._dynamo.reset()
    (counted,) = counts
    return counted
