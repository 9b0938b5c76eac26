"""AdamW whose weights may be bfloat16 and whose moments bfloat16 or 8 bits.

The arithmetic is AdamW's in float32. What is stored is rounded at random, up or down in proportion
to the distance, so that it is right on average: updates far below the spacing of the stored values
add up, which rounding to the nearest value would lose.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from shardtune.distributed.compiling import compile_for_all_lengths
from shardtune.distributed.tensors import sharded_as, to_local
from shardtune.model.experts import SCALE_BLOCK
from shardtune.training.host_states import HostStates, piece_rows
from shardtune.training.stochastic_rounding import (
    CodeTable,
    code_tables,
    dequantize,
    in_blocks,
    noise_bits,
    noise_keys,
    places,
    quantize,
    store_rounded,
)

# A compiled update stores no number between, so that its pieces need only fit 32-bit indices.
_COMPILED_PIECE = 1 << 28
_TRIED = 1 << 18  # elements of a trial: as many as the compiler's choices need to be a large one's
_MOST_GRAPHS = 64  # of few and many rows or blocks, with and without a rest, and of each dtype
_ALIGNED = 16  # rows of which any number begins where kernels read aligned


class LowPrecisionAdamW(torch.optim.Optimizer):
    """AdamW with stochastic rounding.

    A weight of bfloat16 has moments of bfloat16. With `eight_bit` every weight of two or more
    dimensions has moments of 8 bits instead, and two float32 scales per block of SCALE_BLOCK
    elements of its last dimension. The moments of norms and biases, which take little memory, keep
    the weight's dtype. All of them are sharded as the weight is.

    `groups` hold named parameters.

    Attributes:
        gradient_factor: multiplies each gradient in float32 where the next step reads it.
        is_compiled: a parameter is updated by few compiled kernels, or by hundreds for each piece.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        seed: int,
        eight_bit: bool,
        master: torch.dtype | None = None,
        host: HostStates | None = None,
    ) -> None:
        """`master`: dtype of the weights that are updated, if not that of the parameters.

        `host` has these weights and the moments.
        """
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._seed, self._eight_bit = seed, eight_bit
        self._master, self.host = master, host
        self._update = update
        self.is_compiled = False
        self.gradient_factor = 1.0

    def compile_update(self) -> None:
        """Compile the update, and try it on zeros as wide as each parameter.

        Every graph of the later steps is compiled now. What the compiler raises leaves the update
        eager.
        """
        compiled = compile_for_all_lengths(update, fullgraph=True, recompile_limit=_MOST_GRAPHS)
        trained = [p for group in self.param_groups for p in group["params"]]
        shapes = dict.fromkeys(self._trial_shape(p) for p in trained if to_local(p).numel())
        with torch.no_grad():
            for shape in shapes:
                compiled(*self._trial(shape, trained[0].device))
        self._update, self.is_compiled = compiled, True

    def _trial_shape(self, parameter: torch.Tensor) -> _TrialShape:
        local = to_local(parameter)
        width = local.shape[-1] if local.dim() else 1
        return _TrialShape(
            rows=1 if local.numel() == width else max(2, _TRIED // width),
            width=width,
            weight=self._master or local.dtype,
            gradient=parameter.grad_dtype or local.dtype,
            state=tuple(self._layout(parameter).items()),
        )

    def _trial(self, shape: _TrialShape, device: torch.device) -> tuple[Any, ...]:
        """Return arguments of `update`."""
        zeros = functools.partial(torch.zeros, device=device)
        tensors = {
            "weight": zeros(shape.rows, shape.width, dtype=shape.weight),
            "gradient": zeros(shape.rows, shape.width, dtype=shape.gradient),
        }
        for name, (dtype, last) in shape.state:
            tensors[name] = zeros(shape.rows, last(shape.width), dtype=dtype)
        rows = torch.arange(shape.rows, device=device)
        columns = torch.arange(shape.width, dtype=torch.int32, device=device)
        factors = _factors(self.param_groups[0], 1, self.gradient_factor, device)
        key = zeros(4, dtype=torch.int32)
        return tensors, factors, rows, columns, key, code_tables(device)

    def update_eagerly(self) -> None:
        self._update, self.is_compiled = update, False

    def new_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the state of a parameter before its first step."""
        state = {"step": torch.zeros((), dtype=torch.float32)}  # on the host, which reads it
        for name, (dtype, last) in self._layout(parameter).items():
            state[name] = self._zeros_like(parameter, dtype, last)
        return state

    def _zeros_like(
        self, parameter: torch.Tensor, dtype: torch.dtype, last: _Length
    ) -> torch.Tensor:
        """Return zeros, sharded as the parameter is, whose last dimension has another length."""
        local, whole = to_local(parameter), _with_last(parameter.shape, last)
        on_device = functools.partial(torch.zeros, device=local.device)
        zeros = self.host.zeros if self.host else on_device
        return sharded_as(parameter, zeros(_with_last(local.shape, last), dtype=dtype), whole)

    def state_bytes(self, parameter: torch.Tensor) -> int:
        """Return the size of this rank's state of a parameter, without its 4 bytes of `step`."""
        shape = to_local(parameter).shape
        return sum(
            _with_last(shape, last).numel() * dtype.itemsize
            for dtype, last in self._layout(parameter).values()
        )

    def eager_bytes(self, parameter: torch.Tensor) -> int:
        """Return the memory in which an eager update of a parameter works, counted by its tensors.

        A compiled one needs none, and a GPU tells only when it runs whether it can compile.
        """
        local = to_local(parameter)
        width = local.shape[-1] if local.dim() else 1
        rows = min(local.numel() // max(1, width), piece_rows(max(1, width)))
        if not self._eight_bit or parameter.dim() < 2:
            return 7 * 4 * rows * width  # seven numbers of 4 bytes for each element
        return 12 * 4 * rows * _blocks(width) * SCALE_BLOCK

    def _layout(self, parameter: torch.Tensor) -> dict[str, tuple[torch.dtype, _Length]]:
        """Return the dtype of each tensor of the state, and its last dimension's length."""
        if not self._eight_bit or parameter.dim() < 2:
            dtype = self._master or parameter.dtype
            return dict.fromkeys(("exp_avg", "exp_avg_sq"), (dtype, _same))
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
        with self.host.updating() if self.host else nullcontext():
            self._update_all()

    def _update_all(self) -> None:
        for group in self.param_groups:
            named = [
                (name, p)
                for name, p in zip(group["param_names"], group["params"], strict=True)
                if self._gradient(p) is not None
            ]
            steps = [self._count_step(parameter) for _, parameter in named]
            names = [name for name, _ in named]
            device = group["params"][0].device
            keys = noise_keys(self._seed, steps, names, device)
            factors: dict[int, Factors] = {}  # mostly of one step: all parameters share them
            for (_, parameter), step, key in zip(named, steps, keys, strict=True):
                if step not in factors:
                    factors[step] = _factors(group, step, self.gradient_factor, device)
                self._update_pieces(parameter, factors[step], key)

    def _count_step(self, parameter: torch.Tensor) -> int:
        if parameter not in self.state:
            self.state[parameter] = self.new_state(parameter)
        step = self.state[parameter]["step"]
        step += 1
        return int(step.item())

    def _update_pieces(self, parameter: torch.Tensor, factors: Factors, key: torch.Tensor) -> None:
        local = to_local(parameter)
        if not local.numel():
            return
        rows, columns = places(parameter)
        gradient = self._gradient(parameter)
        assert gradient is not None
        tensors = {"weight": parameter, "gradient": gradient, **self.state[parameter]}
        matrices = {
            name: to_local(tensor).view(len(rows), -1)
            for name, tensor in tensors.items()
            if name != "step"
        }
        n_rows, tables = self.piece_rows(len(columns)), code_tables(local.device)
        pieces = [slice(begin, begin + n_rows) for begin in range(0, len(rows), n_rows)]
        parts: Iterable[dict[str, torch.Tensor]] = (
            {name: each[piece] for name, each in matrices.items()} for piece in pieces
        )
        if self.host:
            parts = self.host.on_device(parameter, matrices, pieces)
        for part, piece in zip(parts, pieces, strict=True):
            # `data`, because torch.compile compiles again for another base of a view.
            part = {name: each.data for name, each in part.items()}
            self._update(part, factors, rows[piece].data, columns, key.data, tables)

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        return self.host.gradient(parameter) if self.host else parameter.grad

    def piece_rows(self, n_columns: int) -> int:
        """Return the most rows of a matrix that are updated at once."""
        if not self.is_compiled:
            return piece_rows(n_columns)
        rows = piece_rows(n_columns) if self.host else _COMPILED_PIECE // n_columns
        return max(1, rows // _ALIGNED) * _ALIGNED


_Length = Callable[[int], int]


def _same(length: int) -> int:
    return length


def _blocks(length: int) -> int:
    return -(-length // SCALE_BLOCK)


def _with_last(shape: torch.Size, length: _Length) -> torch.Size:
    return torch.Size((*shape[:-1], *map(length, shape[-1:])))


class _TrialShape(NamedTuple):
    """What a graph of the update may be compiled for."""

    rows: int
    width: int
    weight: torch.dtype
    gradient: torch.dtype
    state: tuple[tuple[str, tuple[torch.dtype, _Length]], ...]


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
    gradient: torch.Tensor  # by which the gradient is multiplied


def _factors(
    group: Mapping[str, Any], step: float, gradient_factor: float, device: torch.device
) -> Factors:
    lr, (beta1, beta2) = group["lr"], group["betas"]
    values = (
        1 - lr * group["weight_decay"],
        lr / (1 - beta1**step),
        (1 - beta2**step) ** 0.5,
        1 - beta1,
        1 - beta2,
        group["eps"],
        gradient_factor,
    )
    # Filled on the device: the host would wait for a copy.
    return Factors(*(torch.full((), v, dtype=torch.float32, device=device) for v in values))


def update(
    tensors: Mapping[str, torch.Tensor],
    factors: Factors,
    rows: torch.Tensor,
    columns: torch.Tensor,
    key: torch.Tensor,
    tables: tuple[CodeTable, CodeTable],
) -> None:
    """Update some rows of a weight and its moments in place.

    Args:
        tensors: weight, gradient, exp_avg and exp_avg_sq [rows, columns], and the scales of moments
            of 8 bits [rows, blocks].
        rows, columns: their numbers in the whole tensor, int64 [rows] and int32 [columns].
        key: of the noise of the weight and the two moments, and an unused one, int32 [4].
        tables: the codes of the two moments.

    The formula is that of torch.optim.AdamW.
    """
    noise = functools.partial(noise_bits, rows, columns)
    first, second = _new_moments(tensors, factors, tables)
    # Not sqrt, whose last bit on a CPU depends on the library and on the place in memory.
    change = first / (1 / (second.rsqrt() * factors.root) + factors.eps)
    weight = tensors["weight"].float() * factors.shrink - change * factors.rate
    store_rounded(tensors["weight"], weight, noise(key[0]))
    del change, weight  # an eager update needs the memory
    if "exp_avg_scale" not in tensors:
        store_rounded(tensors["exp_avg"], first, noise(key[1]))
        store_rounded(tensors["exp_avg_sq"], second, noise(key[2]))
        return
    if torch.compiler.is_compiling():
        # Computed again, from what is read anyway. Else a compiled update would write both moments
        # in float32, and read them when it knows the largest of each block.
        blocks = {
            name: tensor[:, :, None] if name.endswith("scale") else in_blocks(tensor)
            for name, tensor in tensors.items()
        }
        largest = [moment.abs().amax(-1) for moment in _new_moments(blocks, factors, tables)]
    else:
        largest = [in_blocks(moment.abs()).amax(-1) for moment in (first, second)]
    # A squared gradient that became 0 would make the next update as large as 1 / eps.
    floor = tables[1].sizes[1]
    tensors["exp_avg"].copy_(quantize(first, largest[0], noise(key[1]), tables[0]))
    tensors["exp_avg_sq"].copy_(quantize(second, largest[1], noise(key[2]), tables[1], floor))
    tensors["exp_avg_scale"].copy_(largest[0])
    tensors["exp_avg_sq_scale"].copy_(largest[1])


def _new_moments(
    tensors: Mapping[str, torch.Tensor], factors: Factors, tables: tuple[CodeTable, CodeTable]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both moments after this step's gradient, in float32."""
    gradient = tensors["gradient"].float() * factors.gradient
    if "exp_avg_scale" in tensors:
        first = dequantize(tensors["exp_avg"], tensors["exp_avg_scale"], tables[0])
        second = dequantize(tensors["exp_avg_sq"], tensors["exp_avg_sq_scale"], tables[1])
    else:
        first, second = tensors["exp_avg"].float(), tensors["exp_avg_sq"].float()
    first = first + (gradient - first) * factors.new1
    return first, second + (gradient * gradient - second) * factors.new2
