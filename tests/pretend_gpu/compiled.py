"""What torch.compile makes of a function on a GPU, counted without one.

Dynamo and AOTAutograd take a function apart, and Inductor decides which kernels it would write for
a GPU and which bytes they move. Triton, which would compile them, is not needed for that. Then the
graph runs operator by operator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast
from unittest.mock import patch

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import lowering as inductor_lowering
from torch._inductor import scheduler
from torch._inductor.compile_fx import _recursive_post_grad_passes, view_to_reshape
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _disable_current_modes

from shardtune.planner.arithmetic.figures import Kernel, Kind
from shardtune.planner.simulation.kernel_costs import kernel_of

_compile = torch.compile
_PRODUCTS = ("mm", "mm.default")


class Compiler:
    """Its `compile` stands for `torch.compile`, and tells `launch` which kernels run.

    Graphs are lowered for the sizes that they first meet. At others their kernels are the same, and
    the work is in proportion.
    """

    def __init__(self, launch: Callable[[Counter[Kernel]], None]) -> None:
        self._launch = launch
        self._backend = aot_autograd(
            fw_compiler=self._graph,
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table,
            keep_inference_input_mutations=True,
        )

    def compile(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return _compile(function, backend=self._backend, **options)

    def _graph(self, graph: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        """Return what runs a graph of AOTAutograd."""
        kernels: Counter[Kernel] = Counter()
        size = 0

        def run(given: list[Any]) -> Any:
            nonlocal kernels, size
            arguments = list(given)
            given.clear()
            with _disable_current_modes():
                if not size:
                    kernels, size = kernels_of(graph, arguments), _size(arguments)
                share = _size(arguments) / size
                self._launch(Counter({_scaled(kernel, share): n for kernel, n in kernels.items()}))
                return graph(*arguments)

        cast(Any, run)._boxed_call = True
        return run


def _size(values: Sequence[Any]) -> int:
    return sum(x.nbytes for x in values if isinstance(x, torch.Tensor))


def _scaled(kernel: Kernel, share: float) -> Kernel:
    n_bytes, flops = round(share * kernel.n_bytes), round(share * kernel.flops)
    return kernel._replace(n_bytes=n_bytes, flops=flops)


def kernels_of(graph: torch.fx.GraphModule, arguments: Sequence[Any]) -> Counter[Kernel]:
    """Return the kernels that Inductor would write for a graph, run on these arguments."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        inputs = [_like(x) if isinstance(x, torch.Tensor) else x for x in arguments]
        traced = make_fx(graph)(*inputs)
    kernels = Counter(filter(None, map(_product, traced.graph.nodes)))
    view_to_reshape(traced)
    with (
        V.set_fake_mode(mode),
        V.set_debug_handler(DebugContext()),
        patch.object(scheduler, "has_triton", lambda *_: True),
        # A run compiles for all lengths, where padding does not concatenate.
        patch.object(inductor_lowering, "_pad_as_cat", lambda *_: None),
    ):
        _recursive_post_grad_passes(traced, is_inference=True)
        lowering = GraphLowering(traced, example_inputs=inputs, is_inference=True)
        with V.set_graph_handler(lowering):
            lowering.run(*inputs)
            lowering._update_scheduler()
            for node in lowering.scheduler.nodes:
                called = str(getattr(node.node, "python_kernel_name", ""))
                if (n_bytes := _moved_bytes(node)) and not called.endswith(_PRODUCTS):
                    kernels[Kernel(Kind.OTHER, "compiled", n_bytes)] += 1
    return kernels


def _moved_bytes(node: Any) -> int:
    """Return what a kernel reads and writes, without the buffers that live in it alone."""
    sizes = node.get_read_write_buffer_accesses(include_reads=True, include_writes=True)
    operations = node.get_operation_names()
    for buffer in node.get_outputs():
        # A weak user comes later and does not read it.
        if all(user.is_weak or user.get_name() in operations for user in buffer.users):
            sizes.pop(buffer.get_name(), None)
    return sum(sizes.values())


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )


def _product(node: torch.fx.Node) -> Kernel | None:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    of_values = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    kernel = kernel_of(node.target, *of_values, node.meta.get("val"), "cuda")
    return kernel if kernel and kernel.flops else None
