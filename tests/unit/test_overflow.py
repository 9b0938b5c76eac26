"""Sequences that are longer than a row."""

from typing import Any

import numpy as np
import pytest
from helpers.chat_cases import TEMPLATES, answer, encoder, user
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtune.config import DataConfig
from shardtune.data.chat_encoder import EncodedRecord, EncodedSequence
from shardtune.data.overflow import cut_to_rows, fit_to_length, leading_turns
from shardtune.data.records import Conversation, OutcomeCounts, RecordError

SEQUENCES = st.lists(st.booleans(), max_size=40).map(lambda flags: np.array([False, *flags]))


OVERFLOWS = st.sampled_from(["truncate", "split", "drop", "error"])


@given(SEQUENCES, st.integers(3, 12), OVERFLOWS, st.integers(0, 1))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_pieces_fit_and_hold_each_trained_token_at_most_once(trained, max_length, overflow, n_lead):
    is_long = len(trained) > max_length
    if overflow == "error" and is_long:
        with pytest.raises(RecordError, match=f"has {len(trained)} tokens, more than"):
            fit_to_length(trained, max_length, overflow)
        return
    pieces = fit_to_length(trained, max_length, overflow, n_lead)
    for piece, flags in pieces:
        room = max_length - n_lead * (piece.start > 0)
        assert 2 <= piece.stop - piece.start == len(flags) <= room
        assert flags.any() and not flags[0]
    positions = [piece.start + int(t) for piece, flags in pieces for t in np.flatnonzero(flags)]
    kept = len(trained)
    if is_long:
        kept = {"truncate": max_length, "split": len(trained), "drop": 0}[overflow]
    assert positions == np.flatnonzero(trained[:kept]).tolist()
    if overflow != "split" or not is_long:
        assert [piece for piece, _ in pieces] == [slice(0, kept)] * int(trained[:kept].any())


@pytest.mark.parametrize(
    ("bos_ids", "pieces"),
    [
        ([7], [[7, 1, 2, 3], [7, 3, 4, 5], [7, 5, 6]]),
        ([], [[7, 1, 2, 3], [3, 4, 5, 6]]),
    ],
)
def test_a_piece_begins_as_texts_begin_with_a_token_that_is_not_trained(bos_ids, pieces):
    whole = EncodedRecord([EncodedSequence([7, 1, 2, 3, 4, 5, 6], [False] + [True] * 6)])
    data = DataConfig(train="unread", max_length=4, overflow="split")
    rows = cut_to_rows(whole, data, OutcomeCounts(), bos_ids)
    assert [tokens.tolist() for tokens, _ in rows] == pieces
    trained = [tokens[weights > 0].tolist() for tokens, weights in rows]
    assert trained == ([[1, 2, 3], [4, 5], [6]] if bos_ids else [[1, 2, 3], [4, 5, 6]])


WORDS = st.text("abc", min_size=1, max_size=9)
ROUNDS = st.lists(st.tuples(st.sampled_from(["user", "system"]), WORDS, WORDS), min_size=1)
STOPS = {
    "chatml": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "glm-4.5": "<|user|> <|assistant|> <|system|>",
}


def conversation(
    rounds: list[tuple[str, str, str]], silent_end: bool, reasons: bool = False
) -> list[dict[str, Any]]:
    messages = [
        message
        for role, question, reply in rounds
        for message in (
            {"role": role, "content": question},
            answer(reply, **({"reasoning_content": question[::2]} if reasons else {})),
        )
    ]
    return [*messages, user("so?")] if silent_end else messages


def turn_tokens(sequences: list[EncodedSequence]) -> dict[int, list[int]]:
    """The generated tokens of each turn, by message."""
    return {t.message: s.input_ids[t.begin : t.end] for s in sequences for t in s.turns}


@given(
    ROUNDS,
    st.booleans(),
    st.integers(2, 160),
    st.sampled_from(["assistant", "last"]),
    st.sampled_from(list(STOPS)),
)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_every_turn_that_is_trained_is_whole(rounds, silent_end, max_length, loss_on, template):
    messages = conversation(rounds, silent_end, reasons=template != "chatml")
    chat = encoder(TEMPLATES[template], loss_on, STOPS[template])
    whole = chat.encode(Conversation(messages))
    cut = leading_turns(chat, Conversation(messages), max_length)
    assert cut.fits(max_length)
    kept, unlimited = turn_tokens(cut.sequences), turn_tokens(whole.sequences)
    assert kept == {i: unlimited[i] for i in kept}
    assert list(kept) == list(unlimited)[: len(kept)]
    for sequence in cut.sequences:
        assert {i for i, flag in enumerate(sequence.trained) if flag} == {
            i for turn in sequence.turns for i in range(turn.begin, turn.end)
        }
        for turn in sequence.turns:
            assert sequence.input_ids[turn.end - 1] in chat.stop_token_ids
    if whole.fits(max_length):
        assert cut == whole
    else:
        assert cut.too_long == whole.sequences


@given(ROUNDS, st.booleans(), st.integers(2, 160), st.sampled_from(["assistant", "last", "all"]))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_the_most_turns_that_fit_are_kept(rounds, silent_end, max_length, loss_on):
    messages = conversation(rounds, silent_end)
    chat = encoder(loss_on=loss_on)
    # By hand: a token a byte, and one for each of the two marks.
    lengths = [len(m["role"]) + len(m["content"]) + 4 for m in messages]
    last = 2 * len(rounds) - 1
    ends = [len(messages), *range(last + 1, 0, -2)]
    end = next((end for end in ends if sum(lengths[:end]) <= max_length), 0)
    turns = [i for i in range(1, end, 2) if loss_on != "last" or i == last]
    sequences = leading_turns(chat, Conversation(messages), max_length).sequences
    if not (end if loss_on == "all" else turns):
        assert sequences == []
        return
    (sequence,) = sequences
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages[:end])
    assert chat.tokenizer.decode(sequence.input_ids) == text
    expected = [loss_on == "all" and i > 0 for i in range(len(sequence.input_ids))]
    for i in turns:
        begin = sum(lengths[:i]) + len("-assistant-")
        for token in range(begin, begin + len(messages[i]["content"]) + 1):
            expected[token] = True
    assert sequence.trained == expected
