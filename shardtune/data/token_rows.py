"""Records that are tokens already: which of them are trained, as other tools write it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from shardtune.data.outcomes import Note, Outcome
from shardtune.data.record_error import RecordError, require

TRAINED_TOKENS = ("labels", "loss_mask")  # what says which tokens are trained
BESIDE_TOKENS = (*TRAINED_TOKENS, "attention_mask", "position_ids")
# Names of other tools for where the documents of a packed row begin.
_OF_PACKED_ROWS = {"seq_lengths", "seq_lens", "sequence_lengths", "seq_start_id", "cu_seqlens"}
_OF_PACKED_ROWS |= {"cu_seq_lens_q", "segment_ids", "document_ids", "doc_ids", "sequence_ids"}
_UNTRAINED = -100  # in labels, as transformers has them


def require_one_document(unread: Iterable[str]) -> None:
    """Raise RecordError where a field of a row of tokens says that it has several documents."""
    if name := next((name for name in unread if name in _OF_PACKED_ROWS), None):
        raise RecordError(
            f"has {name}, so the row may hold several documents, which would attend to one "
            "another - write a record for each: data.packing packs them"
        )


def read_token_row(columns: Mapping[str, Any]) -> tuple[dict[str, Any], list[Note]]:
    """Return `input_ids` without padding, and a `loss_mask` of booleans if a field says it.

    They are tuples: lists in a record are messages. `columns`: those of BESIDE_TOKENS that the
    record has, and `input_ids`.

    Raises:
        RecordError: a field has a value that it may not have, or that contradicts another one.
    """
    ids = columns["input_ids"]
    for name, column in columns.items():
        require(column and isinstance(column, list), name, column, "a list, a number for a token")
        if len(column) != len(ids):
            counts = f"{name} has {len(column)} values, and input_ids {len(ids)}"
            raise RecordError(f"{counts} - write one for each token")
    mask = columns.get("attention_mask", [1] * len(ids))
    attended = [i for i, value in enumerate(mask) if value != 0]
    require(attended, "attention_mask", mask, "1 where there is a token")
    begin, end = attended[0], attended[-1] + 1
    checks: dict[str, tuple[Callable[[int, Any], bool], str]] = {
        "input_ids": (
            lambda i, value: type(value) is int and value >= 0,
            "the id of a token, an integer of at least 0",
        ),
        "attention_mask": (lambda i, value: value == 1, "1, or 0 for padding before or behind all"),
        "labels": (
            lambda i, value: type(value) is int and value in (_UNTRAINED, ids[i]),
            f"{_UNTRAINED}, or where it is trained the token itself: labels are not shifted",
        ),
        "loss_mask": (lambda i, value: value in (0, 1), "1 where the token is trained, else 0"),
        "position_ids": (
            lambda i, value: value in (i - begin, i),
            "0, 1, 2, ..., with a record for each document: data.packing packs them",
        ),
    }
    for name, column in columns.items():
        is_right, remedy = checks[name]
        for i in range(begin, end):
            if not is_right(i, column[i]):
                require(False, f"{name}[{i}]", column[i], remedy)
    record: dict[str, Any] = {"input_ids": tuple(ids[begin:end])}
    flags = [
        tuple(
            value != _UNTRAINED if name == "labels" else value == 1 for value in column[begin:end]
        )
        for name, column in columns.items()
        if name in TRAINED_TOKENS
    ]
    if flags:
        record["loss_mask"] = flags[0]
    if flags and flags[0][1:] != flags[-1][1:]:  # nothing predicts the first token
        raise RecordError("labels and loss_mask contradict each other - keep one of them")
    return record, [(Outcome.PADDING_CUT, "")] if end - begin < len(ids) else []
