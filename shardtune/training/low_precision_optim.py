"""AdamW whose weights may be bfloat16 and whose moments bfloat16 or 8 bits.

The arithmetic is AdamW's in float32. What is stored is rounded at random, up or down in proportion
to the distance, so that it is right on average: updates far below the spacing of the stored values
add up, which rounding to the nearest value would lose.

The random numbers are a hash of (seed, step, tensor name, index of the element in the whole
tensor). They need no state in a checkpoint, and each rank makes those of its own elements, whatever
its mesh.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from shardtune.distributed.compiling import COMPILE_ERRORS
from shardtune.distributed.tensors import first_indices, to_local
from shardtune.errors import RunFailed, first_line
from shardtune.model.experts import SCALE_BLOCK

PIECE = 1 << 22  # elements that are float32 at the same time


class LowPrecisionAdamW(torch.optim.Optimizer):
    """AdamW with stochastic rounding.

    A weight of bfloat16 has moments of bfloat16. With `eight_bit` every weight of two or more
    dimensions has moments of 8 bits instead, and two float32 scales per block of SCALE_BLOCK
    elements of its last dimension. The moments of norms and biases, which take little memory, keep
    the weight's dtype. All of them are sharded as the weight is.

    `groups` hold named parameters. With `compiled` each update is one compiled function, whose
    result is that of the eager one.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        seed: int,
        eight_bit: bool,
        compiled: bool = False,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._seed, self._eight_bit = seed, eight_bit
        self._update = _compiled(update) if compiled else update

    def new_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the state of a parameter before its first step."""
        state = {"step": torch.zeros((), dtype=torch.float32)}  # on the host, which reads it
        for name, (dtype, last) in self._layout(parameter).items():
            state[name] = _zeros_like(parameter, dtype, last)
        return state

    def state_bytes(self, parameter: torch.Tensor) -> int:
        """Return the size of this rank's state of a parameter, without its 4 bytes of `step`."""
        shape = to_local(parameter).shape
        return sum(
            _with_last(shape, last).numel() * dtype.itemsize
            for dtype, last in self._layout(parameter).values()
        )

    def _layout(self, parameter: torch.Tensor) -> dict[str, tuple[torch.dtype, _Length]]:
        """Return the dtype of each tensor of the state, and its last dimension's length."""
        if not self._eight_bit or parameter.dim() < 2:
            return dict.fromkeys(("exp_avg", "exp_avg_sq"), (parameter.dtype, _same))
        return {
            "exp_avg": (torch.uint8, _same),
            "exp_avg_sq": (torch.uint8, _same),
            "exp_avg_scale": (torch.float32, _blocks),
            "exp_avg_sq_scale": (torch.float32, _blocks),
        }

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient.

        Raises:
            ValueError: a closure is given. It would compute the gradients again.
        """
        if closure is not None:
            raise ValueError("LowPrecisionAdamW takes the gradients as they are - give no closure")
        for group in self.param_groups:
            factors: dict[float, Factors] = {}  # mostly of one step: all parameters share them
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                if parameter.grad is None:
                    continue
                if parameter not in self.state:
                    self.state[parameter] = self.new_state(parameter)
                state = self.state[parameter]
                state["step"] += 1
                step = state["step"].item()
                if step not in factors:
                    factors[step] = _factors(group, step, parameter.device)
                self._update_pieces(name, parameter, state, factors[step], int(step))

    def _update_pieces(
        self,
        name: str,
        parameter: torch.Tensor,
        state: Mapping[str, torch.Tensor],
        factors: Factors,
        step: int,
    ) -> None:
        assert parameter.grad is not None
        local = to_local(parameter)
        if not local.numel():
            return
        width = local.shape[-1] if local.dim() else 1
        first = first_indices(parameter)
        device = local.device
        columns = torch.arange(width, dtype=torch.int32, device=device)
        columns += first[-1] if first else 0
        keys, tables = _noise_keys(self._seed, step, name, device), code_tables(device)
        rows = _row_numbers(local.shape[:-1], first[:-1], parameter.shape[:-1], device)
        matrices = {
            key: to_local(tensor).view(len(rows), -1)
            for key, tensor in {"weight": parameter, "gradient": parameter.grad, **state}.items()
            if key != "step"
        }
        blocks = _whole_blocks_and_rest(width) if "exp_avg_scale" in state else [_Blocks(0, width)]
        n_rows = max(1, PIECE // width)
        for begin in range(0, len(rows), n_rows):
            piece = slice(begin, begin + n_rows)
            for each in blocks:
                # `data`, because torch.compile compiles again for another base of a view.
                part = {key: each.view(key, matrix[piece]).data for key, matrix in matrices.items()}
                places = rows[piece].data, each.view("columns", columns[None])[0].data
                self._update(part, factors, *places, keys, tables)


@dataclass(frozen=True)
class _Blocks:
    """Blocks of `length` columns of a matrix."""

    begin: int  # the first column
    length: int
    number: int = 1

    def view(self, key: str, matrix: torch.Tensor) -> torch.Tensor:
        """Return their part of a matrix [rows, number, length], or of scales [rows, number, 1]."""
        if key.endswith("scale"):
            first = self.begin // SCALE_BLOCK
            return matrix[:, first : first + self.number, None]
        columns = matrix[:, self.begin : self.begin + self.number * self.length]
        return columns.unflatten(1, (self.number, self.length))


def _whole_blocks_and_rest(width: int) -> list[_Blocks]:
    number, rest = divmod(width, SCALE_BLOCK)
    whole = [_Blocks(0, SCALE_BLOCK, number)] if number else []
    return whole + ([_Blocks(width - rest, rest)] if rest else [])


_Length = Callable[[int], int]


def _same(length: int) -> int:
    return length


def _blocks(length: int) -> int:
    return -(-length // SCALE_BLOCK)


def _with_last(shape: torch.Size, length: _Length) -> torch.Size:
    return torch.Size((*shape[:-1], *map(length, shape[-1:])))


def _zeros_like(parameter: torch.Tensor, dtype: torch.dtype, last: _Length) -> torch.Tensor:
    """Return zeros, sharded as the parameter is, whose last dimension has another length."""
    local = to_local(parameter)
    zeros = torch.zeros(_with_last(local.shape, last), dtype=dtype, device=local.device)
    if not isinstance(parameter, DTensor):
        return zeros
    whole = torch.empty(_with_last(parameter.shape, last), device="meta")
    return DTensor.from_local(
        zeros,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


class Factors(NamedTuple):
    """The numbers of one step of AdamW: float32 scalars on the device.

    As tensors they change without another compilation.
    """

    shrink: torch.Tensor  # 1 - lr x weight decay
    rate: torch.Tensor  # lr / (1 - beta1 ** step)
    root: torch.Tensor  # sqrt(1 - beta2 ** step)
    new1: torch.Tensor  # 1 - beta1
    new2: torch.Tensor  # 1 - beta2
    eps: torch.Tensor


def _factors(group: Mapping[str, Any], step: float, device: torch.device) -> Factors:
    lr, (beta1, beta2) = group["lr"], group["betas"]
    values = (
        1 - lr * group["weight_decay"],
        lr / (1 - beta1**step),
        (1 - beta2**step) ** 0.5,
        1 - beta1,
        1 - beta2,
        group["eps"],
    )
    # Filled on the device: the host would wait for a copy.
    return Factors(*(torch.full((), v, dtype=torch.float32, device=device) for v in values))


def update(
    tensors: Mapping[str, torch.Tensor],
    factors: Factors,
    rows: torch.Tensor,
    columns: torch.Tensor,
    keys: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    tables: tuple[CodeTable, CodeTable],
) -> None:
    """Update a part of a weight and its moments in place.

    Args:
        tensors: weight, gradient, exp_avg and exp_avg_sq [rows, blocks, length], and the scales of
            moments of 8 bits [rows, blocks, 1].
        rows, columns: their numbers in the whole tensor, int64 [rows] and int32 [blocks, length].
        keys: of the noise of the weight and the two moments, int32 scalars.
        tables: the codes of the two moments.

    The formula is that of torch.optim.AdamW.
    """
    weight, gradient = tensors["weight"], tensors["gradient"].float()
    noise = [_noise(rows, columns, key) for key in keys]
    if "exp_avg_scale" in tensors:
        first = _dequantize(tensors["exp_avg"], tensors["exp_avg_scale"], tables[0])
        second = _dequantize(tensors["exp_avg_sq"], tensors["exp_avg_sq_scale"], tables[1])
    else:
        first, second = tensors["exp_avg"].float(), tensors["exp_avg_sq"].float()
    first = first + (gradient - first) * factors.new1
    second = second + (gradient * gradient - second) * factors.new2
    # Not sqrt, whose last bit on a CPU depends on the library and on the place in memory.
    change = first / (1 / (second.rsqrt() * factors.root) + factors.eps)
    _store(weight, weight.float() * factors.shrink - change * factors.rate, noise[0])
    if "exp_avg_scale" in tensors:
        _quantize(tensors["exp_avg"], tensors["exp_avg_scale"], first, noise[1], tables[0])
        # A squared gradient that became 0 would make the next update as large as 1 / eps.
        floor = tables[1].sizes[1]
        _quantize(
            tensors["exp_avg_sq"], tensors["exp_avg_sq_scale"], second, noise[2], tables[1], floor
        )
    else:
        _store(tensors["exp_avg"], first, noise[1])
        _store(tensors["exp_avg_sq"], second, noise[2])


def _compiled(function: Callable[..., None]) -> Callable[..., None]:
    compiled = torch.compile(function, dynamic=True)

    def call(*arguments: Any) -> None:
        try:
            compiled(*arguments)
        except COMPILE_ERRORS as error:
            raise RunFailed(
                f"model.compile=true: the optimizer cannot be compiled here ({first_line(error)}) "
                "- install the missing part, such as a C++ compiler on a CPU, or use "
                "model.compile=false"
            ) from error

    return call


# Noise.


def _noise_keys(
    seed: int, step: int, name: str, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the keys of three independent noises, int32 scalars."""
    digest = hashlib.sha256(f"{seed}/{step}/{name}".encode()).digest()
    numbers = (
        int.from_bytes(digest[begin : begin + 4], "little", signed=True) for begin in (0, 4, 8)
    )
    one, two, three = (torch.full((), n, dtype=torch.int32, device=device) for n in numbers)
    return one, two, three


def _row_numbers(
    sizes: Iterable[int], first: Iterable[int], whole: Iterable[int], device: torch.device
) -> torch.Tensor:
    """Return the number, in the whole tensor, of each row of a box of it.

    `first` and `sizes` give the box in every dimension but the last, `whole` the tensor.
    """
    rows = torch.zeros((), dtype=torch.int64, device=device)
    for size, begin, length in zip(sizes, first, whole, strict=True):
        rows = rows[..., None] * length + torch.arange(begin, begin + size, device=device)
    return rows.flatten()


def _noise(rows: torch.Tensor, columns: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return 32 random bits for each element, int32 [rows, blocks, length]."""
    of_row = _hash(rows.to(torch.int32) ^ _hash((rows >> 32).to(torch.int32) ^ key))
    return _hash(of_row[:, None, None] ^ _hash(columns))


def _hash(x: torch.Tensor) -> torch.Tensor:
    """Mix 32 bits: lowbias32 of https://github.com/skeeto/hash-prospector."""
    x = (x ^ _shift_right(x, 16)) * 0x7FEB352D
    x = (x ^ _shift_right(x, 15)) * (0x846CA68B - 2**32)
    return x ^ _shift_right(x, 16)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    # `>>` of an int32 fills with the sign.
    return (x >> bits) & (2 ** (32 - bits) - 1)


# Storage.


def _store(target: torch.Tensor, value: torch.Tensor, noise: torch.Tensor) -> None:
    """Write float32 values; into bfloat16, their upper 16 bits, by chance one more."""
    if target.dtype == torch.bfloat16:
        bits = (value.view(torch.int32) + _shift_right(noise, 16)) & -(2**16)
        value = bits.view(torch.float32)
    target.copy_(value)


def magnitudes(bits: int) -> torch.Tensor:
    """Return the 2 ** bits values that codes stand for, from 0 to 1, ascending: a dynamic map.

    Each decade has twice as many evenly spaced values as the one below it (arXiv 1511.04561).
    """
    values = [0.0]
    for i in range(bits):
        values += torch.linspace(10.0 ** (i - bits), 10.0 ** (i - bits + 1), 2**i + 1).tolist()[1:]
    return torch.tensor(values)


def _lower_codes(values: torch.Tensor) -> torch.Tensor:
    """Return the code of the largest value not above x, by the upper 16 bits of a float32 x <= 1.

    It is right where x has no more bits; else the next one may be.
    """
    cell_of_one = 0x3F80
    cells = (torch.arange(cell_of_one + 1, dtype=torch.int32) << 16).view(torch.float32)
    return torch.bucketize(cells, values, right=True, out_int32=True) - 1


class CodeTable(NamedTuple):
    """What the codes of a moment stand for, as shares of the block's largest size."""

    values: torch.Tensor  # of each code [256]; the sign is the upper bit of signed ones
    sizes: torch.Tensor  # ascending, without sign [128 or 256]
    lower: torch.Tensor  # see _lower_codes


@functools.cache
def code_tables(device: torch.device) -> tuple[CodeTable, CodeTable]:
    """Return the tables of the first moment, which is signed, and of the second, unsigned."""
    half, full = magnitudes(7), magnitudes(8)
    signed = CodeTable(torch.cat([half, -half]), half, _lower_codes(half))
    unsigned = CodeTable(full, full, _lower_codes(full))

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if device.type != "cuda":
            return tensor.to(device)
        return tensor.pin_memory().to(device, non_blocking=True)  # the host does not wait

    first, second = (CodeTable(*map(move, table)) for table in (signed, unsigned))
    return first, second


def _dequantize(codes: torch.Tensor, scale: torch.Tensor, table: CodeTable) -> torch.Tensor:
    return table.values[codes.to(torch.int32)] * scale


def _quantize(
    codes: torch.Tensor,
    scale: torch.Tensor,
    value: torch.Tensor,
    noise: torch.Tensor,
    table: CodeTable,
    floor: torch.Tensor | None = None,
) -> None:
    """Write the codes and scales of float32 values [rows, blocks, length].

    Shares above 0 and below `floor` become `floor`.
    """
    size = value.abs()
    largest = size.amax(-1, keepdim=True)
    scale.copy_(largest)
    # Smaller scales may be flushed to zero.
    share = torch.where(largest >= torch.finfo(torch.float32).tiny, size / largest, 0.0)
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
    codes.copy_(code)
