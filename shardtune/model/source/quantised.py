"""Read quantised weights as the model has them: values and scales become floating-point numbers.

A quantised tensor stands for a `StoredTensor`: only the bytes of a slice are read, and dequantised
in pieces, so that a rank holds its share of the model and one piece.
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import EllipsisType
from typing import Any, Protocol

import torch
from transformers import PreTrainedConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from shardtune.distributed.tensors import SAFETENSORS_NAMES
from shardtune.errors import UserError
from shardtune.model.source.quantisation import (
    METHODS,
    QUANTIZATION,
    method_of,
    quantisation_of,
    unread_quantisation,
)
from shardtune.model.source.weight_files import (
    dequantised_shape,
    list_stored,
    split_quantised,
    stored_bytes,
)
from shardtune.units import gb

DTYPES_OF_PARTS = {"F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu}
_SCALE_DTYPES = {"F32", "BF16", "F8_E8M0", "U8"}
_PIECE = 4 << 20  # values that are dequantised at a time
# FP8: a value of 8 bits, in float32, and its scale. MXFP4: half bytes, indices of 8 bytes, results.
_PIECE_BYTES = {"fp8": 13 * _PIECE, "mxfp8": 13 * _PIECE, "mxfp4": 24 * _PIECE}
_MXFP4_GROUP = 32  # values of one scale

Index = tuple[slice, ...] | EllipsisType
Box = Sequence[range]


class Sliceable(Protocol):
    """A tensor in a file that can be read in slices."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, index: Any) -> torch.Tensor: ...


def box_of(index: Index, shape: Sequence[int]) -> list[range]:
    """Return which indices of each dimension a slice has."""
    cuts = () if index is Ellipsis else index
    return [
        range(size)[cuts[dim]] if dim < len(cuts) else range(size) for dim, size in enumerate(shape)
    ]


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(edge.start, edge.stop) for edge in box)


class _Dequantised(ABC):
    """A tensor whose values and scales are stored."""

    _cut_first: Sequence[int]  # dimensions, beginning with the one that is outermost in the files

    def __init__(self, shape: list[int], dtype: torch.dtype) -> None:
        self._shape, self._dtype = shape, dtype

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def get_dtype(self) -> str:
        return SAFETENSORS_NAMES[self._dtype]

    def __getitem__(self, index: Index) -> torch.Tensor:
        """Read and dequantise a box of the tensor. Raises OSError."""
        box = box_of(index, self._shape)
        content = torch.empty([len(edge) for edge in box], dtype=self._dtype)
        for piece in _pieces(box, self._cut_first) if content.numel() else ():
            starts = (edge.start for edge in box)
            place = (range(e.start - s, e.stop - s) for e, s in zip(piece, starts, strict=True))
            content[_slices(list(place))] = self._dequantise(piece)
        return content

    @abstractmethod
    def _dequantise(self, box: Box) -> torch.Tensor:
        """Return the values of a box, at once."""


def _pieces(box: Box, cut_first: Sequence[int]) -> Iterator[Box]:
    """Cut a box into boxes of at most _PIECE values."""
    count = math.prod(map(len, box))
    dim = next((dim for dim in cut_first if len(box[dim]) > 1), None)
    if count <= _PIECE or dim is None:
        yield box
        return
    edge = box[dim]
    step = max(1, _PIECE * len(edge) // count)
    for first in range(0, len(edge), step):
        yield from _pieces([*box[:dim], edge[first : first + step], *box[dim + 1 :]], cut_first)


class BlockScaled(_Dequantised):
    """8-bit values in blocks of rows and columns, each with a scale; or one scale for all.

    transformers multiplies in float32 as well (`Fp8Dequantize`), but refuses sizes that blocks do
    not divide. Here, as in DeepSeek's own code, the last blocks of such a size are smaller.
    """

    def __init__(
        self,
        values: Sliceable,
        scales: Sliceable,
        dtype: torch.dtype,
        configured: tuple[int, int] | None,  # the size of a block in config.json
    ) -> None:
        super().__init__(values.get_shape(), dtype)
        self._values, self._scales = values, scales
        self._block = block_size(values.get_shape(), scales.get_shape(), configured)
        self._cut_first = range(len(self._shape))

    def _dequantise(self, box: Box) -> torch.Tensor:
        values = self._values[_slices(box)].float()
        if self._block is None:
            return values.mul_(_factors(self._scales[...]))
        sides = list(zip((-2, -1), box[-2:], self._block, strict=True))
        blocks = [_covering(edge, size) for _, edge, size in sides]
        factors = _factors(self._scales[_slices([*box[:-2], *blocks])])
        for (dim, edge, size), covering in zip(sides, blocks, strict=True):
            numbers = torch.arange(edge.start, edge.stop) // size - covering.start
            factors = factors.index_select(dim, numbers)
        return values.mul_(factors)


def block_size(
    values: list[int], scales: list[int], configured: tuple[int, int] | None
) -> tuple[int, int] | None:
    """Return the rows and columns of a block from two tensors' shapes; None for a single scale.

    Raises:
        ValueError: the scales do not fit blocks.
    """
    if math.prod(scales) == 1 and len(scales) < len(values):
        return None
    if len(values) == len(scales) >= 2 and values[:-2] == scales[:-2] and 0 not in scales:
        sides, counts = values[-2:], scales[-2:]
        if configured and counts == [-(-n // b) for n, b in zip(sides, configured, strict=True)]:
            return configured
        rows, columns = (side // count for side, count in zip(sides, counts, strict=True))
        if sides == [rows * counts[0], columns * counts[1]]:
            return rows, columns
    raise ValueError(f"{scales} scales for {values} values")


def _covering(edge: range, size: int) -> range:
    """Return the blocks of this size that have the indices of an edge."""
    return range(edge.start // size, -(-edge.stop // size))


def _factors(scales: torch.Tensor) -> torch.Tensor:
    """Return scales in float32; bytes are exponents of two."""
    return (scales.float() - 127).exp2() if scales.dtype == torch.uint8 else scales.float()


class MxFp4(_Dequantised):
    """4-bit values in groups along the inputs, each with a scale; stacked experts.

    Files have (experts, outputs, groups, bytes), the model (experts, inputs, outputs).
    """

    _cut_first = (0, 2, 1)

    def __init__(self, values: Sliceable, scales: Sliceable, dtype: torch.dtype) -> None:
        super().__init__(dequantised_shape(values.get_shape()), dtype)
        self._values, self._scales = values, scales

    def _dequantise(self, box: Box) -> torch.Tensor:
        experts, inputs, outputs = box
        groups = _covering(inputs, _MXFP4_GROUP)
        stored = _slices([experts, outputs, groups])
        whole = convert_moe_packed_tensors(
            self._values[stored], self._scales[stored], dtype=self._dtype
        )
        first = inputs.start - groups.start * _MXFP4_GROUP
        return whole[:, first : first + len(inputs)]


def dequantised(
    stored: Mapping[str, Sliceable], folder: Path, dtype: torch.dtype
) -> dict[str, Sliceable]:
    """Return a model's tensors from stored ones; quantised ones get `dtype`."""
    plain, quantised = split_quantised(stored)
    tensors = {name: stored[name] for name in plain}
    block = _block_of_config(quantisation_in(folder)) if quantised else None
    for name, (values, scales) in quantised.items():  # `quantised_problems` has refused others
        parts, is_mxfp4 = (stored[values], stored[scales]), values != name
        tensors[name] = MxFp4(*parts, dtype) if is_mxfp4 else BlockScaled(*parts, dtype, block)
    return tensors


def quantisation_in(folder: Path) -> Mapping[str, Any]:
    """Return what a model's files say on how its weights are quantised, or nothing."""
    try:
        values = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return quantisation_of(values, folder)


def _block_of_config(quantization: Mapping[str, Any]) -> tuple[int, int] | None:
    match quantization.get("weight_block_size"):
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    return None


def take_quantization(config: PreTrainedConfig, folder: Path, path: str) -> bool:
    """Let a configuration of quantised weights say bfloat16; return whether they are quantised.

    Raises:
        UserError: they are quantised in a way that is not read.
    """
    quantization: Mapping[str, Any] = {}
    for part in (config, config.get_text_config()):
        quantization = quantization or getattr(part, QUANTIZATION, None) or {}
        if hasattr(part, QUANTIZATION):
            delattr(part, QUANTIZATION)
    quantization = quantisation_of({QUANTIZATION: quantization}, folder)
    expert_dtype = getattr(config, "expert_dtype", None)
    if problem := unread_quantisation(quantization, expert_dtype, path):
        raise UserError(problem)
    if not quantization:
        return False
    config.dtype = config.get_text_config().dtype = torch.bfloat16
    return True


def quantised_problems(folder: Path) -> list[str]:
    """Return why quantised tensors in a model's files cannot be read. Raises UserError."""
    stored, quantization = list_stored(folder), quantisation_in(folder)
    plain, quantised = split_quantised(stored)
    problems = {
        name: f"{stored[name][0]} without scales"
        for name in plain
        if quantization and (stored[name][0] in DTYPES_OF_PARTS or name.endswith("_blocks"))
    }
    block = _block_of_config(quantization)
    for name, (values, scales) in quantised.items():
        try:
            _require_readable(stored[values], stored[scales], block, is_mxfp4=name != values)
        except ValueError as error:
            problems[name] = str(error)
    if not problems:
        return []
    name = min(problems)
    return [
        f"{folder}: {name} is quantised as {problems[name]}; training does not read that "
        f"({len(problems)} tensors in all) - use a copy of the model in bfloat16, or fetch it again"
    ]


def _require_readable(
    values: Sequence[Any], scales: Sequence[Any], block: tuple[int, int] | None, is_mxfp4: bool
) -> None:
    """Raise ValueError, with dtypes or shapes, for values and scales that are not read."""
    (dtype, shape, *_), (scale_dtype, scale_shape, *_) = values, scales
    if is_mxfp4:
        is_read = dtype == scale_dtype == "U8"
    else:
        is_read = dtype == "F8_E4M3" and scale_dtype in _SCALE_DTYPES
    if not is_read:
        raise ValueError(f"{dtype} with scales in {scale_dtype}")
    if not is_mxfp4:
        block_size(shape, scale_shape, block)
    elif len(shape) != 4 or shape != [*scale_shape, _MXFP4_GROUP // 2]:
        raise ValueError(f"{scale_shape} scales for {shape} bytes")


def piece_bytes(folder: Path) -> int:
    """Return the memory for dequantising a piece, beside the slice; 0 if nothing is quantised."""
    return _PIECE_BYTES.get(method_of(quantisation_in(folder)), 0)


def describe_quantised(folder: Path) -> str:
    """Say how a model's weights are quantised, and how large its files are; or return ""."""
    method = METHODS.get(method_of(quantisation_in(folder)))
    if not method:
        return ""
    size = stored_bytes(folder)
    files = f", {gb(size, 2)} GB of files" if size else ""
    return (
        f"Source: quantised ({method}{files}); each rank dequantises its slices while it reads "
        "them, and export.dtype=source means bfloat16"
    )
