"""What happens to a record that is longer than `data.max_length`: `data.overflow` decides."""

# With `turns`, `encode_to_fit` leaves out what does not fit whole: the last turns of a
# conversation, or a prompt with its completion. `cut_to_rows` cuts every sequence that is still too
# long (with `turns` only texts are), and counts the outcome for the log.

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from shardtune.config import DataConfig
from shardtune.data.chat_encoder import ChatEncoder, EncodedRecord
from shardtune.data.records import Conversation, Outcome, OutcomeCounts, Record, RecordError

_OUTCOMES = {
    "turns": Outcome.SPLIT,  # texts alone: conversations have lost turns already
    "truncate": Outcome.TRUNCATED,
    "split": Outcome.SPLIT,
    "drop": Outcome.PARTLY_DROPPED,  # the template rewrites turns, and some sequences do not fit
}


def encode_to_fit(encoder: ChatEncoder, record: Record, data: DataConfig) -> EncodedRecord:
    """Encode a record; with `data.overflow=turns` only its whole turns that fit."""
    # A text is encoded whole. A prompt and completion that do not fit stand in `too_long`.
    keeps_turns = data.overflow == "turns"
    if keeps_turns and isinstance(record, Conversation) and not record.first:
        return leading_turns(encoder, record, data.max_length)
    encoded = encoder.encode(record)
    if keeps_turns and "prompt" in record.content and not encoded.fits(data.max_length):
        return EncodedRecord([], notes=encoded.notes, too_long=encoded.sequences)
    return encoded


def leading_turns(
    encoder: ChatEncoder, conversation: Conversation, max_length: int
) -> EncodedRecord:
    """Encode a conversation, or its leading messages: the most that fit and end with an answer.

    The turns to train are chosen from the whole conversation: with `loss_on=last` nothing is
    trained unless all of it fits.
    """
    encode, messages = encoder.part_encoder(conversation), conversation.messages
    assistant = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    end = len(messages)
    encoded = whole = encode(end)
    while not encoded.fits(max_length):
        # The prompt of a turn is in front of it in its sequence, so nothing behind the first turn
        # that ends too late can fit either. Further turns may have to go: a template may write
        # more behind the last turn, and a shorter conversation otherwise than the longer one.
        too_late = [t.message for s in encoded.sequences for t in s.turns if t.end > max_length]
        limit = min([end - 1, *too_late])
        end = max((i + 1 for i in assistant if i < limit), default=0)
        encoded = encode(end)
    if encoded is whole:
        return whole
    # Only the whole conversation is compared with its rendering; empty answers that are cut off
    # are not trained.
    of_turns = (Outcome.EMPTY_QUESTION, Outcome.EMPTY_ANSWER)
    notes = [note for note in whole.notes if note[0] not in of_turns]
    return replace(encoded, notes=(*notes, *encoded.notes), too_long=whole.sequences)


def cut_to_rows(
    encoded: EncodedRecord, data: DataConfig, outcomes: OutcomeCounts, bos_ids: list[int]
) -> list[tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32]]]:
    """Return token ids and weights of each row of a record; count it if it is too long."""
    rows = []
    n_kept = n_trained = n_repeated = n_turns = n_cut = 0
    for sequence in encoded.sequences:
        tokens = np.asarray(sequence.input_ids, np.uint32)
        kept = np.zeros(len(tokens), np.bool_)
        # Each further piece begins with the BOS with which the sequence begins.
        is_led = sequence.input_ids[: len(bos_ids)] == bos_ids
        lead = bos_ids if is_led and len(bos_ids) < data.max_length - 1 else []
        pieces = fit_to_length(sequence.trained, data.max_length, data.overflow, len(lead))
        for piece, trained in pieces:
            begin = np.asarray(lead if piece.start else [], np.uint32)
            weights = np.concatenate([np.zeros(len(begin), np.float32), trained])
            rows.append((np.concatenate([begin, tokens[piece]]), weights))
            n_trained += int(np.count_nonzero(trained))
            n_repeated += int(kept[piece].sum())
            kept[piece] = True
        n_kept += int(kept.sum())
        for turn in sequence.turns:
            in_row = kept[turn.begin : turn.end]
            n_turns += bool(in_row.any())
            n_cut += bool(in_row.any() and not in_row[-1])
    whole = encoded.too_long or encoded.sequences
    if any(len(sequence.input_ids) > data.max_length for sequence in whole):
        cut = Outcome.CUT_BEHIND_A_TURN if encoded.too_long else _OUTCOMES[data.overflow]
        outcomes.add(
            cut if rows else Outcome.DROPPED,
            str(data.max_length),
            answers_trained_without_their_end=n_cut,
            trained_turns_lost=sum(len(sequence.turns) for sequence in whole) - n_turns,
            tokens_lost=sum(len(sequence.input_ids) for sequence in whole) - n_kept,
            trained_tokens_lost=sum(sum(map(bool, s.trained[1:])) for s in whole) - n_trained,
            tokens_repeated_as_context=n_repeated,
        )
    return rows


def fit_to_length(
    trained: npt.ArrayLike, max_length: int, overflow: str, n_lead: int = 0
) -> list[tuple[slice, npt.NDArray[np.float32]]]:
    """Cut a sequence with the weights `trained`, [tokens], to at most `max_length` tokens.

    Returns the slice of each piece that trains something, and its weights; pieces behind the
    first leave room for `n_lead` tokens. With `error` it raises RecordError instead.
    """
    # The first token of a piece has no predecessor: it is untrained. Pieces of `split` and `turns`
    # overlap by one token, context alone in the later piece: each trained token is in exactly one.
    weights = np.asarray(trained, np.float32)
    n_tokens = len(weights)
    starts = [0]
    if n_tokens > max_length:
        if overflow == "error":
            what = f"has {n_tokens} tokens, more than data.max_length={max_length}"
            raise RecordError(f"{what} - shorten it, raise that, or choose another data.overflow")
        splits = [0, *range(max_length - 1, n_tokens - 1, max_length - 1 - n_lead)]
        starts = {"truncate": [0], "drop": [], "split": splits, "turns": splits}[overflow]
    pieces = []
    for start in starts:
        room = max_length - (n_lead if start else 0)
        piece = slice(start, min(start + room, n_tokens))
        piece_trained = weights[piece].copy()
        piece_trained[:1] = 0
        if piece_trained.any():
            pieces.append((piece, piece_trained))
    return pieces
