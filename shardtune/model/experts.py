"""Stacked experts: parameters of three dimensions, the experts first. FSDP2 shards them, or
`parallel.expert` spreads whole experts over ranks.

Spread experts stay where they are, and tokens travel: each rank of an `expert` group sends its
(token, expert) pairs to the ranks that hold these experts, and gets the outputs back. Ranks with
the same experts, `expert_shard` and `replicate`, are an FSDP group of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from transformers.distributed.expert_parallel import (
    EPImplementation,
    EPImplementationInterface,
    apply_expert_parallelism,
)

from shardtune.distributed.progress import Progress
from shardtune.distributed.tensors import to_local
from shardtune.errors import UserError, divisors
from shardtune.model.lora import is_factor

_MODULE, _STACK = "ep_dispatch_experts", "grouped_gemm"  # transformers' styles


def spread_problems(model: PreTrainedModel, degree: int, copies: int) -> Iterator[str]:
    """Yield why the experts of a model cannot be spread over `degree` ranks.

    FSDP2 then shards those of each rank over `copies`.
    """
    if degree == 1:
        return
    kind, key = model.config.model_type, f"parallel.expert={degree}"
    plan = model._expand_parallel_plan(model.ep_plan)
    stacks = [model.get_parameter(name) for name, style in plan.items() if style == _STACK]
    if _MODULE not in plan.values() or not stacks:
        has_experts = any("expert" in name for name, _ in model.named_parameters())
        lack = "has no plan to spread its experts over ranks" if has_experts else "has no experts"
        yield f"{key}: {kind} {lack} - use parallel.expert=1"
    for number in sorted({stack.shape[0] for stack in stacks if stack.shape[0] % degree}):
        yield (
            f"{key} does not divide the {number} experts of {kind} - "
            f"use one of {divisors(number)} that divides world size / parallel.replicate too"
        )
    # transformers cannot read the empty slices of files that hold stacks.
    local = {(s.shape[0] // degree, s.shape[-1]) for s in stacks if s.shape[0] % degree == 0}
    for experts, width in sorted(local):
        if _leaves_empty_slices(experts, copies) and width % copies:
            yield (
                f"{key}: {copies} ranks share {experts} experts of {kind}, and neither these nor "
                f"their width, {width}, can be cut into {copies} - use a larger parallel.replicate"
            )


def spread_experts(model: PreTrainedModel, mesh: DeviceMesh, progress: Progress) -> list[Any]:
    """Spread the stacked experts over `mesh` by the architecture's plan; return their modules.

    The parameters become DTensors, and each module exchanges tokens around its own forward.
    """
    plan = model._expand_parallel_plan(model.ep_plan)
    # No plan knows adapters, and these would have their module's style.
    plan |= dict.fromkeys(filter(is_factor, plan), _STACK)
    EPImplementationInterface.register("shardtune", partial(ExpertExchange, progress))
    # The ranks with the same batch, none here, would be the third argument.
    apply_expert_parallelism(model, mesh, mesh, plan, ep_implementation="shardtune")
    modules: list[Any] = [m for name, m in model.named_modules() if plan.get(name) == _MODULE]
    for module in modules:  # the sizes of an exchange go through the host
        module.forward = torch.compiler.disable(module.forward)
    return modules


def spread_stacks(model: PreTrainedModel) -> set[str]:
    """Return the names of the stacks, and of their adapters, that `parallel.expert` spreads."""
    plan = model._expand_parallel_plan(model.ep_plan) if model.ep_plan else {}
    return {name for name, style in plan.items() if style == _STACK or is_factor(name)}


def is_spread(parameter: torch.Tensor) -> bool:
    """Return whether a parameter, sharded or gathered, is a stack of spread experts."""
    return isinstance(parameter, DTensor) and "expert" in (
        parameter.device_mesh.mesh_dim_names or ()
    )


def gathered_numel(parameter: torch.Tensor) -> int:
    """Return how many elements of a sharded parameter a rank has once FSDP2 has gathered it."""
    if not is_spread(parameter):
        return parameter.numel()
    return parameter.numel() // cast(DTensor, parameter).device_mesh["expert"].size()


class ExpertExchange(EPImplementation):
    """Bring tokens to the ranks of their experts, and the experts' outputs back.

    transformers' own does not tell the agents of this node that a rank waits for the others.
    """

    def __init__(
        self, progress: Progress, experts: nn.Module, mesh: DeviceMesh, _: DeviceMesh
    ) -> None:
        self._experts_forward = experts.forward  # by the experts' numbers on this rank
        self._local_experts = cast(int, experts.num_experts)
        self._ranks, self._group, self._progress = mesh.size(), mesh.get_group(), progress

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of the experts' outputs for each of this rank's tokens.

        hidden_states: [tokens, width]. top_k_index, the experts' numbers in the layer, and
        top_k_weights: [tokens, k].
        """
        top_k = top_k_index.shape[-1]
        # Sorted by expert, the pairs of each rank are consecutive.
        expert_of_pair = top_k_index.flatten()
        order = expert_of_pair.argsort(stable=True)
        counts = expert_of_pair.new_zeros(self._ranks * self._local_experts + 1)
        _add_counts(counts, expert_of_pair)
        sent_counts = counts[:-1].view(self._ranks, self._local_experts)
        received_counts = torch.empty_like(sent_counts)
        with self._progress.waiting():
            dist.all_to_all_single(received_counts, sent_counts, group=self._group)
            # The layer's one host sync.
            sizes = torch.stack([sent_counts.sum(dim=1), received_counts.sum(dim=1)])
            sent, received = sizes.tolist()

        order = order[: sum(sent)]  # the others chose no expert
        tokens = self._exchange(hidden_states[order // top_k], sent, received)
        local_experts = torch.arange(self._local_experts, device=tokens.device).repeat(self._ranks)
        expert_of_token = local_experts.repeat_interleave(
            received_counts.flatten(), output_size=sum(received)
        )
        outputs = self._exchange(self._run_experts(tokens, expert_of_token), received, sent)

        of_pairs = outputs.new_zeros(len(expert_of_pair), outputs.shape[-1])
        of_pairs[order] = outputs
        weighted = of_pairs.view(*top_k_index.shape, -1) * top_k_weights.unsqueeze(-1)
        return weighted.sum(dim=1)

    def _run_experts(self, tokens: torch.Tensor, expert_of_token: torch.Tensor) -> torch.Tensor:
        """Return each token's output of its own expert, without its weight."""
        n_tokens = len(tokens)
        if n_tokens == 0:
            # A zero token, dropped again below, gives the experts a gradient and lets the backward
            # reach the exchange, in which the other ranks wait for this one.
            tokens, expert_of_token = tokens.sum(0, keepdim=True), expert_of_token.new_zeros(1)
        weights = tokens.new_ones(len(tokens), 1)
        outputs = self._experts_forward(tokens, expert_of_token.unsqueeze(-1), weights)
        return cast(torch.Tensor, outputs)[:n_tokens]

    def _exchange(
        self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> torch.Tensor:
        return cast(torch.Tensor, _Exchange.apply(rows, self._all_to_all, sent, received))

    def _all_to_all(
        self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> torch.Tensor:
        output = rows.new_empty(sum(received), rows.shape[-1])
        with self._progress.waiting():
            dist.all_to_all_single(output, rows.contiguous(), received, sent, group=self._group)
        return output


@torch.library.custom_op("shardtune::count_tokens", mutates_args=("counts",))
def count_tokens(counts: torch.Tensor, top_k_index: torch.Tensor) -> None:
    """Add the tokens of each expert to `counts`, unless this is a layer that is computed again.

    `counts`: [experts + 1]. Its last element takes choices beyond the experts, which some routers
    have for tokens that need none. An operator, because compiled layers cannot ask whether a
    backward runs.
    """
    if torch._C._current_graph_task_id() == -1:
        _add_counts(counts, top_k_index.flatten())


def _add_counts(counts: torch.Tensor, expert_of_pair: torch.Tensor) -> None:
    expert_of_pair = expert_of_pair.clamp(max=len(counts) - 1)
    counts.scatter_add_(0, expert_of_pair, torch.ones_like(expert_of_pair))


class _Exchange(torch.autograd.Function):
    """Send `sent[r]` rows to rank r of the group and receive `received[r]`.

    The backward sends the gradients the other way.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, *exchange: Any) -> torch.Tensor:
        all_to_all, sent, received = exchange
        ctx.reverse = all_to_all, received, sent
        return cast(torch.Tensor, all_to_all(rows, sent, received))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor | None, ...]:
        all_to_all, sent, received = ctx.reverse
        return all_to_all(gradients[0], sent, received), None, None, None


SCALE_BLOCK = 256  # elements of the last dimension that share a scale, with adamw8bit


def shard_placement(parameter: nn.Parameter, shards: int) -> Shard:
    """Return the dimension of a parameter that FSDP2 splits into `shards`.

    It is the first, FSDP2's own choice, unless that leaves ranks without any of the stacked
    experts, or of the biases of spread ones. Then it is the last if it divides evenly, as FSDP2
    demands of every other dimension, else the first again, and these ranks have empty slices.
    """
    experts, width = to_local(parameter).shape[0], parameter.shape[-1]
    is_stack = parameter.dim() >= 3 or is_spread(parameter)
    if is_stack and _leaves_empty_slices(experts, shards) and width % shards == 0:
        # The last dimension: the second is where the files' gate and up projections are joined.
        return Shard(parameter.dim() - 1)
    return Shard(0)


def _leaves_empty_slices(length: int, shards: int) -> bool:
    return -(-length // shards) * (shards - 1) >= length


def require_whole_blocks(model: PreTrainedModel) -> None:
    """Check that no rank's part of a weight begins or ends within a block that shares a scale.

    Raises:
        UserError: with the name of a weight of which the last dimension is split so.
    """
    for name, parameter in model.named_parameters():
        width = to_local(parameter).shape[-1]
        if parameter.dim() >= 2 and width < parameter.shape[-1] and width % SCALE_BLOCK:
            raise UserError(
                f"optimizer.name=adamw8bit: {name} is divided into parts of {width} columns, which "
                f"cut its blocks of {SCALE_BLOCK} with one scale - use parallel.expert, so that "
                "whole experts are spread, parallel.replicate, so that fewer ranks share a copy, "
                "or optimizer.name=adamw"
            )


def always_give_expert_gradients(layer: nn.Module) -> None:
    """Make every backward through the layer give its stacked experts a gradient.

    It is zero where no token reached an expert: LongCat's and Zaya's tokens may all go to experts
    without parameters. A rank with fewer gradients than the others reduces less than they do, and
    the collective fails. FSDP2's `set_reduce_scatter_unused_params` would also make gradients for
    parameters that have none on any rank, such as DeepSeek's indexers, and weight decay would
    shrink those. Spread experts always have one, and may be reduced before the layer.
    """

    def stacks() -> Iterator[nn.Parameter]:
        for parameter in layer.parameters():
            if parameter.dim() >= 3 and not is_spread(parameter):
                yield parameter

    def fill(_: torch.Tensor) -> None:
        for parameter in stacks():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def watch(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        for argument in arguments:
            if isinstance(argument, torch.Tensor) and argument.requires_grad:
                # Its gradient is complete after those of the experts, and before FSDP2 reduces the
                # layer's.
                argument.register_hook(fill)

    if next(stacks(), None) is not None:
        layer.register_forward_pre_hook(watch)
