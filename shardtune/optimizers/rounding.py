"""Store float32 values in fewer bits, rounded at random: bfloat16, and codes of 8 bits in blocks.

The random numbers are a hash of (seed, step, tensor name, index of the element in the whole
tensor). A checkpoint needs no state of theirs, and ranks draw the same numbers on any mesh.
"""

import functools
import hashlib
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

SCALE_BLOCK = 256  # elements of a weight's last dimension whose codes share a scale


def noise_keys(seed: int, step: int, names: Iterable[str], device: torch.device) -> torch.Tensor:
    """Return the keys of three independent noises for each tensor, int32 [tensors, 4].

    The fourth column is padding: kernels then read aligned rows.
    """
    digests = (hashlib.sha256(f"{seed}/{step}/{name}".encode()).digest() for name in names)
    keys = [
        [int.from_bytes(digest[i : i + 4], "little", signed=True) for i in (0, 4, 8, 12)]
        for digest in digests
    ]
    return _on_device(torch.tensor(keys, dtype=torch.int32), device)


def _on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy from the host, which does not wait for a GPU."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def noise_bits(rows: torch.Tensor, columns: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return 32 random bits for each element, int32 [rows, columns]."""
    of_row = _hash(rows.to(torch.int32) ^ _hash((rows >> 32).to(torch.int32) ^ key))
    return _hash(of_row[:, None] ^ _hash(columns))


def _hash(x: torch.Tensor) -> torch.Tensor:
    """Mix 32 bits: lowbias32 of https://github.com/skeeto/hash-prospector."""
    x = (x ^ _shift_right(x, 16)) * 0x7FEB352D
    x = (x ^ _shift_right(x, 15)) * (0x846CA68B - 2**32)
    return x ^ _shift_right(x, 16)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    # `>>` of an int32 fills with the sign.
    return (x >> bits) & (2 ** (32 - bits) - 1)


def store_rounded(target: torch.Tensor, value: torch.Tensor, noise: torch.Tensor) -> None:
    """Write float32 values. bfloat16 gets their upper 16 bits, and by chance one unit more."""
    if target.dtype == torch.bfloat16:
        bits = (value.view(torch.int32) + _shift_right(noise, 16)) & -(2**16)
        value = bits.view(torch.float32)
    target.copy_(value)


def magnitudes(bits: int) -> torch.Tensor:
    """Return the 2 ** bits values of the codes, ascending from 0 to 1: a dynamic map.

    Each decade has twice as many evenly spaced values as the one below it (arXiv 1511.04561).
    """
    values = [0.0]
    for i in range(bits):
        values += torch.linspace(10.0 ** (i - bits), 10.0 ** (i - bits + 1), 2**i + 1).tolist()[1:]
    return torch.tensor(values)


def lower_codes(values: torch.Tensor) -> torch.Tensor:
    """Return the code of the largest value not above x, by the upper 16 bits of a float32 x <= 1.

    The entry is exact if x has no lower bits; otherwise the next code may be right.
    """
    cell_of_one = 0x3F80
    cells = (torch.arange(cell_of_one + 1, dtype=torch.int32) << 16).view(torch.float32)
    return torch.bucketize(cells, values, right=True, out_int32=True) - 1


class CodeTable(NamedTuple):
    """The values of a moment's codes, as shares of the largest size in the block."""

    values: torch.Tensor  # [256], one per code; the upper bit of a signed code is its sign
    sizes: torch.Tensor  # ascending, without sign [128 or 256]
    lower: torch.Tensor  # see lower_codes


@functools.cache
def code_tables(device: torch.device) -> tuple[CodeTable, CodeTable]:
    """Return the tables of the signed first moment and of the unsigned second one."""
    half, full = magnitudes(7), magnitudes(8)
    signed = CodeTable(torch.cat([half, -half]), half, lower_codes(half))
    unsigned = CodeTable(full, full, lower_codes(full))

    first, second = (
        CodeTable(*(_on_device(part, device) for part in table)) for table in (signed, unsigned)
    )
    return first, second


def in_blocks(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix as [rows, blocks, SCALE_BLOCK], the last block filled up with zeros."""
    rest = -matrix.shape[1] % SCALE_BLOCK
    padded = nn.functional.pad(matrix, (0, rest)) if rest else matrix
    return padded.unflatten(1, (-1, SCALE_BLOCK))


def _of_elements(scales: torch.Tensor, n_columns: int) -> torch.Tensor:
    """Repeat the scales of blocks for their elements: [rows, columns]."""
    wide = scales[:, :, None].expand(-1, -1, SCALE_BLOCK).flatten(1)
    return wide[:, :n_columns]


def dequantize(codes: torch.Tensor, scale: torch.Tensor, table: CodeTable) -> torch.Tensor:
    if scale.dim() < 3:
        scale = _of_elements(scale, codes.shape[1])
    return table.values[codes.to(torch.int32)] * scale


def quantize(
    value: torch.Tensor,
    largest: torch.Tensor,
    noise: torch.Tensor,
    table: CodeTable,
    floor: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the codes of float32 values [rows, columns]. `largest`: the scales of their blocks.

    Shares above 0 and below `floor` become `floor`.
    """
    largest = _of_elements(largest, value.shape[1])
    # Smaller scales may be flushed to zero.
    share = torch.where(largest >= torch.finfo(torch.float32).tiny, value.abs() / largest, 0.0)
    if floor is not None:
        share = torch.where(share > 0, torch.maximum(share, floor), 0.0)
    sizes, last = table.sizes, len(table.sizes) - 2
    cell = (share.view(torch.int32) >> 16).clamp(0, len(table.lower) - 1)
    lower = table.lower[cell].clamp(max=last)
    lower = (lower + (share >= sizes[lower + 1]).to(torch.int32)).clamp(max=last)
    low, high = sizes[lower], sizes[lower + 1]
    chance = _shift_right(noise, 8).float() * 2.0**-24
    code = lower + (chance * (high - low) < share - low).to(torch.int32)
    if len(sizes) < len(table.values):
        code = code + len(sizes) * (value < 0).to(torch.int32)
    return code
