"""Records that are tokens already: which of them are trained, as other tools write it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardtune.data.records import Fields, Outcome, RecordError, TokenRow, require

FIELDS = ("input_ids",)
TRAINED_TOKENS = ("labels", "loss_mask", "loss_weights")  # what says which tokens are trained
BESIDE = (*TRAINED_TOKENS, "attention_mask", "position_ids")
# Names of other tools for loss_mask, and for where the documents of a packed row begin.
_MASKS = ("assistant_masks", "assistant_mask", "completion_mask", "response_mask")
_PACKED = {"seq_lengths", "seq_lens", "sequence_lengths", "seq_start_id", "cu_seqlens"}
_PACKED |= {"cu_seq_lens_q", "segment_ids", "document_ids", "doc_ids", "sequence_ids"}
_UNTRAINED = -100  # in labels, as transformers has them
_REMEDIES = {
    "input_ids": "the id of a token, an integer of at least 0",
    "attention_mask": "1, or 0 for padding before or behind all",
    "labels": "-100, or where it is trained the token itself: labels are not shifted",
    "loss_mask": "1 where the token is trained, else 0",
    "loss_weights": "a number from 0, which trains nothing, to 1",
    "position_ids": "0, 1, 2, ..., with a record for each document: data.packing packs them",
}


def read(fields: Fields) -> TokenRow:
    """Return the tokens without padding; a field that contradicts another one is refused."""
    columns = {n: fields.parsed(n) for n in (*FIELDS, *BESIDE) if n in fields.values}
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
    checks: dict[str, Callable[[int, Any], bool]] = {
        "input_ids": lambda i, value: type(value) is int and value >= 0,
        "attention_mask": lambda i, value: value == 1,
        "labels": lambda i, value: type(value) is int and value in (_UNTRAINED, ids[i]),
        "loss_mask": lambda i, value: value in (0, 1),
        "loss_weights": lambda i, value: isinstance(value, (int, float)) and 0 <= value <= 1,
        "position_ids": lambda i, value: value in (i - begin, i),
    }
    for name, column in columns.items():
        wrong = (i for i in range(begin, end) if not checks[name](i, column[i]))
        if (i := next(wrong, -1)) >= 0:
            require(False, f"{name}[{i}]", column[i], _REMEDIES[name])
    given = {name: columns[name][begin:end] for name in TRAINED_TOKENS if name in columns}
    flags: dict[str, tuple[float, ...]] = {
        name: tuple(value != (_UNTRAINED if name == "labels" else 0) for value in values)
        for name, values in given.items()
    }
    if len({each[1:] for each in flags.values()}) > 1:  # nothing predicts the first token
        raise RecordError(f"{' and '.join(flags)} contradict each other - keep one of them")
    if end - begin < len(ids):
        fields.notes.append((Outcome.PADDING_CUT, ""))
    if "loss_weights" in given:
        flags = {"loss_weights": tuple(map(float, given["loss_weights"]))}
    return TokenRow(tuple(ids[begin:end]), next(iter(flags.values()), None))


def refuse(fields: Mapping[str, Any], unread: Sequence[str]) -> None:
    """Raise RecordError for a mask of another name, or documents of a packed row."""
    is_marked = any(name in fields for name in TRAINED_TOKENS)
    for name in unread:
        if name in _MASKS and not is_marked:
            columns = f'"data.columns={{loss_mask: {name}}}"'
            raise RecordError(f"has {name} beside input_ids - write {columns} to train by it")
        if name in _PACKED:
            what = f"has {name}, so the row may hold several documents, which would see one another"
            raise RecordError(f"{what} - write a record for each: data.packing packs them")
