"""Follow the bytes that a rank holds and sends while a step runs on fake tensors.

A fake tensor has a shape and a size and no contents, so a step of a large model takes seconds. FSDP
frees parameters by resizing their storages. That does not run an operator, so the tracker follows
it too.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Cause(StrEnum):
    """What a rank's memory is taken by."""

    PARAMETERS = "parameters"  # this rank's slices
    GRADIENTS = "gradients"  # of these slices
    OPTIMIZER = "optimizer"  # its state of these slices
    GATHERED = "gathered parameters"
    REDUCED = "unsharded gradients"
    ACTIVATIONS = "activations"  # made in the forward
    BACKWARD = "backward"  # made in the backward, gradients of activations above all


class Collective(NamedTuple):
    """One kind of collective over one group of ranks."""

    kind: str  # "all-gather", "reduce-scatter", "all-reduce" or "all-to-all"
    ranks: tuple[int, ...]


class Peak(NamedTuple):
    """The most bytes at once in some part of a step, and what they were taken by."""

    n_bytes: int
    by_cause: Counter[Cause]


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
}


class Tracker(TorchDispatchMode):
    """Within this mode, bytes are counted by cause, with a peak for each phase and place of a step.

    `traffic` has the bytes of each collective's unsharded side: of the output of an all-gather, and
    of the input of the others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.read_by_host: Iterator[int] = iter(())  # the numbers in fake tensors
        self.peaks: dict[tuple[str, int], Peak] = {}
        self.traffic: list[Counter[Collective]] = [Counter()]  # the last one counts
        self.cause = Cause.ACTIVATIONS  # of what operators make from now on
        self._live: Counter[Cause] = Counter()
        self._known: dict[int, tuple[Cause, int]] = {}  # by id of the storage
        self._phase, self._place = "", 0

    def begin(self, phase: str, cause: Cause = Cause.ACTIVATIONS) -> None:
        """From now on peaks count for this phase, and new tensors under this cause."""
        self._phase, self._place, self.cause = phase, 0, cause
        self._update_peak()

    def enter(self, place: int) -> None:
        """From now on peaks count for this place of the phase."""
        self._place = place
        self._update_peak()

    def hold(self, tensor: torch.Tensor, cause: Cause) -> None:
        """Count the tensor's storage under this cause, from now on or already."""
        self._count(tensor.untyped_storage(), cause)
        self._update_peak()

    @contextmanager
    def following(self) -> Iterator[Tracker]:
        """Follow operators and resized storages."""
        resize = torch.UntypedStorage.resize_

        def resize_and_count(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            known = self._known.get(id(storage))
            cause = known[0] if known else self.cause
            # FSDP allocates what it gathers so.
            is_gathered = cause in (Cause.ACTIVATIONS, Cause.BACKWARD)
            self._count(storage, Cause.GATHERED if is_gathered else cause)
            self._update_peak()
            return result

        cast(Any, torch.UntypedStorage).resize_ = resize_and_count
        try:
            with self:
                yield self
        finally:
            cast(Any, torch.UntypedStorage).resize_ = resize

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor comes first, and calls operators of its local tensors
        if func is torch.ops.aten._local_scalar_dense.default:
            return next(self.read_by_host)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if id(storage) not in self._known:
                    self._count(storage, self.cause)
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count_collective(func, args, result)
        elif func.namespace == "fsdp" and "all_gather_copy_in" in str(func):
            for tensor in tree_leaves(result):
                self._count(tensor.untyped_storage(), Cause.GATHERED)
        self._update_peak()
        return result

    def _count_collective(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        kind = _KINDS.get(func._opname)
        if kind is None:
            return
        tensors = [x for x in tree_leaves((args, result)) if isinstance(x, torch.Tensor)]
        if kind == "all-gather":
            n_bytes = max(x.nbytes for x in tensors)
        elif kind == "reduce-scatter":
            n_bytes = max(x.nbytes for x in tensors)
            smallest = min(tensors, key=lambda x: x.nbytes)
            for x in tensors:
                is_input = x.untyped_storage()._cdata != smallest.untyped_storage()._cdata
                cause = Cause.REDUCED if is_input else Cause.GRADIENTS
                self._count(x.untyped_storage(), cause)
        elif kind == "all-to-all":
            # (output, input, ...), or (input, ...) and the output as result.
            inputs = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
            n_bytes = inputs[-1].nbytes
        else:
            n_bytes = tensors[0].nbytes
        self.traffic[-1][Collective(kind, _ranks(args))] += n_bytes

    def _count(self, storage: torch.UntypedStorage, cause: Cause) -> None:
        key, size = id(storage), storage.nbytes()
        if known := self._known.get(key):
            self._live[known[0]] -= known[1]
        else:
            weakref.finalize(storage, self._forget, key)
        self._known[key] = cause, size
        self._live[cause] += size

    def _forget(self, key: int) -> None:
        cause, size = self._known.pop(key)
        self._live[cause] -= size

    def _update_peak(self) -> None:
        total = self._live.total()
        key = self._phase, self._place
        if key not in self.peaks or total > self.peaks[key].n_bytes:
            self.peaks[key] = Peak(total, self._live.copy())


def _ranks(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the ranks of the group among a collective's arguments, an object or a name."""
    for value in args:
        if isinstance(value, str):
            group = dist.distributed_c10d._resolve_process_group(cast(Any, value))
            return tuple(dist.get_process_group_ranks(group))
        if isinstance(value, torch.ScriptObject):
            return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(value)))
    return tuple(range(dist.get_world_size()))
