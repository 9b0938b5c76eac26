"""Let gated delta rules take a long row as short ones, in a simulated step.

Transformers' reference code goes along a row in chunks of 64 tokens, a dozen operators each, so
that rows of 131,072 tokens would take minutes. It keeps as many bytes of short rows: a state for
each chunk. Where each channel has a decay of its own it would keep fewer, so that those rows stay.
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

_TOKENS_OF_PIECE = 256  # tokens, in whole chunks


def shorten_rows(mixers: list[nn.Module]) -> None:
    """Let gated delta rules take each document of a row as many short ones, from now on."""
    for mixer in filter(decays_by_head, mixers):
        is_called_per_document = "forward" in vars(mixer)
        restore(mixer)
        mixer.forward = partial(_in_short_rows, mixer.forward)
        if is_called_per_document:
            call_one_by_one(mixer)


def _in_short_rows(forward: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    given = tree_leaves((arguments, options))
    rows, tokens = next(each for each in given if isinstance(each, torch.Tensor)).shape[:2]
    if tokens % _TOKENS_OF_PIECE:
        return forward(*arguments, **options)
    long, short = (rows, tokens), (rows * tokens // _TOKENS_OF_PIECE, _TOKENS_OF_PIECE)
    arguments, options = _reshape((arguments, options), long, short)
    return _reshape(forward(*arguments, **options), short, long)


def _reshape(values: Any, rows: tuple[int, int], others: tuple[int, int]) -> Any:
    """Return values whose tensors (rows, tokens, ...) have as many tokens in other rows."""

    def reshape(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(*others, *tensor.shape[2:]) if tensor.shape[:2] == rows else tensor

    return tree_map_only(torch.Tensor, reshape, values)
