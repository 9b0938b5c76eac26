"""Bring tokens to the ranks of their experts, and the experts' outputs back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardtune.distributed.exchange import Exchange, linear_map
from shardtune.distributed.progress import Progress
from shardtune.model.moe.grouped_experts import (
    TokenPairs,
    are_stacked,
    expert_outputs,
    inverse,
    take_rows,
)


class ExpertExchange:
    """Brings tokens to the ranks of their experts, and the experts' outputs back."""

    # Tokens travel with their weights, and outputs come back weighted. Only a sum follows, whose
    # backward needs no output: a layer that is computed again ends before outputs travel.

    def __init__(
        self,
        experts: nn.Module,
        shared: Sequence[SharedExperts],
        mesh: DeviceMesh,
        progress: Progress,
    ) -> None:
        self._experts, self._experts_forward, self._shared = experts, experts.forward, shared
        self._local_experts = cast(int, experts.num_experts)
        self._ranks, self._progress = mesh.size(), progress
        self._exchange = Exchange(mesh.get_group(), progress)

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of the experts' outputs for each token of this rank."""
        # hidden_states: [tokens, width]; top_k_index and top_k_weights: [tokens, k]. An index is
        # the expert's number in the layer: sorted by it, the pairs of each rank are consecutive.
        expert_of_pair = top_k_index.flatten()
        order = expert_of_pair.argsort(stable=True)
        counts = expert_of_pair.new_zeros(self._ranks * self._local_experts + 1)
        add_counts(counts, expert_of_pair)
        sent_counts = counts[:-1].view(self._ranks, self._local_experts)
        received_counts = torch.empty_like(sent_counts)
        with self._progress.waiting():
            dist.all_to_all_single(received_counts, sent_counts, group=self._exchange.group)
            # The host must know the sizes of the messages: this is its one wait in a layer.
            sizes = torch.stack([sent_counts.sum(dim=1), received_counts.sum(dim=1)])
            sent, received = sizes.tolist()

        order = order[: sum(sent)]  # pairs behind these chose no expert
        pairs = TokenPairs(order, top_k_index.shape)
        there, back = self._exchange.there_and_back(sent, received)
        # Weights travel before tokens: all ranks call these collectives in one order. Then shared
        # experts compute while tokens travel, but not in tiles, which have only a part of a row.
        weights = linear_map(there, back, top_k_weights.flatten()[order].unsqueeze(-1))
        rows = linear_map(pairs.token_by_pair, pairs.sum_by_token, hidden_states)
        arrive = self._exchange.begin(sent, received, rows.detach())
        is_whole = getattr(self._experts, "tiles", 1) == 1
        try:
            for shared in self._shared if is_whole else ():
                shared.run_ahead(hidden_states)
            rows = linear_map(lambda _: arrive(), back, rows)
            outputs = self._run_experts(rows, weights, received_counts)
            outputs = linear_map(back, there, outputs)
            return linear_map(pairs.sum_by_token, pairs.token_by_pair, outputs)
        # Checkpointing ends a layer that is computed again by an exception, as soon as its backward
        # has all it needs. An output computed ahead must not wait for the next micro-batch.
        except BaseException:
            for shared in self._shared:
                shared.forget()
            raise

    def _run_experts(
        self, rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted output of each row that has arrived."""
        # rows, [rows, width], and weights, [rows, 1], are sorted by sender, then by expert. counts,
        # [senders, experts], are numbers of rows.
        n_rows = len(rows)
        if n_rows == 0:
            # A row of zeros, dropped again below, gives the experts a gradient and lets the
            # backward reach the exchange, where all ranks wait for this one.
            rows, weights = rows.sum(0, keepdim=True), weights.sum(0, keepdim=True)
            counts = torch.zeros_like(counts)
            counts[0, 0].fill_(1)
        per_expert = counts.sum(dim=0)
        ends = per_expert.cumsum(0)
        # Where the rows of each sender begin if rows are sorted by expert, then by sender.
        begins = (ends - per_expert) + counts.cumsum(0) - counts
        by_sender = counts.flatten()
        shifts = begins.flatten() - (by_sender.cumsum(0) - by_sender)
        places = torch.arange(len(rows), device=rows.device)
        places += shifts.repeat_interleave(by_sender, output_size=len(rows))
        put, take = partial(take_rows, inverse(places, len(places))), partial(take_rows, places)
        rows, weights = linear_map(put, take, rows), linear_map(put, take, weights)
        expert_ids = torch.arange(self._local_experts, device=rows.device)
        expert_ids = expert_ids.repeat_interleave(per_expert, output_size=len(rows))
        if are_stacked(type(self._experts)):
            ends = ends.to(torch.int32)
            outputs = expert_outputs(self._experts, rows, weights, expert_ids, ends)
        else:
            outputs = self._experts_forward(rows, expert_ids.unsqueeze(-1), weights)
        outputs = linear_map(take, put, outputs)
        return outputs if n_rows else outputs[:0]


@torch.library.custom_op("shardtune::count_tokens", mutates_args=("counts",))
def count_tokens(counts: torch.Tensor, top_k_index: torch.Tensor) -> None:
    """Add the tokens of each expert to `counts`, [experts + 1], once for each forward."""
    # The last element takes choices beyond the experts, which some routers have for tokens that
    # need none. A layer that a backward computes again counts nothing. This is an operator, because
    # compiled layers cannot ask whether a backward runs.
    if torch._C._current_graph_task_id() == -1:
        add_counts(counts, top_k_index.flatten())


def add_counts(counts: torch.Tensor, expert_of_pair: torch.Tensor) -> None:
    expert_of_pair = expert_of_pair.clamp(max=len(counts) - 1)
    counts.scatter_add_(0, expert_of_pair, torch.ones_like(expert_of_pair))


class SharedExperts:
    """Runs the module of shared experts while tokens travel to the experts of a router.

    A later call of the module on the same input returns that output. If an architecture calls the
    module first, or on another input, it runs only then.
    """

    def __init__(self, module: nn.Module) -> None:
        self._forward = module.forward
        self._ahead: tuple[Any, torch.Tensor] | None = None  # the input's elements, and output
        self._came_first = self._has_another_input = False
        module.forward = torch.compiler.disable(self._output)

    def run_ahead(self, tokens: torch.Tensor) -> None:
        """Compute the output for tokens, [tokens, width], and keep it for the module's call."""
        if not self._came_first and not self._has_another_input:
            self._ahead = _elements(tokens), self._forward(tokens)
        self._came_first = False

    def forget(self) -> None:
        self._ahead = None

    def _output(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._ahead is None:
            self._came_first = True
            return cast(torch.Tensor, self._forward(hidden))
        (elements, output), self._ahead = self._ahead, None
        if elements != _elements(hidden):
            self._has_another_input = True
            return cast(torch.Tensor, self._forward(hidden))
        return output.view(*hidden.shape[:-1], -1)


def _elements(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for tensors with the same memory, until its contents change."""
    storage = tensor.untyped_storage()
    return storage, tensor.storage_offset(), tensor.numel(), tensor._version
