"""Count the bytes and FLOPs of the kernel that an operator launches on a GPU.

An operator counts as one kernel, which reads each of its inputs and writes each of its outputs
once. A few operators launch more kernels (a sort, fused AdamW over many tensors).
"""

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from shardtune.planner.arithmetic.figures import Kernel, Kind

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
