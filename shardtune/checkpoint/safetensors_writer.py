"""Safetensors files written as a stream: no more than one tensor of them is in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from shardtune.checkpoint import durable_fs as disk

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _NAMES}


def write_safetensors(
    path: Path,
    layout: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    tensors: Iterable[torch.Tensor],
    metadata: Mapping[str, str],
) -> tuple[disk.Written, dict[str, tuple[int, int]]]:
    """Write a new file of tensors that come one by one, in the layout's order; and each one's byte range in it.

    The layout gives dtype and shape, wide dtypes first: every tensor is then aligned to its own.
    https://github.com/huggingface/safetensors#format

    Raises:
        OSError: as disk.write_file.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for name, (dtype, shape) in layout.items():
        end = position + dtype.itemsize * torch.Size(shape).numel()
        header[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    written = disk.write_file(
        path,
        chain([memoryview(len(text).to_bytes(8, "little") + text)], map(tensor_bytes, tensors)),
    )
    offsets = {name: header[name]["data_offsets"] for name in layout}
    return written, {name: (start + begin, start + end) for name, (begin, end) in offsets.items()}


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor on the CPU."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
