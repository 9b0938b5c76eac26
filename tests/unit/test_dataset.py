"""The sequences that a run makes of its records, and the lines that tell of them."""

from __future__ import annotations

import json
import logging
import random
import re
from datetime import date
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from helpers.data_run import TEMPLATE, Run, calling, chat, problems_of, save_model, write
from transformers import AutoConfig

from shardtune.config import DataConfig
from shardtune.data.dataset import added_tokens
from shardtune.data.outcomes import Outcome
from shardtune.training.data_and_schedule import read_data


def test_every_form_trains_what_the_model_must_write(model, tmp_path):
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    both = {
        "prompt": chat("how")["messages"],
        "completion": [{"role": "user", "content": "and"}, chat("", "ok")["messages"][1]],
    }
    forms = [chat("how"), {"prompt": "2+2=", "completion": "4"}, {"text": "hello"}, both]
    train = write(tmp_path / "a.jsonl", [*forms, {"text": None, **chat(parts)}])
    texts = Run(model, train).texts()
    conversation = "<|im_start|>user\nhow<|im_end|>\n<|im_start|>assistant\nfine<|im_end|>\n"
    assert texts[:3] == [
        (conversation, "fine<|im_end|>"),
        ("2+2=4<|im_end|>", "4<|im_end|>"),
        ("hello<|im_end|>", "<|im_end|>"),  # one token and the end: the first has no predecessor
    ]
    assert texts[3][1] == "ok<|im_end|>"
    assert texts[4] == (conversation.replace("how", "hello"), "fine<|im_end|>")


def test_json_reaches_the_template_as_it_is_written(model, tmp_path):
    tools = [
        [{"name": "a", "parameters": {"properties": {"x": {"type": "string", "default": None}}}}],
        [{"name": "b", "parameters": {"properties": {"y": {"enum": [None, 1]}}}, "strict": True}],
    ]
    records = [chat("q", tools=tools[0]), chat("q", tools=json.dumps(tools[1]))]
    for (text, _), tool in zip(
        Run(model, write(tmp_path / "a.jsonl", records)).texts(), tools, strict=True
    ):
        assert json.loads(text.partition("<|im_start|>")[0]) == tool


def test_messages_need_a_template_and_text_does_not(tmp_path):
    bare = save_model(tmp_path / "bare", template=None)
    assert len(Run(bare, write(tmp_path / "b.jsonl", [{"text": "hello you"}])).texts()) == 1
    (problem,) = problems_of(bare, write(tmp_path / "a.jsonl", [chat("q"), chat("r")]))
    assert f"the tokenizer of {bare} has no chat template - " in problem


def test_a_missing_tokenizer_is_refused(tmp_path):
    for folder in (tmp_path, tmp_path / "absent"):
        (problem,) = problems_of(folder, tmp_path / "a.jsonl")
        assert problem.startswith(f"model.path={folder}: no tokenizer")


def test_nothing_to_train_is_dropped_loudly_or_refused(model, tmp_path):
    silent = {"messages": [{"role": "user", "content": "hello"}]}
    run = Run(model, write(tmp_path / "a.jsonl", [silent, chat("q"), silent]))
    assert run.prepared.train.record.tolist() == [1]
    warning = "data.train: WARNING: records without a token to train, dropped: 2"
    assert warning in run.prepared.lines
    (problem,) = problems_of(model, write(tmp_path / "b.jsonl", [silent]))
    cause = "records without a token to train, dropped: 1"
    assert problem.startswith(f"data.train: no token to train in 1 record ({cause}) - ")
    (problem,) = problems_of(model, tmp_path / "a.jsonl", eval=str(tmp_path / "b.jsonl"))
    assert "data.eval: no token to train" in problem and f"in {tmp_path}/b.jsonl" in problem


def test_broken_records_are_counted_and_ten_are_named(model, tmp_path):
    keys = ("train", "weight", "loss", "masked", "trainable", "training", "loss_mask")
    keys += ("reasoning", "thinking", "tool_calls")
    names = [json.dumps({"messages": [{"role": "user", key: "a"}]}) for key in keys]
    lines = [json.dumps(chat("q")), "", "{oops", *['{"messages": []}'] * 991, '"text"', *names]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    problems = problems_of(model, tmp_path / "a.jsonl")
    assert len(problems) == 11
    assert problems[1].endswith(" (and 990 more like it)") and "more like it" not in problems[2]
    assert problems[0].startswith(f"{tmp_path}/a.jsonl:3: invalid JSON (Expecting property name")
    assert problems[1].startswith(f"{tmp_path}/a.jsonl:4: messages is [] - ")
    assert problems[10] == "data.train: 1003 of 1004 records broken - repair or remove them"


def test_few_broken_records_may_be_dropped(model, tmp_path):
    """At most 1% of each source."""
    good = [chat(f"q{i}") for i in range(198)]
    write(tmp_path / "few.jsonl", [*good, {"a": 1}, {"messages": []}])
    write(tmp_path / "more.jsonl", [*good[1:], {"a": 1}, {"a": 2}])  # 2 of 199
    few = {"path": str(tmp_path / "few.jsonl")}
    sources = [few, few | {"name": "b"}]
    clean = Run(model, write(tmp_path / "clean.jsonl", good))
    run = Run(model, tmp_path / "few.jsonl", on_broken="drop")
    assert run.prepared.key == clean.prepared.key
    assert run.prepared.lines[0].startswith("data.train: 198 records in ")
    count, a, b = run.prepared.lines[-3:]
    assert count == "data.train: WARNING: broken records, dropped: 2 of 200"
    assert a.startswith(f"data.train: WARNING: {tmp_path}/few.jsonl:199: has a - ")
    assert b.startswith(f"data.train: WARNING: {tmp_path}/few.jsonl:200: messages is [] - ")
    both = Run(model, sources, on_broken="drop", eval=str(tmp_path / "few.jsonl"))
    counts = [line for line in both.prepared.lines if line.endswith("dropped: 2 of 200")]
    named = [line.partition(":")[0] for line in counts]
    assert named == ["data.train.few", "data.train.b", "data.eval"]
    sources[1]["path"] = str(tmp_path / "more.jsonl")
    first, limit = problems_of(model, sources, on_broken="drop")
    assert first.startswith(f"{tmp_path}/more.jsonl:198: has a - ")
    said = "data.train.b: 2 of 199 records broken, and data.on_broken leaves out 1% of a source "
    assert limit.startswith(said) and limit.endswith('with "data.on_broken={drop: 0.02}"')
    assert Run(model, sources, on_broken={"drop": 0.02}).prepared
    assert problems_of(model, sources, on_broken={"drop": 0.01})


def test_a_file_that_ends_early_is_never_dropped(model, tmp_path):
    lines = "".join(json.dumps(chat(f"q{i}")) + "\n" for i in range(1000)).encode()
    (tmp_path / "a.jsonl.gz").write_bytes(pa.compress(lines, "gzip", asbytes=True)[:-20])
    problem, count = problems_of(model, tmp_path / "a.jsonl.gz", on_broken="drop")
    assert "cannot be read (" in problem and "records are not counted" in count


OVERFLOWING = [
    {"text": "0123456789"},
    {"text": "abc"},
    {"prompt": "0123456789", "completion": "x"},
    {"prompt": "0", "completion": "0123456789"},
]
LONG = "records longer than data.max_length=5,"


@pytest.mark.parametrize(
    ("data", "texts", "lines"),
    [
        (
            {},
            [
                "0123456789<|im_end|>",
                "abc<|im_end|>",
                "0123456789x<|im_end|>",
                "00123456789<|im_end|>",
            ],
            ["4 records in 4 sequences, 39 tokens, 26 of them trained"],
        ),
        (
            {"max_length": 5, "overflow": "truncate"},
            ["01234", "abc<|im_end|>", "00123"],
            [
                "4 records in 3 sequences, 14 tokens, 11 of them trained",
                f"{LONG} truncated: 2 | answers trained without their end: 1 | tokens lost: 13 | "
                "trained tokens lost: 13",
                f"WARNING: {LONG} dropped: 1 | trained turns lost: 1 | tokens lost: 12 | "
                "trained tokens lost: 2",
            ],
        ),
        (
            {"max_length": 5, "overflow": "drop"},
            ["abc<|im_end|>"],
            [
                "4 records in 1 sequences, 4 tokens, 3 of them trained",
                f"WARNING: {LONG} dropped: 3 | trained turns lost: 2 | tokens lost: 35 | "
                "trained tokens lost: 23",
            ],
        ),
        (
            {"max_length": 5, "overflow": "split"},
            [
                "01234",
                "45678",
                "89<|im_end|>",
                "abc<|im_end|>",
                "89x<|im_end|>",
                "00123",
                "34567",
                "789<|im_end|>",
            ],
            [
                "4 records in 8 sequences, 35 tokens, 26 of them trained",
                f"{LONG} split into rows: 3 | tokens lost: 8 | tokens repeated as context: 4",
            ],
        ),
        (
            {"max_length": 5},  # turns: texts are split, what must be whole is dropped
            ["01234", "45678", "89<|im_end|>", "abc<|im_end|>"],
            [
                "4 records in 4 sequences, 17 tokens, 13 of them trained",
                f"{LONG} split into rows: 1 | tokens repeated as context: 2",
                f"WARNING: {LONG} dropped: 2 | trained turns lost: 2 | tokens lost: 24 | "
                "trained tokens lost: 13",
            ],
        ),
    ],
)
def test_overflow_is_counted(data, texts, lines, model, tmp_path):
    run = Run(model, write(tmp_path / "a.jsonl", OVERFLOWING), **data)
    assert [text for text, _ in run.texts()] == texts
    said = {line for line in run.prepared.lines if "end token was appended" not in line}
    holds_all = " | data.max_length=12 holds all"
    assert said == {f"data.train: {line}{holds_all * (LONG in line)}" for line in lines}
    longer = Run(model, tmp_path / "a.jsonl", **data | {"max_length": 12})
    assert not any("longer than" in line for line in longer.prepared.lines)
    assert not any(run.prepared.train[i][1][0] for i in range(len(run.prepared.train)))


def test_a_prompt_with_its_completion_is_kept_up_to_the_last_token_of_a_row(model, tmp_path):
    """Eleven tokens with the end token, as texts, and some more as messages."""
    messages = chat("q", "012")["messages"]
    for prompt, completion in (("01234", "56789"), (messages[:1], messages[1:])):
        train = write(
            tmp_path / "a.jsonl", [{"prompt": prompt, "completion": completion}, {"text": "a"}]
        )
        n_tokens = int(Run(model, train).prepared.train.lengths[0])
        kept, lost = (Run(model, train, max_length=n_tokens - less) for less in (0, 1))
        assert kept.prepared.train.lengths.tolist() == [n_tokens, 2]
        assert not any("longer than" in line for line in kept.prepared.lines)
        assert lost.prepared.train.record.tolist() == [1]
        dropped = f"records longer than data.max_length={n_tokens - 1}, dropped: 1 | "
        assert any(dropped in line for line in lost.prepared.lines)


def test_a_long_conversation_is_cut_behind_its_last_turn_that_fits(model, tmp_path):
    replies = ("0", "1", "23456")
    long = {"messages": [m for reply in replies for m in chat("q", reply)["messages"]]}
    prompt = {"prompt": long["messages"][:3], "completion": long["messages"][3:]}
    run = Run(model, write(tmp_path / "a.jsonl", [long, prompt]), max_length=30)
    ((text, trained),) = run.texts()
    one_round = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n"
    assert text == one_round.format("0") + one_round.format("1")
    assert trained == "0<|im_end|>1<|im_end|>"
    tokens = len(run.encoder.tokenizer(one_round.format("23456"))["input_ids"])
    both = len(run.encoder.tokenizer(2 * one_round.format("0"))["input_ids"])
    long = "records longer than data.max_length=30"
    assert [line for line in run.prepared.lines if long in line] == [
        f"data.train: {long}, cut behind the last turn that fits: 1 | trained turns lost: 1 | "
        f"tokens lost: {tokens} | trained tokens lost: 6 | "
        f"data.max_length={both + tokens} holds all",
        f"data.train: WARNING: {long}, dropped: 1 | trained turns lost: 2 | "
        f"tokens lost: {both + tokens} | trained tokens lost: 8 | "
        f"data.max_length={both + tokens} holds all",
    ]


def test_empty_answers_are_counted(model, tmp_path):
    empty = [
        chat("q", " "),
        {"messages": [m for reply in ("", "", "x") for m in chat("q", reply)["messages"]]},
        {"prompt": "q", "completion": ""},
        {"instruction": "q", "output": ""},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": ""}]},
    ]
    silent = chat("q", "")
    silent["messages"][1]["train"] = False
    call = {"tool_calls": [{"function": {"name": "f"}}]}
    calls = {"messages": [chat("q")["messages"][0], {"role": "assistant", "content": "", **call}]}
    lines = Run(model, write(tmp_path / "a.jsonl", [*empty, silent, calls])).prepared.lines
    first = f" | first: {tmp_path}/a.jsonl:1 - write it, or leave such records out"
    said = "data.train: WARNING: answers without a text, trained to end at once: "
    assert f"{said}6{first}" in lines
    last = Run(model, tmp_path / "a.jsonl", loss_on="last").prepared.lines
    assert f"{said}4{first}" in last
    cut_off = {"messages": [*chat("q", "")["messages"], *chat("q " * 40, " ")["messages"]]}
    cut = Run(model, write(tmp_path / "b.jsonl", [cut_off]), max_length=40).prepared.lines
    assert f"{said}1{first.replace('a.jsonl', 'b.jsonl')}" in cut


def test_empty_questions_are_counted(model, tmp_path):
    records = [chat("q", "a"), chat(" ", "a"), {"prompt": "", "completion": "a"}]
    lines = Run(model, write(tmp_path / "a.jsonl", records)).prepared.lines
    first = f"{tmp_path}/a.jsonl:2 - write it, or leave such records out"
    assert f"data.train: WARNING: questions without a text: 2 | first: {first}" in lines


def test_overflow_may_be_refused(model, tmp_path):
    train = write(tmp_path / "a.jsonl", OVERFLOWING)
    problems = problems_of(model, train, max_length=5, overflow="error")
    long, count = problems
    assert long.startswith(f"{train}:1: has 11 tokens, more than data.max_length=5 - ")
    assert long.endswith(" (and 2 more like it)") and count.startswith("data.train: 3 of 4 records")


def test_unread_fields_and_files_are_named_once(model, tmp_path):
    records = [
        chat("q", id=1, prompt="unused"),
        chat("q", id=2, score=None),
        {"text": "how are you", "tools": []},
    ]
    records[1]["messages"][1] |= {"train": True, "mood": 0}
    write(tmp_path / "d/a.jsonl", records)
    (tmp_path / "d/README.md").touch()
    run = Run(model, tmp_path / "d")
    fields = {"id": 2, "prompt": 1, "tools": 1, "messages.mood": 1}
    assert {line for line in run.prepared.lines if "which nothing reads" in line} == {
        f"data.train: records with the field {name}, which nothing reads: {count}"
        for name, count in fields.items()
    }
    (tmp_path / "d/empty.csv").write_text("text\n")
    write(tmp_path / "d/test-0.jsonl", [chat("r")])
    write(tmp_path / "d/train-0.jsonl", [chat("s")])
    said = [line for line in Run(model, tmp_path / "d").prepared.lines if " file" in line]
    assert said == [
        "data.train: read 4 files; no record in: empty.csv; ignored: README.md",
        "data.train: WARNING: files of several splits are read as one: test, train - move each "
        "split into a directory of its own, and name those",
    ]


def test_what_is_not_trained_as_it_seems_is_said_once(model, tmp_path):
    rendered = "<|im_start|>user\nhow<|im_end|>\n<|im_start|>assistant\nfine<|im_end|>"
    records = [
        {"text": rendered},
        {"prompt": rendered, "completion": "fine"},
        chat(rendered),
        chat("how<|im_end|>"),  # an end is no beginning
        chat("<image> how"),
        chat("how", image=["a.jpg"]),
        {"text": "how", "videos": "a.mp4"},
    ]
    lines = Run(model, write(tmp_path / "a.jsonl", records)).prepared.lines
    assert [line for line in lines if "WARNING" in line] == [
        f"data.train: WARNING: {outcome.sentence.format(detail)}: {count}"
        for outcome, detail, count in [
            (Outcome.RENDERED_TEXT, "<|im_start|>", 1),
            (Outcome.RENDERED_MESSAGE, "<|im_start|>", 1),
            (Outcome.MEDIA_TAG, "<image>", 1),
            (Outcome.UNREAD_MEDIA, "image", 1),
            (Outcome.UNREAD_MEDIA, "videos", 1),
        ]
    ]
    assert f"data.train: {Outcome.RENDERED_PROMPT.sentence.format('<|im_start|>')}: 1" in lines
    write(tmp_path / "b.jsonl", [chat(f"<image> {i}", image="a.jpg") for i in range(9)])
    problem, _ = problems_of(model, tmp_path / "b.jsonl")
    assert problem.endswith(" - leave such records out (and 8 more like it)")


def test_a_file_that_holds_no_records_is_named_once(model, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps([chat("q")] * 9, indent=1))
    problem, count = problems_of(model, tmp_path / "a.jsonl")
    assert "one JSON array over many lines" in problem
    assert count.startswith("data.train: its broken records are not counted, as a file cannot ")


def test_tool_calls_for_a_template_that_knows_none_are_refused_once(tmp_path):
    plain = TEMPLATE.partition("{% for call")[0] + "<|im_end|>\n{% endfor %}"
    plain += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    model = save_model(tmp_path / "model", plain)
    records = [
        {"messages": [*i * chat("q")["messages"], chat("q")["messages"][0], turn]}
        for i in range(5)
        for turn in calling({"name": f"f{i}", "arguments": {"x": i}})["messages"]
    ]
    problem, _ = problems_of(model, write(tmp_path / "a.jsonl", records))
    assert "(assistant): it knows no tool calls - leave such records out" in problem
    assert problem.endswith(" (and 4 more like it)")


def test_evaluation_records_are_chosen_by_content(model, tmp_path):
    texts = [f"record number {i % 150}" for i in range(300)]  # each one twice
    records = [{"prompt": text, "completion": "fine", "id": i} for i, text in enumerate(texts)]
    run = Run(model, write(tmp_path / "a.jsonl", records), eval_fraction=0.3)
    train, held_out = run.prepared.train, run.prepared.eval[""]
    assert sorted([*train.record.tolist(), *held_out.record.tolist()]) == list(range(300))
    chosen = {texts[i] for i in held_out.record}
    assert not chosen & {texts[i] for i in train.record}
    assert 25 <= len(chosen) <= 65

    random.Random(1).shuffle(texts)
    table = pa.table({"completion": ["fine"] * 300, "prompt": texts})  # columns in another order
    pq.write_table(table, tmp_path / "b.parquet")
    other = Run(model, tmp_path / "b.parquet", eval_fraction=0.3).prepared.eval[""]
    assert {texts[i] for i in other.record} == chosen
    train = write(tmp_path / "c.jsonl", [{"text": "one two"}])
    (problem,) = problems_of(model, train, eval_fraction=1e-9)
    assert problem.startswith("data.eval_fraction=1e-09 took none of ")


def test_evaluation_data_of_its_own_leaves_the_train_data_whole(model, tmp_path):
    train = write(tmp_path / "a.jsonl", [chat(f"q{i}") for i in range(20)])
    other = write(tmp_path / "b.jsonl", [chat("r")])
    prepared = Run(model, train, eval=str(other), eval_fraction=0.5).prepared
    assert (len(prepared.train), len(prepared.eval[""])) == (20, 1)
    assert [line.partition(":")[0] for line in prepared.lines] == ["data.train", "data.eval"]


def test_several_sources_are_one_set(model, tmp_path):
    """The tokens and masks of both files end to end, but for the options of each source."""
    first = [chat(f"how {i}", "are you") for i in range(600)]  # more than a chunk
    second = [{"messages": 2 * chat(f"hello {i}")["messages"]} for i in range(4)]
    one, two = write(tmp_path / "one.jsonl", first), write(tmp_path / "two.jsonl", second)
    whole = Run(model, write(tmp_path / "whole.jsonl", [*first, *second]))
    run = Run(model, [{"path": str(one)}, {"path": str(two), "weight": 0.5}])
    assert run.texts() == whole.texts()
    train = run.prepared.train
    assert train.record.tolist() == list(range(604))
    assert train.source.tolist() == [0] * 600 + [1] * 4
    assert run.prepared.key != whole.prepared.key  # the order of the data depends on the sources
    alone = Run(model, [{"path": str(tmp_path / "whole.jsonl"), "weight": 0.5}])
    columns = (
        np.concatenate([train[i][0] for i in range(len(train))]).astype(np.uint32),
        np.concatenate([train[i][1] for i in range(len(train))]),
        train.lengths,
    )  # what a run of one source has in its checkpoints, so that it resumes
    digests = " ".join(xxhash.xxh3_128_hexdigest(column.tobytes()) for column in columns)
    assert alone.prepared.key == whole.prepared.key == xxhash.xxh3_128_hexdigest(digests.encode())

    few = [{"path": str(one), "max_records": 514}, {"path": str(two), "loss_on": "last"}]
    run = Run(model, few)
    texts = whole.texts()
    assert run.texts() == texts[:514] + [(text, "fine<|im_end|>") for text, _ in texts[600:]]
    assert run.prepared.train.record.tolist() == list(range(518))
    parquet = pa.Table.from_pylist([{"text": record["messages"][0]["content"]} for record in first])
    pq.write_table(parquet, tmp_path / "one.parquet")
    run = Run(model, [{"path": str(tmp_path / "one.parquet"), "max_records": 514}])
    assert [text for text, _ in run.texts()] == [f"how {i}<|im_end|>" for i in range(514)]


def test_records_are_held_out_of_each_source(model, tmp_path):
    files = [
        write(tmp_path / f"{name}.jsonl", [chat(f"how {name} {i}") for i in range(100)])
        for name in "ab"
    ]
    sources = [{"path": str(file)} for file in files]
    prepared = Run(model, sources, eval_fraction=0.2).prepared
    held_out = prepared.eval[""]
    assert sorted([*prepared.train.record, *held_out.record]) == list(range(200))
    for i in range(2):
        alone = Run(model, files[i], eval_fraction=0.2).prepared.eval[""]
        chosen = held_out.record[held_out.source == i] - 100 * i
        assert chosen.tolist() == alone.record.tolist() and 5 <= len(chosen) <= 40


def test_every_source_and_evaluation_set_must_train_something(model, tmp_path):
    good, empty = write(tmp_path / "a.jsonl", [chat("q")]), write(tmp_path / "b.jsonl", [])
    long = write(tmp_path / "c.jsonl", [chat("how " * 99)] * 2)
    sources = [{"path": str(file)} for file in (good, empty, long)]
    sets = {"short": str(good), "none": str(empty), "long": str(long)}
    problems = problems_of(model, sources, eval=sets, max_length=90, overflow="drop")
    assert [problem.partition(" - ")[0].partition(" (")[0] for problem in problems] == [
        f"data.train.b={empty}: no record in it",
        "data.train.c: no token to train in 2 records",
        f"data.eval.none={empty}: no record in it",
        "data.eval.long: no token to train in 2 records",
    ]
    assert "longer than data.max_length=90, dropped: 2" in problems[3]
    found = [re.search(r"data\.max_length=(\d+), which holds all", problems[i]) for i in (1, 3)]
    (holds_all,) = {int(match[1]) for match in found if match}
    assert len(Run(model, sources[2:], max_length=holds_all).prepared.train) == 2
    assert "or data.overflow=split" in problems[1]
    assert len(Run(model, sources[2:], max_length=90, overflow="split").prepared.train) == 2
    (problem,) = problems_of(model, sources[:1], eval_fraction=0.999999)
    assert problem.startswith("data.train.a: no token to train in 0 records - ")
    assert problem.endswith(" or lower data.eval_fraction")


def test_arrays_are_mapped_not_read(model, tmp_path):
    train = Run(model, write(tmp_path / "a.jsonl", [chat("q"), chat("how are you")])).prepared.train
    for column in (train.lengths, train.trained_counts, train.record):
        assert isinstance(column.base, np.memmap)
    for i in range(2):
        tokens, trained = train[i]
        assert (str(tokens.dtype), str(trained.dtype)) == ("int64", "bool")
        assert (len(tokens), trained.sum()) == (train.lengths[i], train.trained_counts[i])
    with pytest.raises(IndexError):
        train[2]


@pytest.mark.parametrize("is_lora", [True, False])
def test_lora_warns_of_added_tokens_that_no_template_writes(is_lora, tmp_path, caplog):
    template = TEMPLATE.replace("<|im_start|>", "<|turn|><|im_start|>")
    model = save_model(tmp_path / "model", template, more=["<|turn|>", "<|query|>", "<|hit|>"])
    records = [chat("q", "<|query|>a<|query|>"), {"text": "<|im_start|><|query|>"}]
    file = write(tmp_path / "a.jsonl", records)
    world = SimpleNamespace(
        layout=SimpleNamespace(is_lora=is_lora),
        run_on_all_ranks=lambda function: function(),
        on_local_rank0=lambda function: function(),
        require_same=lambda *_: None,
    )
    config: Any = SimpleNamespace(
        model=SimpleNamespace(path=str(model)), data=DataConfig(train=str(file))
    )
    run: Any = SimpleNamespace(config=config, world=world, resumed=None, date=date.today())
    with caplog.at_level(logging.WARNING, "shardtune"):
        read_data(run, AutoConfig.from_pretrained(model))
    assert [re.findall(r"<.+?>", line) for line in caplog.messages] == [["<|query|>"]] * is_lora


def test_only_tokens_behind_the_vocabulary_count_as_added(tmp_path):
    model = save_model(tmp_path / "model", None, more=["<|query|>"])
    tokenizer = Run(model, write(tmp_path / "a.jsonl", [{"text": "a"}])).encoder.tokenizer
    assert tokenizer.convert_ids_to_tokens(added_tokens(tokenizer)) == ["<|query|>"]
