"""Matrices of attention and dense MLPs that several ranks share (`parallel.tensor`).

Each rank of a `tensor` group has a slice of a row's tokens, as with `parallel.context`, and a part
of each matrix that transformers' plan of the architecture cuts: by rows (`colwise`) or by columns
(`rowwise`). A module with such matrices gathers the row, computes its share of heads or hidden
units for all tokens, and sums the parts of all ranks for the tokens of each (Megatron's sequence
parallelism, arXiv 2205.05198). Everything else sees a slice, and FSDP2 shards it over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import PreTrainedModel

from shardtune.distributed.exchange import linear_map
from shardtune.distributed.progress import Progress
from shardtune.distributed.tensors import is_cut
from shardtune.model import documents
from shardtune.model.parts import FACTORS

# The parameters of a linear module that are cut with its weight's rows, and with its columns, and
# the dimension of each.
CUTS = ({"weight": 0, "bias": 0, FACTORS[1]: 0}, {"weight": 1, FACTORS[0]: 1})
Sum = Callable[[torch.Tensor], torch.Tensor]


def cut_layers(
    model: PreTrainedModel,
    cut: Iterable[tuple[str, tuple[int, int], int]],
    mesh: DeviceMesh,
    placement: Callable[[nn.Parameter], Shard],
    progress: Progress,
) -> Callable[[nn.Parameter], Any]:
    """Cut the matrices of `cut`, as `Cut` names them, and let their modules exchange tokens.

    Returns FSDP2's placement: each rank's parts are sharded over `tensor_shard`, and other
    parameters as `placement` says.
    """
    rows = _RowsOfRanks(mesh["tensor"], progress)
    blocks: dict[nn.Module, None] = {}
    modules: dict[str, Any] = dict(model.named_modules())
    for name, _, side in cut:
        if name not in modules:  # of another stage
            continue
        module = modules[name]
        for key, dimension in CUTS[side].items():
            parameter = module._parameters.get(key)
            if parameter is not None:
                parts = distribute_tensor(
                    parameter, mesh["tensor"], [Shard(dimension)], src_data_rank=None
                )
                module._parameters[key] = nn.Parameter(parts, parameter.requires_grad)
        forward = partial(_local, module, module.forward)
        if side == 1:
            forward = partial(summed, module, forward, rows.sum)
        # Collectives and swapped parameters cannot be compiled.
        module.forward = torch.compiler.disable(forward)
        blocks[modules[name.rpartition(".")[0]]] = None
    for block in cast(dict[Any, None], blocks):
        block.forward = torch.compiler.disable(partial(_of_rows, block.forward, rows))
    for module in model.modules():
        # Attention alone reads rotary embeddings, and needs those of all tokens.
        if any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False)):
            module.forward = partial(_of_positions, module.forward)
    # FSDP2 makes a group of the parameters that have this very object.
    info = _fsdp_common.FSDPMeshInfo(mesh["tensor_shard"], shard_mesh_dim=0)
    over_parts = _fsdp_common.ShardPlacementResult(Shard(0), info)

    def place(parameter: nn.Parameter) -> Any:
        return over_parts if is_cut(parameter) else placement(parameter)

    return place


@contextmanager
def _local_parameters(module: nn.Module) -> Iterator[None]:
    """Let a module compute with this rank's parts of its parameters."""
    parameters = dict(module._parameters)
    for name, parameter in parameters.items():
        if isinstance(cast(Any, parameter), DTensor):
            module._parameters[name] = cast(Any, parameter).to_local()
    try:
        yield
    finally:
        module._parameters.update(parameters)


def _local(module: nn.Module, forward: Callable[..., Any], hidden: torch.Tensor) -> Any:
    with _local_parameters(module):
        return forward(hidden)


def summed(
    module: nn.Linear, forward: Callable[..., Any], total: Sum, hidden: torch.Tensor
) -> torch.Tensor:
    """Return the sum of all ranks' products for this rank's tokens."""
    # The bias is added once, to the sum.
    bias, module._parameters["bias"] = module._parameters.get("bias"), None
    try:
        output = total(forward(hidden))
    finally:
        module._parameters["bias"] = bias
    return output if bias is None else output + bias


def _of_rows(forward: Callable[..., Any], rows: _RowsOfRanks, *given: Any, **named: Any) -> Any:
    """Call attention or an MLP with the hidden states of whole rows."""
    if isinstance(positions := named.get("position_ids"), torch.Tensor):
        named["position_ids"] = _whole(positions)
    if given:
        return forward(rows.gather(given[0]), *given[1:], **named)
    return forward(**named | {"hidden_states": rows.gather(named["hidden_states"])})


def _of_positions(
    forward: Callable[..., Any],
    x: torch.Tensor,
    position_ids: torch.Tensor,
    *more: Any,
    **named: Any,
) -> Any:
    return forward(x, _whole(position_ids), *more, **named)


def _whole(position_ids: torch.Tensor) -> torch.Tensor:
    """Return the positions of the whole row, of one or more axes, for those of a slice."""
    row = documents.current()
    if row.slices is None:
        return position_ids
    begins = row.boundaries[row.numbers()]
    positions = torch.arange(len(begins), device=begins.device) - begins
    return positions.expand(*position_ids.shape[:-1], -1)


class _RowsOfRanks:
    """Brings the ranks of a group the tokens of whole rows, and the sums of their own tokens."""

    def __init__(self, mesh: DeviceMesh, progress: Progress) -> None:
        self._group, self._progress = mesh.get_group(), progress
        self._number, self._ranks = mesh.get_local_rank(), mesh.size()

    def gather(self, hidden: torch.Tensor) -> torch.Tensor:
        """Turn (1, tokens of the slice, width) into (1, tokens of the row, width)."""
        slices = documents.current().slices
        if slices is None:  # a trial has the same whole row on all ranks
            return linear_map(_same, self._all_reduce, hidden)
        there, back = partial(self._gather, slices), partial(self._scatter, slices)
        return linear_map(there, back, hidden.squeeze(0)).unsqueeze(0)

    def sum(self, parts: torch.Tensor) -> torch.Tensor:
        """Turn (1, tokens of the row, width) into the ranks' sum for the slice."""
        slices = documents.current().slices
        if slices is None:
            return linear_map(self._all_reduce, _same, parts)
        there, back = partial(self._scatter, slices), partial(self._gather, slices)
        return linear_map(there, back, parts.squeeze(0)).unsqueeze(0)

    def _all_reduce(self, rows: torch.Tensor) -> torch.Tensor:
        rows = rows.clone(memory_format=torch.contiguous_format)
        with self._progress.waiting():
            dist.all_reduce(rows, group=self._group)
        return rows

    def _gather(self, slices: list[int], rows: torch.Tensor) -> torch.Tensor:
        # The collective needs equal parts: shorter slices are filled up.
        longest, sent = max(slices), rows.contiguous()
        if len(rows) < longest:
            sent = rows.new_zeros(longest, rows.shape[1])
            sent[: len(rows)] = rows
        gathered = sent.new_empty(self._ranks * longest, rows.shape[1])
        with self._progress.waiting():
            dist.all_gather_single(gathered, sent, group=self._group)
        if sum(slices) == len(gathered):
            return gathered
        return torch.cat([x[:n] for x, n in zip(gathered.split(longest), slices, strict=True)])

    def _scatter(self, slices: list[int], rows: torch.Tensor) -> torch.Tensor:
        longest, sent = max(slices), rows.contiguous()
        if sum(slices) < self._ranks * longest:
            sent = rows.new_zeros(self._ranks * longest, rows.shape[1])
            for place, part in zip(sent.split(longest), rows.split(slices), strict=True):
                place[: len(part)] = part
        received = sent.new_empty(longest, rows.shape[1])
        with self._progress.waiting():
            dist.reduce_scatter_single(received, sent, group=self._group)
        return received[: slices[self._number]]


def _same(rows: torch.Tensor) -> torch.Tensor:
    return rows
