"""How many tokens go to each expert."""

from __future__ import annotations

import torch


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
