"""The trained tokens of conversations, most in tests/data/chat/cases.yaml, and of plain texts."""

import datetime
import itertools
import json

import pytest
from helpers.chat_cases import (
    CASES,
    CHATML,
    DATE,
    Q1,
    Q2,
    TEMPLATES,
    TWO_TURNS,
    A,
    answer,
    bytes_tokenizer,
    call,
    encoder,
    show,
    shown,
    user,
    words_tokenizer,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import AddedToken, LlamaConfig

from shardtune.data.chat_encoder import ChatEncoder, ChatError, stop_token_ids
from shardtune.data.forms import read_record
from shardtune.data.records import Conversation, Outcome, Text
from shardtune.errors import UserError


@pytest.mark.parametrize("case", CASES["cases"], ids=lambda case: case["name"])
def test_a_chat_trains_the_tokens_that_its_case_marks(case):
    chat = encoder(
        TEMPLATES[case["template"]],
        case.get("loss_on", "assistant"),
        case.get("stops", "<|im_end|>"),
        case.get("more", ""),
    )
    messages = TWO_TURNS
    if "messages" in case:
        pairs = [m.split(": ", 1) if isinstance(m, str) else m for m in case["messages"]]
        messages = [{"role": m[0], "content": m[1]} if isinstance(m, list) else m for m in pairs]
    if "refused" in case:
        with pytest.raises(ChatError, match=case["refused"]) as caught:
            chat.encode(Conversation(messages, case.get("tools")))
        what, _, todo = str(caught.value).rpartition(" - ")
        assert what and todo
        return
    record = chat.encode(Conversation(messages, case.get("tools")))
    assert [show(chat.tokenizer, sequence) for sequence in record.sequences] == case["expected"]
    assert record.appended_stop == case.get("appended", False)
    said = [note for note in record.notes if note[0] is not Outcome.EMPTY_THOUGHT]
    notes = [outcome.sentence.format(detail) for outcome, detail in said]
    assert notes == case.get("notes", [])
    assert (record.added_tokens > 0) == (len(record.sequences) > 1)


PIECES = ["a", " a", "\n", "\n\n", " ", "<|im_start|>", "<|im_end|>", "assistant\n", "user"]
CONTENTS = st.lists(st.sampled_from([*PIECES, "é", "🙂", "\t", "Ġ"]), max_size=6).map("".join)


@given(st.lists(st.tuples(CONTENTS, CONTENTS), min_size=1, max_size=3))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_any_contents_train_the_answers_behind_the_prompts_of_inference(exchanges):
    chat = encoder()
    messages = [m for question, reply in exchanges for m in (user(question), answer(reply))]
    record = chat.encode(Conversation(messages))
    turns = range(1, len(messages), 2)
    is_one = len(record.sequences) == 1
    sequences = record.sequences * (len(turns) if is_one else 1)
    for turn, sequence in zip(turns, sequences, strict=True):
        prompt = chat.tokenizer.apply_chat_template(messages[:turn], add_generation_prompt=True)
        begin = len(prompt["input_ids"])
        assert sequence.input_ids[:begin] == prompt["input_ids"]
        assert not sequence.trained[begin - 1] and sequence.trained[begin]
        end = begin + sequence.trained[begin:].index(False)
        text = messages[turn]["content"] + "<|im_end|>"
        first, stop, rest = text.partition("<|im_end|>")
        if not rest.replace(stop, "").strip():
            text = first + stop  # generation ends at the first stop token
        assert chat.tokenizer.decode(sequence.input_ids[begin:end]) == text
    flags = [[False, *sequence.trained] for sequence in record.sequences]
    assert sum(a < b for f in flags for a, b in itertools.pairwise(f)) == len(turns)


# Where a turn ends


def test_a_stop_token_that_swallows_the_line_break_behind_it_is_trained():
    # Phi-3's end token strips to its right
    tokenizer = bytes_tokenizer()
    tokenizer.add_tokens([AddedToken("<|im_end|>", special=True, rstrip=True)], special_tokens=True)
    chat = ChatEncoder(tokenizer, [tokenizer.eos_token_id], "assistant", DATE)
    text = "<|im_start|>user\nq1<|im_end|><|im_start|>assistant\n‹a1<|im_end|>›"
    assert shown(chat, TWO_TURNS) == [text + text.replace("1", "2")]


def test_a_stop_token_that_the_tokenizer_does_not_know_is_refused():
    tokenizer = bytes_tokenizer(CHATML.replace("<|im_end|>", "x"))
    chat = ChatEncoder(tokenizer, tokenizer.convert_tokens_to_ids(["x"]), "assistant", DATE, "T")
    with pytest.raises(ChatError, match="writes the stop token of T as other tokens"):
        tokenizer.add_tokens(["1x"])
        chat.encode(Conversation([user("q"), answer("a1")]))


# Tool calls


CALLS = CHATML.replace(
    "{{ m.content }}",
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name }} ARGUMENTS</call>{% endfor %}",
)


@pytest.mark.parametrize(
    "write", ["{{ c.function.arguments | tojson }}", "{{ c.function.arguments }}"]
)
@pytest.mark.parametrize("content", [None, "", "I call"])
def test_tool_calls_are_trained(write, content):
    arguments = {
        "s": 'a "b" \\ \n é',
        "n": 1.5,
        "t": True,
        "no": None,
        "l": [1, {"k": "v"}],
        "e": "",
    }
    template = CALLS.replace("ARGUMENTS", write)
    messages = [user("q1"), answer(content, tool_calls=[call(arguments), call({}, "g")])]
    written = json.dumps(arguments, ensure_ascii=False)  # as text where objects become code
    calls = f"<call>f {written}</call><call>g {{}}</call>"
    trained = f"‹{content or ''}{calls}<|im_end|>›\n"
    assert shown(encoder(template), messages) == [Q1 + A + trained]


def test_tool_calls_as_ascii_json_and_with_the_stop_token_in_them():
    template = CALLS.replace("ARGUMENTS", "{{ c.function.arguments | tojson(ensure_ascii=True) }}")
    messages = [user("q1"), answer("x", tool_calls=[call({"s": "é <|im_end|>"})])]
    trained = '‹x<call>f {"s": "\\u00e9 <|im_end|>"}</call><|im_end|>›\n'
    assert shown(encoder(template), messages) == [Q1 + A + trained]


# Dates


def test_a_template_with_todays_date_gets_the_given_one():
    date = "\n{{ strftime_now('%d %b %Y, %-d %A') + '!' }}{{ strftime_now( \"it's %H\" ) }}\n"
    date += "{% set f = '%d.%m.' %}{% macro d() %}{{ strftime_now(f) }}{% endmacro %}{{ d() }}"
    (text,) = shown(encoder(date + CHATML), TWO_TURNS)
    assert text.startswith("\n09 Mar 2026, 9 Monday!it's 00\n09.03.<|im_start|>user")
    dated, plain = (encoder(each).template.facts for each in (date + CHATML, CHATML))
    assert dated.adds_date and not plain.adds_date


@pytest.mark.parametrize(
    "directives",
    ["%x %c %T", "%D %F %R %r %n%t", "%e %-d %_m %^a", "%u%U%W%V%G%g%C%h%k%l%I", "%%Y 5%%"],
)
def test_every_directive_of_a_date_is_written(directives):
    chat = encoder("{{ strftime_now('" + directives + "') }}!" + CHATML)
    written = shown(chat, TWO_TURNS)[0].partition("!")[0]
    assert written == datetime.datetime(2026, 3, 9).strftime(directives)


@pytest.mark.parametrize("directive", ["%Q", "%10d", "100%"])
def test_a_directive_that_is_none_is_refused(directive):
    with pytest.raises(
        ChatError, match=f"T raises TemplateError.*strftime_now of {directive}: unknown directive"
    ):
        shown(encoder("{{ strftime_now('" + directive + "') }}" + CHATML), TWO_TURNS)


# Flags of messages


FLAGGED = [user("q1"), answer("a1", train=False), user("q2"), answer("a2", weight=1.0)]


def marked(*trained: str) -> str:
    """Return the text of both turns with these answers trained."""
    text = Q1 + A + "a1<|im_end|>\n" + Q2 + A + "a2<|im_end|>\n"
    for each in trained:
        text = text.replace(f"{each}<|im_end|>", f"‹{each}<|im_end|>›")
    return text


ALL_BUT_A1 = "<|im_start|>‹" + marked()[12:].replace("a1<|im_end|>", "›a1<|im_end|>‹") + "›"


@pytest.mark.parametrize(
    ("loss_on", "first", "second", "expected"),
    [
        ("assistant", {"train": False}, {"weight": 1.0}, marked("a2")),
        ("last", {"train": False}, {"weight": 1.0}, marked("a2")),
        ("last", {"weight": 1}, {"train": True}, marked("a1", "a2")),
        ("last", {"train": True}, {"train": False}, marked("a1")),
        ("all", {"train": False}, {"weight": 1.0}, ALL_BUT_A1),
        ("assistant", {"weight": 0}, {"train": False}, None),
    ],
)
def test_flags_decide_over_loss_on(loss_on, first, second, expected):
    messages = [user("q1"), answer("a1", **first), user("q2"), answer("a2", **second)]
    assert shown(encoder(loss_on=loss_on), messages) == ([expected] if expected else [])


def test_an_untrained_turn_is_context_without_a_prompt_of_its_own():
    messages = [answer("hello", train=False), user("q1"), answer("a1")]
    assert shown(encoder(), messages) == [f"{A}hello<|im_end|>\n{Q1}{A}‹a1<|im_end|>›\n"]


def test_a_template_does_not_see_the_flags():
    template = "{% for m in messages if 'train' in m or 'weight' in m %}!{% endfor %}" + CHATML
    assert shown(encoder(template), FLAGGED) == [marked("a2")]


def test_flags_that_loss_on_all_cannot_follow():
    chat = encoder(loss_on="all")
    with pytest.raises(
        ChatError, match=r"messages\[0\] \(user\) is not to be trained, and data.loss_on"
    ):
        shown(chat, [{**user("q"), "weight": 0}, answer("a")])
    rewriting = encoder(TEMPLATES["qwen3"], "all")
    messages = [user("q"), answer("a", train=False, reasoning_content="r"), *TWO_TURNS[:2]]
    with pytest.raises(
        ChatError, match=r"T rewrites messages\[1\] \(assistant\), which is not to be"
    ):
        shown(rewriting, messages)


# Tokenizers


@pytest.mark.parametrize("kind", ["always", "first", "unigram"])
def test_a_tokenizer_of_words_trains_the_answers_alone(kind):
    tokenizer = words_tokenizer(kind)
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    chat = ChatEncoder(tokenizer, [tokenizer.eos_token_id, stop], "assistant", DATE)
    messages = [user("hello world"), answer("Paris is"), user("hello"), answer("the capital")]
    (sequence,) = chat.encode(Conversation(messages)).sequences
    assert sequence.input_ids == tokenizer.apply_chat_template(messages)["input_ids"]
    flags = [False, *sequence.trained, False]
    edges = [i - 1 for i in range(1, len(flags)) if flags[i] != flags[i - 1]]
    for turn, first, end in zip((1, 3), edges[::2], edges[1::2], strict=True):
        prompt = tokenizer.apply_chat_template(messages[:turn], add_generation_prompt=True)
        assert sequence.input_ids[:first] == prompt["input_ids"]
        trained = tokenizer.decode(sequence.input_ids[first:end])
        assert trained.strip() == messages[turn]["content"] + "<|im_end|>"
        assert sequence.input_ids[end - 1] == stop


def test_a_prompt_that_lookahead_splits_differently_is_tokenized_apart():
    # GPT-2's pattern keeps the last line break for the word that follows: alone, the prompt ends
    # in other tokens.
    tokenizer = bytes_tokenizer(
        CHATML.replace("assistant\n", "assistant\n\n").replace("role }}\n", "role }}\n\n")
    )
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    chat = ChatEncoder(tokenizer, [tokenizer.eos_token_id], "assistant", DATE)
    (sequence,) = chat.encode(Conversation([user("q1"), answer("x")])).sequences
    prompt = tokenizer.apply_chat_template([user("q1")], add_generation_prompt=True)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(prompt)[-1] == "ĊĊ"
    assert sequence.input_ids[: len(prompt)] == prompt
    assert show(tokenizer, sequence).endswith("assistant\n\n‹x<|im_end|>›\n")


def test_a_template_that_writes_one_of_two_equal_parts_is_refused():
    first = CHATML.replace("m.content", "(m.content if m.content is string else m.content[0].text)")
    part = {"type": "text", "text": "xyz"}
    assert encoder(first).encode(Conversation([user("q1"), answer([part])])).sequences
    with pytest.raises(ChatError, match=r"leaves out the text of messages\[1\]"):
        encoder(first).encode(Conversation([user("q1"), answer([part, part])]))


def test_a_template_is_chosen_by_name():
    tokenizer = bytes_tokenizer({"default": CHATML, "tool_use": "tools!" + CHATML})
    chat = ChatEncoder(tokenizer, [tokenizer.eos_token_id], "assistant", DATE, "T")
    tools = [{"type": "function", "function": {"name": "g"}}]
    for offered, begin in (None, "<|im_start|>"), (tools, "tools!"):
        assert shown(chat, TWO_TURNS[:2], offered)[0].startswith(begin)


def test_stop_tokens_that_the_tokenizer_cannot_write_are_left_out():
    tokenizer = bytes_tokenizer()
    eos = tokenizer.eos_token_id
    with pytest.raises(UserError, match="has no stop token"):
        ChatEncoder(tokenizer, [10**6], "assistant", DATE)
    assert ChatEncoder(tokenizer, [10**6, eos], "all", DATE).stop_token_ids == [eos]


def test_fields_of_messages_that_the_template_does_not_mention_are_unread():
    more = {"weight": 0, "train": False, "name": "n", "none": None, "tool_call_id": "1"}
    messages = [user("q"), answer("a", thinking="t", **more), answer("b", train=True)]
    record = Conversation(messages, [{"x": 1}])
    unread = ["messages.name"]
    assert encoder().template.unread_fields(record) == unread
    template = CHATML + "{{ messages[0].name }}{{ messages[0]['weight'] }}"
    named = encoder({"default": CHATML, "tool_use": template}).template
    assert named.unread_fields(Conversation(messages, first=1)) == []
    assert named.unread_fields(Text("a")) == []


def test_stop_tokens_are_those_of_tokenizer_and_generation_config(tmp_path):
    tokenizer = bytes_tokenizer()
    eos = tokenizer.eos_token_id
    given = tokenizer, str(tmp_path), LlamaConfig(eos_token_id=7)
    assert stop_token_ids(*given) == [eos, 7]
    generation = tmp_path / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": [9, eos, 3]}))
    assert stop_token_ids(*given) == [eos, 9, 3]
    generation.write_text(json.dumps({"temperature": 0.5, "do_sample": True}))
    assert stop_token_ids(*given) == [eos, 7]
    generation.write_text("{")
    with pytest.raises(OSError):
        stop_token_ids(*given)


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
    record, *_ = read_record({"prompt": prompt, "completion": completion})
    (sequence,) = chat.encode(record).sequences
    assert show(chat.tokenizer, sequence) == expected


def test_a_prompt_keeps_the_tokens_of_inference_and_all_trains_them_too():
    chat = encoder(loss_on="all")
    (sequence,) = chat.encode(Text("a", "q: ")).sequences
    tokens = chat.tokenizer.convert_ids_to_tokens(sequence.input_ids)
    assert tokens == ["q", ":", "Ġ", "a", "<|im_end|>"]
    assert sequence.trained == [False, True, True, True, True]


@pytest.mark.parametrize("kind", ["always", "first"])
def test_plain_text_has_the_bos_of_its_tokenizer_once(kind):
    tokenizer = words_tokenizer(kind)
    chat = ChatEncoder(tokenizer, [tokenizer.eos_token_id], "assistant", DATE)
    (sequence,) = chat.encode(Text(" Paris", "the capital of France is")).sequences
    prompt = tokenizer("the capital of France is")["input_ids"]
    assert prompt[0] == tokenizer.bos_token_id
    whole = tokenizer("the capital of France is Paris")["input_ids"]
    assert sequence.input_ids == [*whole, tokenizer.eos_token_id]
    assert sequence.trained == [i >= len(prompt) for i in range(len(whole) + 1)]
    for text in ("hello world", "<s>hello world"):
        (sequence,) = chat.encode(Text(text)).sequences
        assert sequence.input_ids.count(tokenizer.bos_token_id) == 1
        assert sequence.trained == [False] + [True] * (len(sequence.input_ids) - 1)
        assert sequence.input_ids[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(sequence.input_ids[1:-1]).strip() == "hello world"


def test_a_completion_that_cannot_begin_behind_the_prompt_is_refused():
    # Behind a part of a word this tokenizer cannot begin a text without a blank.
    tokenizer = words_tokenizer("always")
    chat = ChatEncoder(tokenizer, [tokenizer.eos_token_id], "assistant", DATE)
    with pytest.raises(ChatError, match="cannot begin a text with 'ital' behind 'the cap'"):
        chat.encode(Text("ital", "the cap"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("xyz", "x‹yz<|im_end|>›"), ("xyz<|im_end|>", "x‹yz<|im_end|>›"), ("", "<|im_end|>")],
)
def test_a_text_is_trained_whole_with_an_end_token(text, expected):
    chat = encoder()
    record = chat.encode(Text(text))
    assert show(chat.tokenizer, record.sequences[0]) == expected
    assert record.appended_stop == (not text.endswith("<|im_end|>"))
