"""Call a module once per document of a flat row, as if each document were alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from shardtune.model import documents


def call_one_by_one(module: nn.Module) -> None:
    """Let a module take each document of a row in a call of its own, from now on."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    one_by_one = partial(_one_by_one, module.forward, names)
    module.forward = torch.compiler.disable(one_by_one)


def restore(module: nn.Module) -> None:
    """Let a module take a row as one document again."""
    vars(module).pop("forward", None)


def _one_by_one(
    forward: Callable[..., Any], names: list[str], *arguments: Any, **options: Any
) -> Any:
    """Call `forward`, whose arguments have `names`, for each document, and join the outputs."""
    row = documents.current()
    lengths = row.lengths
    if len(lengths) == 1:
        return forward(*arguments, **options)
    tensors = (each for each in (*arguments, *options.values()) if isinstance(each, torch.Tensor))
    if _token_dim(first := next(tensors), sum(lengths)) is None:
        raise RuntimeError(
            f"a layer got a tensor of {tuple(first.shape)} for documents of {sum(lengths)} tokens"
        )
    ordered = [_parts(value, name, lengths) for name, value in zip(names, arguments, strict=False)]
    named = {name: _parts(value, name, lengths) for name, value in options.items()}
    outputs, ends = [], torch.arange(2, device=row.boundaries.device, dtype=torch.int32)
    for i, length in enumerate(lengths):
        alone = documents.Documents([length], length * ends)
        with documents.of(alone, tried=row.tried):  # for modules within
            options = {name: part[i] for name, part in named.items()}
            outputs.append(forward(*(part[i] for part in ordered), **options))
    return _joined(outputs, lengths)


def _parts(value: Any, name: str, lengths: list[int]) -> list[Any]:
    """Return each document's part of a value that a module gets as its argument `name`."""
    if isinstance(value, torch.Tensor):
        if "mask" in name or name == "alibi":
            return [_beginning(value, sum(lengths), length) for length in lengths]
        dim = _token_dim(value, sum(lengths))
        return [value] * len(lengths) if dim is None else list(value.split(lengths, dim))
    if isinstance(value, tuple):
        parts = [_parts(each, name, lengths) for each in value]
        return [tuple(part[i] for part in parts) for i in range(len(lengths))]
    if isinstance(value, dict):
        named = {key: _parts(each, name, lengths) for key, each in value.items()}
        return [{key: part[i] for key, part in named.items()} for i in range(len(lengths))]
    return [value] * len(lengths)


def _beginning(value: torch.Tensor, tokens: int, length: int) -> torch.Tensor:
    """Return the part of a mask or ALiBi for the first `length` tokens of a row."""
    # Masks and ALiBi go by the place in the row: a document that is alone gets the same part.
    for dim in range(max(0, value.dim() - 2), value.dim()):
        if value.shape[dim] == tokens:
            value = value.narrow(dim, 0, length)
    return value


def _token_dim(value: torch.Tensor, tokens: int) -> int | None:
    """Return the dimension of a row's tokens, or None."""
    # Tokens follow the dimension of rows, whose size is 1, or are the first dimension. Another
    # dimension may have the same size, but is a width.
    dims = [dim for dim, size in enumerate(value.shape) if size == tokens]
    behind_row = [dim for dim in dims if dim and value.shape[dim - 1] == 1]
    return next(iter(behind_row or dims[: dims[:1] == [0]]), None)


def _joined(outputs: list[Any], lengths: list[int]) -> Any:
    """Join documents' outputs (1, tokens, ...). A state at their end is the last document's."""
    if isinstance(outputs[0], tuple | list):
        return type(outputs[0])(_joined(list(each), lengths) for each in zip(*outputs, strict=True))
    if all(
        isinstance(output, torch.Tensor) and output.shape[:2] == (1, length)
        for output, length in zip(outputs, lengths, strict=True)
    ):
        return torch.cat(outputs, 1)
    return outputs[-1]
