"""Cut long rows of gated delta rules into short ones, in a simulated step.

Transformers' reference code loops over a row in chunks of 64 tokens, a dozen operators each, so
that rows of 131,072 tokens would take minutes. Short rows save the same bytes for the backward, a
state for each chunk, except where each channel has its own decay: those mixers keep long rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from shardtune.model.documents.one_by_one import call_one_by_one, restore
from shardtune.model.documents.state_layers import decays_by_head

_TOKENS_OF_PIECE = 256  # four chunks


def shorten_rows(mixers: list[nn.Module]) -> None:
    """Make gated delta rules cut each document into short rows from now on."""
    for mixer in filter(decays_by_head, mixers):
        is_called_per_document = "forward" in vars(mixer)
        # Cut inside the call by document, or a short row would join two documents.
        restore(mixer)
        mixer.forward = partial(_in_short_rows, mixer.forward)
        if is_called_per_document:
            call_one_by_one(mixer)


def _in_short_rows(forward: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    given = tree_leaves((arguments, options))
    rows, tokens = next(x for x in given if isinstance(x, torch.Tensor)).shape[:2]
    if tokens % _TOKENS_OF_PIECE:
        return forward(*arguments, **options)
    long, short = (rows, tokens), (rows * tokens // _TOKENS_OF_PIECE, _TOKENS_OF_PIECE)
    arguments, options = _reshape((arguments, options), long, short)
    return _reshape(forward(*arguments, **options), short, long)


def _reshape(values: Any, old: tuple[int, int], new: tuple[int, int]) -> Any:
    """Reshape the tensors whose first dimensions (rows, tokens) are `old` to `new`."""

    def reshape(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(*new, *tensor.shape[2:]) if tensor.shape[:2] == old else tensor

    return tree_map_only(torch.Tensor, reshape, values)
