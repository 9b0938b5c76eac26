"""Safetensors files written as a stream, with at most one of their tensors in memory."""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from shardtune.checkpoint import durable_fs
from shardtune.distributed.tensors import SAFETENSORS_NAMES


def write_safetensors(
    path: Path,
    layout: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    tensors: Iterable[torch.Tensor],
    metadata: Mapping[str, str],
) -> tuple[durable_fs.WrittenFile, dict[str, tuple[int, int]]]:
    """Write a new file of tensors that arrive one by one, in the order of `layout`.

    `layout` gives each tensor's dtype and shape, wide dtypes first, which aligns every tensor.
    Returns the file, whose first part is the header, and each tensor's byte range in it.
    https://github.com/huggingface/safetensors#format. Raises OSError.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    ranges = {}
    position = 0
    for name, (dtype, shape) in layout.items():
        begin, position = position, position + dtype.itemsize * torch.Size(shape).numel()
        ranges[name] = (begin, position)
        header[name] = {
            "dtype": SAFETENSORS_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": ranges[name],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = len(text).to_bytes(8, "little") + text
    written = durable_fs.write_file(path, chain([memoryview(start)], map(tensor_bytes, tensors)))
    return written, {name: (len(start) + b, len(start) + e) for name, (b, e) in ranges.items()}


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
