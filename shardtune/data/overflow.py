"""Sequences longer than `data.max_length` are truncated, split, dropped or refused.

With `data.overflow=turns` only texts are still too long here: tokenize.py has left out the turns
of a conversation that do not fit.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardtune.data.records import RecordError


def fit_to_length(
    trained: npt.ArrayLike, max_length: int, overflow: str
) -> list[tuple[slice, npt.NDArray[np.bool_]]]:
    """Cut a sequence with the flags `trained`, bool [tokens], to at most `max_length` tokens.

    Returns the slice of each piece and its trained flags. The first token of a piece has no
    predecessor and is not trained. Pieces of `split` and `turns` overlap by one token, which is
    only context in the later piece, so each trained token is in exactly one. Pieces that train
    nothing are left out.

    Raises:
        RecordError: the sequence is too long and `overflow` is `error`.
    """
    flags = np.asarray(trained, np.bool_)
    n_tokens = len(flags)
    starts = [0]
    if n_tokens > max_length:
        if overflow == "error":
            raise RecordError(
                f"has {n_tokens} tokens, more than data.max_length={max_length} - shorten it, "
                "raise data.max_length, or choose data.overflow=turns, truncate, split or drop"
            )
        splits = list(range(0, n_tokens - 1, max_length - 1))
        starts = {"truncate": [0], "drop": [], "split": splits, "turns": splits}[overflow]
    pieces = []
    for start in starts:
        piece = slice(start, min(start + max_length, n_tokens))
        piece_trained = flags[piece].copy()
        piece_trained[:1] = False
        if piece_trained.any():
            pieces.append((piece, piece_trained))
    return pieces
