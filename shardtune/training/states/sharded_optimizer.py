"""The optimizer of a run: applies an update rule to each rank's part of the weights, and its bytes.

Values that are stored in fewer bits than float32 are rounded at random, up or down in proportion to
the distance, so that they are right on average. Updates far below the spacing of stored values then
add up; rounding to the nearest value would lose them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from transformers import PreTrainedModel

from shardtune.distributed.compiling import compile_for_all_lengths
from shardtune.distributed.layout import BYTES, Layout
from shardtune.distributed.tensors import DTYPES, first_indices, sharded_as, to_local
from shardtune.model.fsdp_groups import gathered_groups
from shardtune.optimizers.rounding import code_tables, noise_keys
from shardtune.optimizers.rules import State, UpdateRule
from shardtune.training.states.host_states import HostStates, piece_rows

# A compiled update stores no intermediate results: its pieces must only fit 32-bit indices.
_COMPILED_PIECE = 1 << 28
_TRIED = 1 << 18  # elements of a trial, for which the compiler chooses as for a large weight
_MOST_GRAPHS = 64  # for few and many rows or blocks, with and without a rest, and for each dtype
_ALIGNED = 16  # rows: pieces of a multiple of these begin where kernels read aligned


class ShardedOptimizer(torch.optim.Optimizer):
    """Applies `rule` to named parameters, whose states are sharded as the parameters are.

    Attributes:
        gradient_factor: multiplies each gradient, in float32, as the next step reads it.
        is_compiled: few compiled kernels update a parameter, not hundreds for each piece.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        rule: type[UpdateRule],
        seed: int,
        master: torch.dtype | None = None,
        host: HostStates | None = None,
        **hyperparameters: Any,
    ) -> None:
        """`master`: the dtype of master weights, which `host` holds with the states."""
        super().__init__(groups, {"weight_decay": 0.0, **hyperparameters})
        self.rule, self.host, self._seed, self._master = rule, host, seed, master
        self.gradient_factor = 1.0
        self.update_eagerly()

    @property
    def trained(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def update_eagerly(self) -> None:
        self._update: Callable[..., None] = self.rule.update
        self.is_compiled = False

    def compile_update(self) -> None:
        """Compile the update, and try it on zeros as wide as each parameter."""
        # The trial compiles every graph of later steps now. The update stays eager if it raises.
        update = self.rule.update
        compiled = compile_for_all_lengths(update, fullgraph=True, recompile_limit=_MOST_GRAPHS)
        shapes = dict.fromkeys(self._trial_shape(p) for p in self.trained if to_local(p).numel())
        with torch.no_grad():
            for shape in shapes:
                compiled(*self._trial(shape, self.trained[0].device))
        self._update, self.is_compiled = compiled, True

    def _trial_shape(self, parameter: torch.Tensor) -> _TrialShape:
        local = to_local(parameter)
        width = _width(local)
        return _TrialShape(
            rows=1 if local.numel() == width else max(2, _TRIED // width),
            width=width,
            weight=self._master or local.dtype,
            gradient=parameter.grad_dtype or local.dtype,
            states=tuple(self._states(parameter).items()),
        )

    def _trial(self, shape: _TrialShape, device: torch.device) -> tuple[Any, ...]:
        zeros = functools.partial(torch.zeros, device=device)
        tensors = {
            "weight": zeros(shape.rows, shape.width, dtype=shape.weight),
            "gradient": zeros(shape.rows, shape.width, dtype=shape.gradient),
        }
        for name, state in shape.states:
            tensors[name] = zeros(shape.rows, state.length(shape.width), dtype=state.dtype)
        rows = torch.arange(shape.rows, device=device)
        columns = torch.arange(shape.width, dtype=torch.int32, device=device)
        factors = self.rule.factors(self.param_groups[0], 1, self.gradient_factor, device)
        key = zeros(4, dtype=torch.int32)
        return tensors, factors, rows, columns, key, code_tables(device)

    def new_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        tensors = {"step": torch.zeros((), dtype=torch.float32)}  # the host reads it
        local = to_local(parameter)
        zeros = (
            self.host.zeros if self.host else functools.partial(torch.zeros, device=local.device)
        )
        for name, state in self._states(parameter).items():
            part, whole = (_with_length(shape, state) for shape in (local.shape, parameter.shape))
            tensors[name] = sharded_as(parameter, zeros(part, dtype=state.dtype), whole)
        return tensors

    def state_sizes(self, parameter: torch.Tensor) -> Iterator[int]:
        """Yield the bytes of each tensor in this rank's state of a parameter, except `step`."""
        for state in self._states(parameter).values():
            shape = _with_length(to_local(parameter).shape, state)
            yield shape.numel() * state.dtype.itemsize

    def eager_bytes(self, parameter: torch.Tensor) -> int:
        """Return the memory of intermediate results in an eager update of a parameter."""
        # A compiled update has none. A plan cannot know whether a GPU will compile, so it counts.
        local = to_local(parameter)
        width = max(1, _width(local))
        rows = min(local.numel() // width, piece_rows(width))
        return self.rule.eager_bytes(rows, width, parameter.dim() >= 2)

    def _states(self, parameter: torch.Tensor) -> dict[str, State]:
        return self.rule.states(self._master or parameter.dtype, parameter.dim() >= 2)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient. Raises ValueError for a closure."""
        # A closure would compute gradients again, outside of the step's order of collectives.
        if closure is not None:
            raise ValueError("a closure would compute gradients again - call step() without one")
        with self.host.updating() if self.host else nullcontext():
            for group in self.param_groups:
                self._update_group(group)

    def _update_group(self, group: dict[str, Any]) -> None:
        # By the number of a parameter's step, mostly one number: its factors serve all parameters.
        by_step: dict[int, dict[str, torch.Tensor]] = {}
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            if self._gradient(parameter) is not None:
                step = self._count_step(parameter)
                if to_local(parameter).numel():
                    by_step.setdefault(step, {})[name] = parameter
        device = group["params"][0].device
        for step, named in by_step.items():
            factors = self.rule.factors(group, step, self.gradient_factor, device)
            if self.rule.is_fused and not self.host:
                self._update(list(map(self._tensors, named.values())), factors)
                continue
            # Noise follows from (seed, step, name, place): it is the same on any number of ranks.
            keys = noise_keys(self._seed, step, named, device)
            for parameter, key in zip(named.values(), keys, strict=True):
                self._update_pieces(parameter, factors, key)

    def _count_step(self, parameter: torch.Tensor) -> int:
        if parameter not in self.state:
            self.state[parameter] = self.new_state(parameter)
        step = self.state[parameter]["step"]
        step += 1
        return int(step.item())

    def _tensors(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        tensors = {"weight": parameter, "gradient": self._gradient(parameter)}
        tensors |= self.state[parameter]
        return {name: to_local(cast(Any, x)) for name, x in tensors.items() if name != "step"}

    def _update_pieces(self, parameter: torch.Tensor, factors: Any, key: torch.Tensor) -> None:
        rows, columns = places(parameter)
        matrices = {name: x.view(len(rows), -1) for name, x in self._tensors(parameter).items()}
        n_rows, tables = self.piece_rows(len(columns)), code_tables(rows.device)
        pieces = [slice(begin, begin + n_rows) for begin in range(0, len(rows), n_rows)]
        parts: Iterable[dict[str, torch.Tensor]] = (
            {name: each[piece] for name, each in matrices.items()} for piece in pieces
        )
        if self.host:
            parts = self.host.on_device(parameter, matrices, pieces)
        for part, piece in zip(parts, pieces, strict=True):
            # `.data` hides the base of a view: for another base torch.compile would compile again.
            part = {name: each.data for name, each in part.items()}
            tensors = [part] if self.rule.is_fused else part
            self._update(tensors, factors, rows[piece].data, columns, key.data, tables)

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        return self.host.gradient(parameter) if self.host else parameter.grad

    def piece_rows(self, n_columns: int) -> int:
        """Return the most rows of a matrix that are updated at once."""
        if not self.is_compiled:
            return piece_rows(n_columns)
        rows = piece_rows(n_columns) if self.host else _COMPILED_PIECE // n_columns
        return max(1, rows // _ALIGNED) * _ALIGNED


class _TrialShape(NamedTuple):
    """The shapes and dtypes for which a graph of the update is compiled."""

    rows: int
    width: int
    weight: torch.dtype
    gradient: torch.dtype
    states: tuple[tuple[str, State], ...]


def _width(local: torch.Tensor) -> int:
    return local.shape[-1] if local.dim() else 1


def _with_length(shape: torch.Size, state: State) -> torch.Size:
    return torch.Size((*shape[:-1], *map(state.length, shape[-1:])))


def places(parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers, in the whole tensor, of this rank's rows (int64) and columns (int32)."""
    # Rows are those of a matrix as wide as the last dimension.
    local, first = to_local(parameter), first_indices(parameter)
    box = tuple(zip(local.shape[:-1], first[:-1], parameter.shape[:-1], strict=True))
    begin, width = first[-1] if local.dim() else 0, _width(local)
    return _row_numbers(box, local.device), _column_numbers(begin, width, local.device)


@functools.cache  # equal layers have equal boxes, so that the cache stays small
def _row_numbers(box: tuple[tuple[int, int, int], ...], device: torch.device) -> torch.Tensor:
    """Return the number, in the whole tensor, of each row of a rank's box."""
    # `box` has (size, first index, the tensor's size) of every dimension but the last.
    rows = torch.zeros((), dtype=torch.int64, device=device)
    for size, begin, length in box:
        rows = rows[..., None] * length + torch.arange(begin, begin + size, device=device)
    return rows.flatten()


@functools.cache
def _column_numbers(begin: int, size: int, device: torch.device) -> torch.Tensor:
    return torch.arange(begin, begin + size, dtype=torch.int32, device=device)


@dataclass(frozen=True)
class StateBytes:
    """The bytes of this rank's parameters, of their gradients and of the optimizer's state.

    With `optimizer.offload` the first three attributes count the device's part alone.
    """

    parameters: int
    gradients: int
    optimizer: int
    host_masters: int = 0
    host_gradients: int = 0
    host_optimizer: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    @property
    def host(self) -> int:
        return self.host_masters + self.host_gradients + self.host_optimizer

    @property
    def saved_optimizer(self) -> int:
        """Return the bytes of the optimizer's state, on the device or in host memory."""
        return self.optimizer + self.host_optimizer


def state_bytes(model: PreTrainedModel, optimizer: ShardedOptimizer, layout: Layout) -> StateBytes:
    """Compute the bytes of the state after the first step; nothing is allocated."""
    trained, gradient_bytes = optimizer.trained, BYTES[layout.gradient_dtype]
    gradients = sum(to_local(p).numel() for p in trained) * gradient_bytes
    states = sum(chain(*map(optimizer.state_sizes, trained)))
    parameters = sum(to_local(p).nbytes for p in model.parameters())
    steps = 4 * len(trained)  # each parameter's `step` is a float32 scalar
    if not layout.offloads:
        return StateBytes(parameters, gradients, states + steps)
    # A group's gradients leave the device while the next group's gradients are reduced.
    groups = gathered_groups(model).values()
    largest = max(sum(to_local(p).numel() for p in g if p.requires_grad) for g in groups)
    master = DTYPES[layout.master_dtype]
    masters = sum(to_local(p).numel() * master.itemsize for p in trained if p.dtype != master)
    in_flight = 2 * largest * gradient_bytes
    return StateBytes(parameters, in_flight, steps, masters, gradients, states)
