"""Sequences longer than `data.max_length` are truncated, split, dropped or refused."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardtune.data.records import RecordError


def fit_to_length(
    trained: npt.ArrayLike, max_length: int, overflow: str
) -> list[tuple[slice, npt.NDArray[np.bool_]]]:
    """Cut a sequence into pieces of at most `max_length` tokens.

    Pieces of `split` overlap by one token, which is only context in the later piece, so each
    trained token is in exactly one piece. Pieces without a trained token are left out.

    Args:
        trained: the flags of the sequence, bool [tokens].
        overflow: `truncate`, `split`, `drop` or `error`.

    Returns:
        (its slice of the sequence, its trained flags) of each piece. The first token of a piece
        has no predecessor and is not trained.

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
                "raise data.max_length, or choose data.overflow=truncate, split or drop"
            )
        splits = list(range(0, n_tokens - 1, max_length - 1))
        starts = {"truncate": [0], "drop": [], "split": splits}[overflow]
    pieces = []
    for start in starts:
        piece = slice(start, min(start + max_length, n_tokens))
        piece_trained = flags[piece].copy()
        piece_trained[:1] = False
        if piece_trained.any():
            pieces.append((piece, piece_trained))
    return pieces
