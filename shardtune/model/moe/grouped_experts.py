"""The products of stacked experts, on rows that are sorted by expert.

They equal transformers' `grouped_mm_experts_forward`, without its sorting: rows from other ranks
are brought into order once. Each row's output is multiplied by the router's weight already.

On GPUs `gathering_forward` replaces transformers' forward, which sums the gradients of a token's
copies in any order (compiled: atomic additions in bfloat16), so that no step would repeat.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _grouped_linear

from shardtune.distributed.compiling import compiled_on_gpus
from shardtune.distributed.exchange import linear_map

_Map = Callable[[torch.Tensor], torch.Tensor]


def are_stacked(experts: type[nn.Module]) -> bool:
    """Whether these experts follow transformers' `use_experts_implementation`."""
    return hasattr(experts, "_apply_gate")


def trait(experts: nn.Module, name: str) -> bool:
    """Return a trait of experts. Experts that name no traits (Step 3.7) have a gate alone."""
    return bool(getattr(experts, name, name == "has_gate"))


def gather_both_ways(model: PreTrainedModel) -> None:
    """Let all stacked experts run `gathering_forward`, if they do not exchange tokens."""
    ALL_EXPERTS_FUNCTIONS.register("shardtune", gathering_forward)
    model.set_experts_implementation("shardtune")


def gathering_forward(
    experts: nn.Module,
    hidden_states: torch.Tensor,  # (tokens, width)
    top_k_index: torch.Tensor,  # (tokens, k)
    top_k_weights: torch.Tensor,  # (tokens, k)
) -> torch.Tensor:
    """Return the weighted sum of each token's experts: (tokens, width)."""
    number = cast(Any, experts).down_proj.shape[0]
    # Choices beyond the experts, which some routers have for tokens that need none, add nothing.
    top_k_weights = top_k_weights.masked_fill(top_k_index >= number, 0)
    expert_ids, order = top_k_index.clamp(max=number - 1).flatten().sort()
    pairs = TokenPairs(order, top_k_index.shape)
    # The end of each expert's (token, expert) pairs.
    each = torch.arange(number, device=expert_ids.device)
    ends = torch.searchsorted(expert_ids, each, right=True).to(torch.int32)
    rows = linear_map(pairs.token_by_pair, pairs.sum_by_token, hidden_states)
    put_back = partial(take_rows, pairs.pairs_of_token.flatten())
    weights = linear_map(partial(take_rows, order), put_back, top_k_weights.reshape(-1, 1))
    outputs = expert_outputs(experts, rows, weights, expert_ids, ends)
    return linear_map(pairs.sum_by_token, pairs.token_by_pair, outputs)


def expert_outputs(
    experts: nn.Module,
    rows: torch.Tensor,  # (rows, width), sorted by `expert_ids`
    weights: torch.Tensor,  # (rows, 1)
    expert_ids: torch.Tensor,  # (rows,)
    ends: torch.Tensor,  # (experts,), int32: where the rows of each expert end
) -> torch.Tensor:
    """Return the weighted output of each row's expert: (rows, width)."""
    this: Any = experts  # the attributes of transformers' experts
    # Experts with adapters have a product of their own.
    product = getattr(this, "product", None) or partial(stack_product, experts)
    up = "gate_up_proj" if trait(this, "has_gate") else "up_proj"
    hidden = product(up, rows, expert_ids, ends)
    activate = this._apply_gate if trait(this, "has_gate") else this.act_fn
    if not (trait(this, "has_bias") or trait(this, "has_post_expert_norm")):
        # (w h) W is w (h W): rows are narrower here, and no backward needs the last product, so
        # that a layer that is computed again leaves it out.
        hidden = _weighted_activation(activate, hidden, weights)
        return cast(torch.Tensor, product("down_proj", hidden, expert_ids, ends))
    outputs = product("down_proj", activate(hidden), expert_ids, ends)
    if trait(this, "has_post_expert_norm"):
        outputs = this.post_expert_norm(outputs)
    return cast(torch.Tensor, (outputs * weights).to(outputs.dtype))


def stack_product(
    experts: nn.Module, name: str, rows: torch.Tensor, expert_ids: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """Multiply rows (rows, in) by one stack: (rows, out)."""
    this: Any = experts
    bias = None
    if trait(this, "has_bias"):
        bias = getattr(this, f"{name}_bias")
        choose = partial(take_rows, expert_ids)
        sum_rows = partial(_sum_by_expert, expert_ids, len(bias))
        bias = linear_map(choose, sum_rows, bias) if rows.is_cuda else choose(bias)
    return _grouped_linear(rows, getattr(this, name), ends, bias, trait(this, "is_transposed"))


def _sum_by_expert(expert_ids: torch.Tensor, number: int, rows: torch.Tensor) -> torch.Tensor:
    """Return the sum of each expert's rows, as a product: in one order, and in float32."""
    return F.one_hot(expert_ids, number).t().to(rows.dtype) @ rows


def _weighted_activation(
    activate: _Map, hidden: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    owner = getattr(activate, "__self__", activate)
    activation = getattr(owner, "act_fn", owner)
    has_weights = isinstance(activation, nn.Module) and any(True for _ in activation.parameters())
    if has_weights or torch.compiler.is_compiling():
        return _weighted(activate, hidden, weights)
    return cast(torch.Tensor, _WeightedActivation.apply(activate, hidden, weights))


class _WeightedActivation(torch.autograd.Function):
    """Runs one kernel forward and one backward where a GPU compiles, and keeps only its inputs."""

    @staticmethod
    def forward(
        ctx: Any, activate: _Map, hidden: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.activate = activate
        ctx.save_for_backward(hidden, weights)
        return _weighted_kernel(activate, hidden, weights)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, *_weighted_backward(ctx.activate, *ctx.saved_tensors, gradients[0])


def _weighted(activate: _Map, hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (activate(hidden) * weights).to(hidden.dtype)


_weighted_kernel = compiled_on_gpus("the experts' activation")(_weighted)


@compiled_on_gpus("the experts' activation, backward")
def _weighted_backward(
    activate: _Map, hidden: torch.Tensor, weights: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    transpose: Any = torch.func.vjp(partial(_weighted, activate), hidden, weights)[1]
    return cast(tuple[torch.Tensor, ...], transpose(gradient))


class TokenPairs:
    """Maps tokens to their (token, expert) pairs, and back. Both ways are gathers."""

    # `order`: the numbers of all pairs that have an expert; pairs are counted token by token.
    # `shape`: [tokens, k].
    def __init__(self, order: torch.Tensor, shape: torch.Size) -> None:
        self._token_of_pair = order // shape[1]
        self.pairs_of_token = inverse(order, shape.numel()).view(shape)

    def token_by_pair(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the token of each pair."""
        return tokens[self._token_of_pair]

    def sum_by_token(self, pairs: torch.Tensor) -> torch.Tensor:
        """Return the sum of each token's pairs."""
        if len(pairs) < self.pairs_of_token.numel():
            pairs = F.pad(pairs, (0, 0, 0, 1))  # pairs without an expert add this row of zeros
        return cast(torch.Tensor, _sum_rows(pairs, self.pairs_of_token))


@compiled_on_gpus("the sum over the experts of a token")
def _sum_rows(rows: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return rows[indices].sum(dim=1)


def take_rows(places: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return rows[places]


def inverse(order: torch.Tensor, length: int) -> torch.Tensor:
    """Return the place in `order` of each number below `length`; len(order) if it is missing."""
    places = order.new_full((length,), len(order))
    places[order] = torch.arange(len(order), device=order.device)
    return places
