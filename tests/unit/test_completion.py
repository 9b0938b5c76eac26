"""The trained tokens of a prompt with its completion, and of plain text."""

import pytest
from helpers.chat_cases import (
    DATE,
    Q1,
    Q2,
    TWO_TURNS,
    A,
    answer,
    encoder,
    show,
    user,
    words_tokenizer,
)

from shardtune.data.chat_encoder import ChatEncoder, ChatError


@pytest.mark.parametrize(
    ("prompt", "completion", "expected"),
    [
        ("q: ", "a", "q: ‹a<|im_end|>›"),  # " a" is one token: the prompt keeps its own
        ("q:", " a", "q:‹ a<|im_end|>›"),
        ("q\n", "\na", "q\n‹\na<|im_end|>›"),
        ("q", "", "q‹<|im_end|>›"),
        ("q", "a<|im_end|>", "q‹a<|im_end|>›"),
        ("", "xy", "x‹y<|im_end|>›"),  # nothing predicts the first token
        ([user("q1")], [answer("a1")], Q1 + A + "‹a1<|im_end|>›\n"),
        (TWO_TURNS[:3], TWO_TURNS[3:], Q1 + A + "a1<|im_end|>\n" + Q2 + A + "‹a2<|im_end|>›\n"),
    ],
)
def test_a_completion_is_trained_and_its_prompt_is_context(prompt, completion, expected):
    chat = encoder()
    (sequence,) = chat.encode_prompt_completion(prompt, completion).sequences
    assert show(chat.tokenizer, sequence) == expected


def test_a_prompt_keeps_the_tokens_of_inference_and_all_trains_them_too():
    chat = encoder(loss_on="all")
    (sequence,) = chat.encode_prompt_completion("q: ", "a").sequences
    tokens = chat.tokenizer.convert_ids_to_tokens(sequence.input_ids)
    assert tokens == ["q", ":", "Ġ", "a", "<|im_end|>"]
    assert sequence.trained == [False, True, True, True, True]


@pytest.mark.parametrize("kind", ["always", "first"])
def test_plain_text_has_the_bos_of_its_tokenizer_once(kind):
    tokenizer = words_tokenizer(kind)
    chat = ChatEncoder(tokenizer, [tokenizer.eos_token_id], "assistant", DATE)
    (sequence,) = chat.encode_prompt_completion("the capital of France is", " Paris").sequences
    prompt = tokenizer("the capital of France is")["input_ids"]
    assert prompt[0] == tokenizer.bos_token_id
    whole = tokenizer("the capital of France is Paris")["input_ids"]
    assert sequence.input_ids == [*whole, tokenizer.eos_token_id]
    assert sequence.trained == [i >= len(prompt) for i in range(len(whole) + 1)]
    for text in ("hello world", "<s>hello world"):
        (sequence,) = chat.encode_text(text).sequences
        assert sequence.input_ids.count(tokenizer.bos_token_id) == 1
        assert sequence.trained == [False] + [True] * (len(sequence.input_ids) - 1)
        assert sequence.input_ids[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(sequence.input_ids[1:-1]).strip() == "hello world"


def test_a_completion_that_cannot_begin_behind_the_prompt_is_refused():
    # Behind a part of a word this tokenizer cannot begin a text without a blank.
    tokenizer = words_tokenizer("always")
    chat = ChatEncoder(tokenizer, [tokenizer.eos_token_id], "assistant", DATE)
    with pytest.raises(ChatError, match="cannot begin a text with 'ital' behind 'the cap'"):
        chat.encode_prompt_completion("the cap", "ital")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("xyz", "x‹yz<|im_end|>›"), ("xyz<|im_end|>", "x‹yz<|im_end|>›"), ("", "<|im_end|>")],
)
def test_a_text_is_trained_whole_with_an_end_token(text, expected):
    chat = encoder()
    record = chat.encode_text(text)
    assert show(chat.tokenizer, record.sequences[0]) == expected
    assert record.appended_stop == (not text.endswith("<|im_end|>"))
