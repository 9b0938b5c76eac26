"""Stacked experts: parameters of three dimensions, the experts first. FSDP2 shards them, or
`parallel.expert` spreads whole experts over ranks.

Spread experts stay where they are, and tokens travel: each rank of an `expert` group sends its
(token, expert) pairs to the ranks that hold these experts, and gets the outputs back. Ranks with
the same experts, `expert_shard` and `replicate`, are an FSDP group of their own.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

try:
    from transformers.distributed.expert_parallel import (
        EPImplementation,
        EPImplementationInterface,
        apply_expert_parallelism,
    )
except ImportError:  # transformers before 5.23
    EPImplementation = object  # type: ignore[misc, assignment]

from shardtune.distributed.exchange import Exchange, linear_map
from shardtune.distributed.progress import Progress
from shardtune.distributed.tensors import to_local
from shardtune.errors import UserError
from shardtune.model.moe.grouped_experts import (
    TokenPairs,
    are_stacked,
    expert_outputs,
    inverse,
    take_rows,
)
from shardtune.model.source.config_json import (
    older_transformers,
    undivided_experts,
    without_experts,
)
from shardtune.model.traits import has_experts, is_factor, is_stack
from shardtune.optimizers.rounding import SCALE_BLOCK

_MODULE, _STACK = "ep_dispatch_experts", "grouped_gemm"  # transformers' styles
_SHARED = ("shared_expert", "shared_experts", "shared_mlp")  # transformers' names


def spread_problems(model: PreTrainedModel, degree: int, copies: int) -> Iterator[str]:
    """Yield why the experts of a model cannot be spread over `degree` ranks.

    FSDP2 then shards those of each rank over `copies`.
    """
    if degree == 1:
        return
    kind, key = model.config.model_type, f"parallel.expert={degree}"
    if problem := older_transformers(degree):
        yield problem
        return
    plan = _plan_of_experts(model)
    stacks = [model.get_parameter(name) for name, style in plan.items() if style == _STACK]
    if _MODULE not in plan.values() or not stacks:
        if has_experts(model):
            lack = "has no plan to spread its experts over ranks"
            yield f"{key}: {kind} {lack} - use parallel.expert=1"
        else:
            yield without_experts(degree, kind)
    for number in sorted({stack.shape[0] for stack in stacks}):
        if problem := undivided_experts(degree, number, kind):
            yield problem
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
    plan = _plan_of_experts(model)
    # No plan knows adapters, and these would have their module's style.
    plan |= dict.fromkeys(filter(is_factor, plan), _STACK)
    modules: dict[nn.Module, list[SharedExperts]] = {}
    for name, module in model.named_modules():
        if plan.get(name) == _MODULE:
            beside = model.get_submodule(name.rpartition(".")[0]).named_children()
            modules[module] = [SharedExperts(child) for each, child in beside if each in _SHARED]

    def exchange(experts: nn.Module, mesh: DeviceMesh, _: DeviceMesh) -> ExpertExchange:
        return ExpertExchange(experts, modules[experts], mesh, progress)

    EPImplementationInterface.register("shardtune", exchange)
    # The ranks with the same batch, none here, would be the third argument.
    apply_expert_parallelism(model, mesh, mesh, plan, ep_implementation="shardtune")
    for module in cast(dict[Any, Any], modules):  # the sizes of an exchange go through the host
        module.forward = torch.compiler.disable(module.forward)
    return list(modules)


def _plan_of_experts(model: PreTrainedModel) -> dict[str, str]:
    """Return transformers' plan to spread experts, by the names of modules and parameters.

    Gemma 4's cuts its dense MLPs, too, which are FSDP2's here.
    """
    plan = model._expand_parallel_plan(model.ep_plan)
    return {name: style for name, style in plan.items() if style not in ("colwise", "rowwise")}


def spread_stacks(model: PreTrainedModel) -> set[str]:
    """Return the names of the stacks, and of their adapters, that `parallel.expert` spreads."""
    plan = {} if older_transformers(2) or not model.ep_plan else _plan_of_experts(model)
    return {name for name, style in plan.items() if style == _STACK or is_factor(name)}


def stacked_experts(model: PreTrainedModel) -> Iterator[tuple[str, Any, int]]:
    """Yield each module of stacked experts that is called with its router's choices: its name,
    itself and how many experts it has."""
    for name, module in model.named_modules():
        stacks = [*filter(is_stack, module.parameters(recurse=False))]
        # The module itself, tokens, the router's choices and their weights.
        if stacks and len(inspect.signature(type(module).forward).parameters) == 4:
            yield name, module, stacks[0].shape[0]


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

    Tokens travel with their weights, and outputs come back weighted: what follows is a sum, whose
    backward needs no output, so that a layer that is computed again need not bring them back.
    """

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
        """Return the weighted sum of the experts' outputs for each of this rank's tokens.

        hidden_states: [tokens, width]. top_k_index, the experts' numbers in the layer, and
        top_k_weights: [tokens, k].
        """
        # Sorted by expert, the pairs of each rank are consecutive.
        expert_of_pair = top_k_index.flatten()
        order = expert_of_pair.argsort(stable=True)
        counts = expert_of_pair.new_zeros(self._ranks * self._local_experts + 1)
        _add_counts(counts, expert_of_pair)
        sent_counts = counts[:-1].view(self._ranks, self._local_experts)
        received_counts = torch.empty_like(sent_counts)
        with self._progress.waiting():
            dist.all_to_all_single(received_counts, sent_counts, group=self._exchange.group)
            # The layer's one host sync.
            sizes = torch.stack([sent_counts.sum(dim=1), received_counts.sum(dim=1)])
            sent, received = sizes.tolist()

        order = order[: sum(sent)]  # the others chose no expert
        pairs = TokenPairs(order, top_k_index.shape)
        there, back = self._exchange.there_and_back(sent, received)
        weights = linear_map(there, back, top_k_weights.flatten()[order].unsqueeze(-1))
        rows = linear_map(pairs.of_tokens, pairs.sum_by_token, hidden_states)
        arrive = self._exchange.begin(sent, received, rows.detach())
        is_whole = getattr(self._experts, "tiles", 1) == 1
        try:
            for shared in self._shared if is_whole else ():
                shared.run_ahead(hidden_states)
            rows = linear_map(lambda _: arrive(), back, rows)
            outputs = self._run_experts(rows, weights, received_counts)
            outputs = linear_map(back, there, outputs)
            return linear_map(pairs.sum_by_token, pairs.of_tokens, outputs)
        except BaseException:  # a layer that is computed again ends when it has what it needs
            for shared in self._shared:
                shared.forget()
            raise

    def _run_experts(
        self, rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted output of each row that has arrived.

        rows: [rows, width], and weights: [rows, 1], by sender and there by expert. counts:
        [senders, experts], of the rows.
        """
        n_rows = len(rows)
        if n_rows == 0:
            # A zero row, dropped again below, gives the experts a gradient and lets the backward
            # reach the exchange, in which the other ranks wait for this one.
            rows, weights = rows.sum(0, keepdim=True), weights.sum(0, keepdim=True)
            counts = torch.zeros_like(counts)
            counts[0, 0].fill_(1)
        of_experts = counts.sum(dim=0)
        ends = of_experts.cumsum(0)
        # Where the rows of a sender for an expert begin, by expert and there by sender.
        begins = (ends - of_experts) + counts.cumsum(0) - counts
        by_sender = counts.flatten()
        shifts = begins.flatten() - (by_sender.cumsum(0) - by_sender)
        places = torch.arange(len(rows), device=rows.device)
        places += shifts.repeat_interleave(by_sender, output_size=len(rows))
        put, take = partial(take_rows, inverse(places, len(places))), partial(take_rows, places)
        rows, weights = linear_map(put, take, rows), linear_map(put, take, weights)
        expert_ids = torch.arange(self._local_experts, device=rows.device)
        expert_ids = expert_ids.repeat_interleave(of_experts, output_size=len(rows))
        if are_stacked(type(self._experts)):
            ends = ends.to(torch.int32)
            outputs = expert_outputs(self._experts, rows, weights, expert_ids, ends)
        else:
            outputs = self._experts_forward(rows, expert_ids.unsqueeze(-1), weights)
        outputs = linear_map(take, put, outputs)
        return outputs if n_rows else outputs[:0]


class SharedExperts:
    """The experts of all tokens, beside those of a router: they run while tokens travel.

    Their module returns what was computed ahead where it is called behind the others, on the same
    input. Where an architecture calls it before, or on another input, nothing is.
    """

    def __init__(self, module: nn.Module) -> None:
        self._forward = module.forward
        self._ahead: tuple[Any, torch.Tensor] | None = None  # the input's elements, and output
        self._came_first = self._has_another_input = False
        module.forward = torch.compiler.disable(self._output)

    def run_ahead(self, tokens: torch.Tensor) -> None:
        """Compute for tokens, [tokens, width]."""
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
    """Return what tensors with the same elements in memory share, until these change."""
    storage = tensor.untyped_storage()
    return storage, tensor.storage_offset(), tensor.numel(), tensor._version


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


def shard_placement(parameter: nn.Parameter, shards: int) -> Shard:
    """Return the dimension of a parameter that FSDP2 splits into `shards`.

    It is the first, FSDP2's own choice, unless that leaves ranks without any of the stacked
    experts, or of the biases of spread ones. Then it is the last if it divides evenly, as FSDP2
    demands of every other dimension, else the first again, and these ranks have empty slices.
    """
    experts, width = to_local(parameter).shape[0], parameter.shape[-1]
    of_experts = is_stack(parameter) or is_spread(parameter)
    if of_experts and _leaves_empty_slices(experts, shards) and width % shards == 0:
        # The last dimension: the second is where the files' gate and up projections are joined.
        return Shard(parameter.dim() - 1)
    return Shard(0)


def _leaves_empty_slices(length: int, shards: int) -> bool:
    return -(-length // shards) * (shards - 1) >= length


def require_whole_blocks(model: PreTrainedModel, optimizer: str) -> None:
    """Check that no rank's part of a weight begins or ends within a block that shares a scale.

    Raises:
        UserError: with the name of a weight of which the last dimension is split so.
    """
    for name, parameter in model.named_parameters():
        width = to_local(parameter).shape[-1]
        if parameter.dim() >= 2 and width < parameter.shape[-1] and width % SCALE_BLOCK:
            raise UserError(
                f"optimizer.name={optimizer}: {name} is divided into parts of {width} columns, "
                f"which cut its blocks of {SCALE_BLOCK} with one scale - use parallel.expert, so "
                "that whole experts are spread, parallel.replicate, so that fewer ranks share a "
                "copy, or optimizer.name=adamw"
            )


def always_give_gradients(layer: nn.Module) -> None:
    """Make every backward through the layer give what some rows do not use a gradient: zero.

    LongCat's and Zaya's tokens may all go to experts without parameters, and DeepSeek V4 compresses
    no keys of short rows. A rank with fewer gradients than the others reduces less than they do,
    and the collective fails. FSDP2's `set_reduce_scatter_unused_params` would also make gradients
    for parameters that have none on any rank, such as DeepSeek's indexers, and weight decay would
    shrink those. Spread experts always have one, and may be reduced before the layer.
    """

    def sometimes_unused() -> Iterator[nn.Parameter]:
        for name, parameter in layer.named_parameters():
            of_experts = is_stack(parameter) and not is_spread(parameter)
            if of_experts or (".compressor." in name and ".indexer." not in name):
                yield parameter

    def fill(_: torch.Tensor) -> None:
        for parameter in sometimes_unused():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def watch(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        for argument in arguments:
            if isinstance(argument, torch.Tensor) and argument.requires_grad:
                # Its gradient is complete after those of the experts, and before FSDP2 reduces the
                # layer's.
                argument.register_hook(fill)

    if next(sometimes_unused(), None) is not None:
        layer.register_forward_pre_hook(watch)
