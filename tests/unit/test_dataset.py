"""The sequences that a run makes of its records, and the lines that tell of them."""

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
from helpers.data_run import TEMPLATE, Run, chat, problems_of, save_model, write
from transformers import AutoConfig

from shardtune.config import DataConfig, LoraConfig, ModelConfig
from shardtune.data.records import Outcome
from shardtune.training.data_and_schedule import read_data, read_encoder


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


def test_nothing_to_train_is_dropped_loudly_or_refused(model, tmp_path):
    silent = {"messages": [{"role": "user", "content": "hello"}]}
    run = Run(model, write(tmp_path / "a.jsonl", [silent, chat("q"), silent]))
    assert run.prepared.train.record.tolist() == [1]
    assert any("WARNING" in line and line.endswith("dropped: 2") for line in run.prepared.lines)
    (problem,) = problems_of(model, write(tmp_path / "b.jsonl", [silent]))
    assert problem.startswith("data.train: no token to train in 1 record (")
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
    assert [problem.partition(": ")[0] for problem in problems[:2]] == [
        f"{tmp_path}/a.jsonl:{line}" for line in (3, 4)
    ]
    assert problems[10].startswith("data.train: 1003 of 1004 ")


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
    count, *named = run.prepared.lines[-3:]
    assert count.endswith("dropped: 2 of 200")
    assert [line.split(": ")[2] for line in named] == [
        f"{tmp_path}/few.jsonl:{n}" for n in (199, 200)
    ]
    both = Run(model, sources, on_broken="drop", eval=str(tmp_path / "few.jsonl"))
    counts = [line for line in both.prepared.lines if line.endswith("dropped: 2 of 200")]
    named = [line.partition(":")[0] for line in counts]
    assert named == ["data.train.few", "data.train.b", "data.eval"]
    sources[1]["path"] = str(tmp_path / "more.jsonl")
    first, limit = problems_of(model, sources, on_broken="drop")
    assert first.startswith(f"{tmp_path}/more.jsonl:198: ")
    assert limit.startswith("data.train.b: 2 of 199 ") and "data.on_broken={drop: 0.02}" in limit
    assert Run(model, sources, on_broken={"drop": 0.02}).prepared
    assert problems_of(model, sources, on_broken={"drop": 0.01})
    broken = write(tmp_path / "broken.jsonl", [{"a": 1}, {"messages": []}])
    *named, count = problems_of(model, broken, on_broken={"drop": 1.0})
    assert len(named) == 2 and count.startswith("data.train: 2 of 2 records broken - ")


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


@pytest.mark.parametrize(
    ("overflow", "texts", "numbers"),
    # Of records, sequences, tokens and trained ones; of each line about long records, behind the
    # length of a row.
    [
        (
            "truncate",
            "01234 abc<|im_end|> 00123",
            [[4, 3, 14, 11], [2, 1, 13, 13, 12], [1, 1, 12, 2, 12]],
        ),
        ("drop", "abc<|im_end|>", [[4, 1, 4, 3], [3, 2, 35, 23, 12]]),
        (
            "split",
            "01234 45678 89<|im_end|> abc<|im_end|> 89x<|im_end|> 00123 34567 789<|im_end|>",
            [[4, 8, 35, 26], [3, 8, 4, 12]],
        ),
        # Texts are split, and what must be whole is dropped.
        (
            "turns",
            "01234 45678 89<|im_end|> abc<|im_end|>",
            [[4, 4, 17, 13], [1, 2, 12], [2, 2, 24, 13, 12]],
        ),
    ],
)
def test_overflow_is_counted(overflow, texts, numbers, model, tmp_path):
    run = Run(model, write(tmp_path / "a.jsonl", OVERFLOWING), max_length=5, overflow=overflow)
    assert [text for text, _ in run.texts()] == texts.split()
    said = (line for line in run.prepared.lines if "end token was appended" not in line)
    counts = [line.partition("data.max_length=5")[2] or line for line in said]
    assert sorted([*map(int, re.findall(r"\d+", line))] for line in counts) == sorted(numbers)
    longer = Run(model, tmp_path / "a.jsonl", max_length=12, overflow=overflow)
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
        dropped = f"data.max_length={n_tokens - 1}, dropped: 1 | "
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
    said = [line for line in run.prepared.lines if "data.max_length=30" in line]
    assert [[*map(int, re.findall(r"\d+", line))] for line in said] == [
        [30, 1, 1, tokens, 6, both + tokens],
        [30, 1, 2, both + tokens, 8, both + tokens],
    ]


def counted(said: str, lines: list[str]) -> str:
    """Return the number and the first record, without its folder, of the line that says so."""
    (line,) = (line for line in lines if said in line)
    return re.sub(r".*: (\d+ \| first: )\S*/(\S+) - .*", r"\1\2", line)


def test_empty_turns_are_counted(model, tmp_path):
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
    said = "WARNING: answers without a text, "
    assert counted(said, lines) == "6 | first: a.jsonl:1"
    last = Run(model, tmp_path / "a.jsonl", loss_on="last").prepared.lines
    assert counted(said, last) == "4 | first: a.jsonl:1"
    cut_off = {"messages": [*chat("q", "")["messages"], *chat("q " * 40, " ")["messages"]]}
    cut = Run(model, write(tmp_path / "b.jsonl", [cut_off]), max_length=40).prepared.lines
    assert counted(said, cut) == "1 | first: b.jsonl:1"
    records = [chat("q", "a"), chat(" ", "a"), {"prompt": "", "completion": "a"}]
    lines = Run(model, write(tmp_path / "c.jsonl", records)).prepared.lines
    assert counted("WARNING: questions without a text", lines) == "2 | first: c.jsonl:2"


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
    said = [line for line in run.prepared.lines if "which nothing reads" in line]
    assert {re.sub(r".* field (\S+),.*: (\d+)", r"\1 \2", line) for line in said} == {
        f"{name} {count}" for name, count in fields.items()
    }
    (tmp_path / "d/empty.csv").write_text("text\n")
    write(tmp_path / "d/test-0.jsonl", [chat("r")])
    write(tmp_path / "d/train-0.jsonl", [chat("s")])
    read, splits = (line for line in Run(model, tmp_path / "d").prepared.lines if " file" in line)
    assert all(word in read for word in ("4 files", ": empty.csv", ": README.md"))
    assert "WARNING" in splits and ": test, train - " in splits


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
    assert problem.endswith("(and 8 more like it)")


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
        np.concatenate([train[i][1] for i in range(len(train))]) > 0,
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
    found = [re.search(r"data\.max_length=(\d+), which holds all", problems[i]) for i in (1, 3)]
    (holds_all,) = {int(match[1]) for match in found if match}
    assert len(Run(model, sources[2:], max_length=holds_all).prepared.train) == 2
    assert "or data.overflow=split" in problems[1]
    assert len(Run(model, sources[2:], max_length=90, overflow="split").prepared.train) == 2
    (problem,) = problems_of(model, sources[:1], eval_fraction=0.999999)
    assert problem.startswith("data.train.a: ") and "data.eval_fraction" in problem


def test_arrays_are_mapped_not_read(model, tmp_path):
    train = Run(model, write(tmp_path / "a.jsonl", [chat("q"), chat("how are you")])).prepared.train
    for column in (train.lengths, train.trained_counts, train.record):
        assert isinstance(column.base, np.memmap)
    for i in range(2):
        tokens, trained = train[i]
        assert (str(tokens.dtype), str(trained.dtype)) == ("int64", "float32")
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
        model=ModelConfig(path=str(model)), data=DataConfig(train=str(file)), lora=LoraConfig()
    )
    run: Any = SimpleNamespace(config=config, world=world, resumed=None, date=date.today())
    with caplog.at_level(logging.WARNING, "shardtune"):
        read_data(run, AutoConfig.from_pretrained(model), read_encoder(run))
    assert [re.findall(r"<.+?>", line) for line in caplog.messages] == [["<|query|>"]] * is_lora
