"""Follow the bytes that a rank holds and sends while a step runs on fake tensors, and its kernels.

A fake tensor has a shape and no contents, so a step of a large model takes seconds. FSDP frees
parameters by resizing their storages, which runs no operator, so the tracker follows that, too.

An operator counts as one kernel of a GPU, which reads each of its inputs and writes each of its
outputs once. A few operators launch more kernels (a sort, fused AdamW over many tensors).
"""

from __future__ import annotations

import functools
import math
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from shardtune.planner.arithmetic.figures import Cause, Collective, Kernel, Kind, Peak

# Operators that launch no kernel, though their schemas do not say so.
_NOTHING = {"_unsafe_view", "lift_fresh", "resize_", "set_", "record_stream", "detach_"}
_NOTHING |= {"wait_tensor", "_reshape_alias"}
_COMMUNICATION = {"c10d", "_c10d_functional"}
_FILLS = {"copy_", "fill_", "zero_", "set_", "normal_", "uniform_", "random_"}
# Operators that read only the elements of their first tensor that they return.
_LOOKUPS = {"embedding", "index_select", "index", "gather"}
# Operators that read and write only the elements of their first tensor that they change.
_CHANGES = {"index_put_", "_index_put_impl_", "index_add_", "index_copy_", "scatter_"}
_CHANGES |= {"scatter_add_"}
# The position of the first of two factors among the arguments.
_PRODUCTS = {"mm": 0, "bmm": 0, "_grouped_mm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1}
_ATTENTION = {
    "_varlen_attn": Kind.ATTENTION,
    "_varlen_attn_backward": Kind.ATTENTION_BACKWARD,
    "_flash_attention_forward": Kind.ATTENTION,
    "_flash_attention_backward": Kind.ATTENTION_BACKWARD,
    "causal_documents": Kind.ATTENTION,
    "causal_documents_backward": Kind.ATTENTION_BACKWARD,
}


def kernel_of(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, device: str
) -> Kernel | None:
    """Return the kernel that an operator with this result launches on this device type, or None."""
    name = func._opname
    if func.is_view or name in _NOTHING or "empty" in name or func.namespace in ("prim", "prims"):
        return None
    tensors = [*tensors_in((result, args, *kwargs.values()))]
    if not any(x.device.type == device and x.numel() for x in tensors):
        return None
    if func.namespace in _COMMUNICATION:
        return Kernel(Kind.COLLECTIVE, name, max(x.nbytes for x in tensors))
    if result is not None and not [*tensors_in([result])]:  # a size, which the host knows
        return None
    is_plain = _reads_and_returns(func)
    n_bytes = sum(map(_extent, tensors) if is_plain else _moved(func, args, kwargs, result))
    if name in _PRODUCTS:
        place = _PRODUCTS[name]
        flops = 2 * args[place].numel() * args[place + 1].shape[-1]
        return Kernel(Kind.PRODUCT, name, n_bytes, flops)
    if name in _ATTENTION:
        return Kernel(_ATTENTION[name], name, n_bytes, _attention_flops(func, args, kwargs))
    is_copy = func.namespace == "fsdp"
    return Kernel(Kind.COPY if is_copy else Kind.OTHER, name, n_bytes)


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among values and in lists of them, since pytree takes longer."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(value)


class _Argument(NamedTuple):
    name: str
    is_written: bool
    is_read: bool


@functools.cache
def _arguments(func: Any) -> list[_Argument]:
    """Return which of its arguments an operator reads and writes."""
    arguments = []
    for argument in func._schema.arguments:
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if (func._opname, argument.name) == ("_fused_adamw_", "grads"):
            is_written = False  # AdamW writes gradients only to unscale them
        is_filled = argument.kwarg_only or func._opname in _FILLS
        arguments.append(_Argument(argument.name, is_written, not (is_written and is_filled)))
    return arguments


@functools.cache
def _fresh_results(func: Any) -> list[bool]:
    """Return whether each result is a new tensor, not one of the arguments."""
    return [result.alias_info is None for result in func._schema.returns]


@functools.cache
def _reads_and_returns(func: Any) -> bool:
    """Return whether an operator reads all of its arguments, and returns new tensors alone."""
    is_partial = func._opname in _LOOKUPS | _CHANGES
    is_written = any(argument.is_written for argument in _arguments(func))
    return all(_fresh_results(func)) and not is_partial and not is_written


def _named(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = (argument.name for argument in _arguments(func))
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _moved(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Iterator[int]:
    """Yield the bytes that an operator reads of each input and writes of each output."""
    values = _named(func, args, kwargs)
    results = result if isinstance(result, (tuple, list)) else [result]
    if all(_fresh_results(func)):
        results = [*tensors_in(results)]  # the schema has a list of tensors as one result
    else:
        pairs = zip(results, _fresh_results(func), strict=False)
        results = [tensor for tensor, is_fresh in pairs if is_fresh]
    written = sum(map(_extent, results))
    yield written
    for number, argument in enumerate(_arguments(func)):
        value = values.get(argument.name)
        if number == 0 and func._opname in _LOOKUPS:
            yield written
        elif number == 0 and func._opname in _CHANGES:
            yield 2 * _extent(values.get("values", values.get("src", values.get("source"))))
        else:
            size = sum(map(_extent, tensors_in([value])))
            yield size * (argument.is_written + argument.is_read)


def _extent(value: Any) -> int:
    """Return the bytes of a tensor in memory; an expanded dimension counts once."""
    if not isinstance(value, torch.Tensor):
        return 0
    strides = value.stride()
    if all(strides):
        return value.nbytes
    sizes = zip(value.shape, strides, strict=True)
    return value.itemsize * math.prod(size for size, stride in sizes if stride or not size)


def _attention_flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return the FLOPs of causal attention if all documents are as long as the longest.

    The forward has two products, the backward five, since it computes the scores again.
    """
    values = _named(func, args, kwargs)
    query = values["query"]
    longest = next((values[n] for n in ("max_q", "longest") if n in values), None)
    tokens, heads, width = query.shape[-3:]
    pairs = tokens * ((longest or tokens) + 1) // 2
    return (10 if "backward" in func._opname else 4) * pairs * heads * width


_KINDS = {
    "_allgather_base_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "all_gather_into_tensor_out": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "alltoall_base_": "all-to-all",
    "all_to_all_single": "all-to-all",
    "recv_": "send",
}


# Of an H100 or H200. Deterministic flash attention keeps float32 sums for each of them.
_MULTIPROCESSORS = 132


class NotSimulated(Exception):
    """A fake tensor cannot answer the model; the message says why."""


# The place of a phase before its first layer. A backward begins at the head, where a deep model
# has its peak (all activations are there), and ends at layer 0, where a shallow one has it (the
# gradient of the embedding is there). Under one place the two would be extrapolated as one.
_BEGINNING = sys.maxsize


class Tracker(TorchDispatchMode):
    """Within this mode, bytes are counted by cause, with a peak for each phase and place of a step.

    `pools` has the peak bytes of each stream, by phase and place: a GPU's allocator keeps memory
    that is freed for the stream that allocated it. FSDP2 runs the same streams on a CPU, where they
    do nothing. With `is_gpu` the workspace of a GPU's attention counts, too.

    `traffic` has the bytes of each collective's unsharded side: the output of an all-gather, the
    input of a reduction, and the smaller side of an all-to-all. `kernels` counts the kernels that
    operators would launch on a GPU.
    """

    def __init__(self, is_gpu: bool = False) -> None:
        super().__init__()
        self.is_gpu = is_gpu
        self.read_by_host: Iterator[int] = iter(
            ()
        )  # the numbers that the model reads in fake tensors
        self.peaks: dict[tuple[str, int], Peak] = {}
        self.pools: dict[tuple[str, int, int], int] = {}  # by phase, place and stream
        self.traffic: Counter[Collective] = Counter()  # collectives that follow count here
        self.kernels: Counter[Kernel] = Counter()  # operators that follow count here
        self.cause = Cause.ACTIVATIONS  # new tensors count as this
        self._live: Counter[Cause] = Counter()
        self._of_stream: Counter[int] = Counter()
        self._streams = [torch.cpu.current_stream()]
        self._known: dict[int, tuple[Cause, int, int]] = {}  # by id: cause, bytes and stream
        self._phase, self._place = "", 0

    def restart(self) -> None:
        """Forget peaks, traffic and kernels so far; tensors that live stay counted."""
        self.peaks, self.pools = {}, {}
        self.traffic, self.kernels = Counter(), Counter()

    def begin(self, phase: str, cause: Cause = Cause.ACTIVATIONS) -> None:
        """Count peaks for this phase, and new tensors under this cause, from now on."""
        self._phase, self._place, self.cause = phase, _BEGINNING, cause
        self._update_peak()

    def enter(self, place: int) -> None:
        """Count peaks for this place of the phase from now on."""
        self._place = place
        self._update_peak()

    def hold(self, tensor: torch.Tensor, cause: Cause) -> None:
        """Count the tensor's storage under this cause, even if it was counted before."""
        self._count(tensor.untyped_storage(), cause)
        self._update_peak()

    @contextmanager
    def following(self) -> Iterator[Tracker]:
        """Follow operators and resized storages."""
        resize = torch.UntypedStorage.resize_
        label = record_function.__enter__, record_function.__exit__
        output_shape = ShardingPropagator._propagate_tensor_meta_non_cached

        def resize_and_count(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            known = self._known.get(id(storage))
            cause = known[0] if known else self.cause
            # FSDP allocates gathered parameters by resizing storages.
            is_gathered = cause in (Cause.ACTIVATIONS, Cause.BACKWARD)
            self._count(storage, Cause.GATHERED if is_gathered else cause)
            self._update_peak()
            return result

        def output_shape_uncounted(*arguments: Any) -> Any:
            # DTensor runs each operator once on whole fake tensors, which no rank ever holds.
            with _disable_current_modes():
                return output_shape(*arguments)

        # A profiler's labels are a tenth of a step's operators, and take time alone.
        cast(Any, record_function).__enter__ = lambda self: self
        cast(Any, record_function).__exit__ = lambda *_: None
        propagator = cast(Any, ShardingPropagator)
        cast(Any, torch.UntypedStorage).resize_ = resize_and_count
        propagator._propagate_tensor_meta_non_cached = output_shape_uncounted
        try:
            with self:
                yield self
        finally:
            cast(Any, torch.UntypedStorage).resize_ = resize
            cast(Any, record_function).__enter__, cast(Any, record_function).__exit__ = label
            propagator._propagate_tensor_meta_non_cached = output_shape

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor comes first, and calls operators of its local tensors
        if func is torch.ops.prim.device.default:  # half of all calls
            return args[0].fake_device
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._number(args[0])
        if func is torch.ops.aten.equal.default:
            return True  # a mask equals the expected one
        workspace = None
        if self.is_gpu and func is torch.ops.torch_attn._varlen_attn_backward.default:
            _, query, key, _, _, _, boundaries, *_ = args
            workspace = query.new_empty(varlen_workspace(query, key, boundaries), dtype=torch.uint8)
            self._count(workspace.untyped_storage(), Cause.BACKWARD)
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype == torch.float32:
            result = _grouped_product(*args)
        else:
            result = func(*args, **(kwargs or {}))
        if kernel := kernel_of(func, args, kwargs or {}, result, "cpu"):
            self.kernels[kernel] += 1
        for tensor in tensors_in([result]):
            storage = tensor.untyped_storage()
            if id(storage) not in self._known:
                self._count(storage, self.cause)
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count_collective(func, args, result)
        elif func.namespace == "fsdp" and "all_gather_copy_in" in str(func):
            for tensor in tensors_in([result]):
                self._count(tensor.untyped_storage(), Cause.GATHERED)
        self._update_peak()
        return result

    def _count_collective(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        kind = _KINDS.get(func._opname)
        if kind is None:
            return
        tensors = [*tensors_in((args, result))]
        if kind == "all-gather":
            n_bytes = max(x.nbytes for x in tensors)
        elif kind == "reduce-scatter":
            n_bytes = max(x.nbytes for x in tensors)
            smallest = min(tensors, key=lambda x: x.nbytes)
            # Those of two dimensions are activations, which ranks of `tensor` scatter.
            for x in tensors if smallest.dim() < 2 else ():
                is_input = x.untyped_storage()._cdata != smallest.untyped_storage()._cdata
                cause = Cause.REDUCED if is_input else Cause.GRADIENTS
                self._count(x.untyped_storage(), cause)
        elif kind == "all-to-all":
            n_bytes = min(x.nbytes for x in tensors)
        else:
            n_bytes = tensors[0].nbytes
        ranks = _ranks(args)
        if kind == "send":
            ranks = (ranks[args[2]], dist.get_rank())
        self.traffic[Collective(kind, ranks)] += n_bytes

    def _number(self, tensor: torch.Tensor) -> int | bool:
        """Return the number that the host reads in a tensor of one element.

        Raises:
            NotSimulated: the number depends on the data.
        """
        if tensor.dtype == torch.bool:
            return False  # a model asks whether a row is one document
        try:
            return next(self.read_by_host)
        except StopIteration:
            raise NotSimulated("it reads numbers that depend on the data") from None

    def _count(self, storage: torch.UntypedStorage, cause: Cause) -> None:
        """Count the storage under this cause, in place of its last cause and size."""
        # Python uses an id again once its storage is gone; `_forget` has dropped it by then.
        key, size, stream = id(storage), storage.nbytes(), self._stream()
        if known := self._known.get(key):
            self._subtract(*known)
            # A new cause leaves the memory with its stream. A new size does not: FSDP2 resizes a
            # storage to 0, and fills it again on another stream, which allocates its memory.
            if known[1] == size:
                stream = known[2]
        else:
            weakref.finalize(storage, self._forget, key)
        self._known[key] = cause, size, stream
        self._live[cause] += size
        self._of_stream[stream] += size

    def _stream(self) -> int:
        """Return the number of the current stream, in the order of their first use."""
        stream = torch.cpu.current_stream()
        if stream not in self._streams:
            self._streams.append(stream)
        return self._streams.index(stream)

    def _forget(self, key: int) -> None:
        self._subtract(*self._known.pop(key))

    def _subtract(self, cause: Cause, size: int, stream: int) -> None:
        self._live[cause] -= size
        self._of_stream[stream] -= size

    def _update_peak(self) -> None:
        total = self._live.total()
        key = self._phase, self._place
        if key not in self.peaks or total > self.peaks[key].n_bytes:
            self.peaks[key] = Peak(total, self._live.copy())
        for stream, size in self._of_stream.items():
            # The streams of collectives are equally full at each layer, so one place is enough.
            place = self._phase, self._place if stream == 0 else 0, stream
            self.pools[place] = max(size, self.pools.get(place, 0))


def varlen_workspace(query: torch.Tensor, key: torch.Tensor, boundaries: torch.Tensor) -> int:
    """Return the workspace bytes of FlashAttention 2's deterministic backward.

    It has float32 sums of dq, one for each share of the multiprocessors that a document's head
    gets, and dk and dv of each query head if heads share keys: `mha_varlen_bwd` in PyTorch's
    aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp. FlashAttention 3 takes less.
    """
    (tokens, heads, width), documents = query.shape, len(boundaries) - 1
    shares = -(-_MULTIPROCESSORS // (heads * documents))
    block = 32 if width <= 128 else 64
    padded = tokens + 128 * documents
    sums = shares * padded * heads * (-(-width // block) * block) * 4
    repeated = 2 * query.nbytes if key.shape[1] != heads else 0
    return sums + repeated + 4 * heads * padded


def _grouped_product(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor, *_: Any) -> torch.Tensor:
    """Return empty grouped products in float32, which fake tensors know in bfloat16 alone."""
    return a.new_empty((len(a), b.shape[-1]) if b.dim() == 3 else (len(ends), len(a), b.shape[-1]))


def _ranks(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the ranks of a collective's group, an object or a name among the arguments."""
    for value in args:
        if isinstance(value, str):
            group = dist.distributed_c10d._resolve_process_group(cast(Any, value))
            return tuple(dist.get_process_group_ranks(group))
        if isinstance(value, torch.ScriptObject):
            return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(value)))
    return tuple(range(dist.get_world_size()))
