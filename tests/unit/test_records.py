from __future__ import annotations

import datetime
import json
import struct
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.data_run import Run, chat, problems_of, save_model, write

from shardtune.data.records import RecordError, check_record
from shardtune.data.sources import Source


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDTUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "data"


def test_every_form_trains_what_the_model_must_write(model: Path, tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    both = {
        "prompt": chat("how")["messages"],
        "completion": [{"role": "user", "content": "and"}, chat("", "ok")["messages"][1]],
    }
    train = write(
        tmp_path / "a.jsonl",
        [
            chat("how"),
            {"prompt": "2+2=", "completion": "4"},
            {"text": "hello"},
            both,
            {"text": None, **chat(parts)},
        ],
    )
    texts = Run(model, train).texts()
    assert texts[:3] == [
        (
            "<|im_start|>user\nhow<|im_end|>\n<|im_start|>assistant\nfine<|im_end|>\n",
            "fine<|im_end|>",
        ),
        ("2+2=4<|im_end|>", "4<|im_end|>"),
        ("hello<|im_end|>", "<|im_end|>"),  # one token and the end: the first has no predecessor
    ]
    assert texts[3][1] == "ok<|im_end|>"
    assert len(texts) == 5


def test_json_reaches_the_template_as_it_is_written(model: Path, tmp_path: Path) -> None:
    tools = [
        [{"name": "a", "parameters": {"properties": {"x": {"type": "string", "default": None}}}}],
        [{"name": "b", "parameters": {"properties": {"y": {"enum": [None, 1]}}}, "strict": True}],
    ]
    train = write(
        tmp_path / "a.jsonl", [chat("q", tools=tools[0]), chat("q", tools=json.dumps(tools[1]))]
    )
    for (text, _), tool in zip(Run(model, train).texts(), tools, strict=True):
        assert json.loads(text.partition("<|im_start|>")[0]) == tool


def test_only_newlines_end_a_line(model: Path, tmp_path: Path) -> None:
    odd = "a\u2028b\u2029c\x85d"
    lines = [
        json.dumps(chat(odd), ensure_ascii=False),
        "",
        "  \t",
        '{"text":\r"hello you"}',
        '{"text": "a\x0bb"}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines[:4]).encode("utf-8"))
    texts = Run(model, tmp_path / "a.jsonl").texts()
    assert len(texts) == 2
    assert odd in texts[0][0]
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8", newline="")
    problem = problems_of(model, tmp_path / "a.jsonl")[0]
    assert problem.startswith(
        f"{tmp_path}/a.jsonl:5: invalid JSON at column 12: Invalid control character"
    )


def test_broken_records_are_named_with_place_and_number(model: Path, tmp_path: Path) -> None:
    lines = [
        json.dumps(chat("q")),
        "",
        "{oops",
        *['{"messages": []}'] * 1001,
        '"text"',
        '{"text": "\\ud800"}',
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    problems = problems_of(model, tmp_path / "a.jsonl")
    assert len(problems) == 11
    assert problems[0] == (
        f"{tmp_path}/a.jsonl:3: invalid JSON at column 2: Expecting property name enclosed in double quotes"
        " - repair this line"
    )
    assert problems[1].startswith(f"{tmp_path}/a.jsonl:4: messages is an empty list - ")
    assert problems[10] == "data.train: 1004 of 1005 records broken - repair or remove them"
    assert all(" - " in problem for problem in problems)


def calling(function: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "tool_calls": [{"function": function}]}]}


def answering(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": "a", **fields}]}


@pytest.mark.parametrize(
    ("record", "what"),
    [
        (["text"], "this is a list"),
        ({}, "has no field"),
        ({"id": 1}, "but id"),
        ({"prompt": "a"}, "a prompt and no completion"),
        ({"completion": "a", "prompt": None}, "a completion and no prompt"),
        (chat("q", text="a"), "has messages and text - keep one"),
        ({"prompt": "a", "completion": "b", "text": "c"}, "prompt+completion and text"),
        ({"prompt": "a", "completion": ["b"]}, "prompt is a string"),
        ({"prompt": "a", "completion": 4}, "completion is a number"),
        ({"text": {"a": 1}}, "text is an object"),
        ({"messages": "hello"}, "messages is a string"),
        ({"messages": ["hello"]}, "messages[0] is a string"),
        ({"messages": [{"content": "a"}]}, "messages[0] has no role"),
        ({"messages": [{"role": "", "content": "a"}]}, "an empty string as its role"),
        ({"messages": [{"role": "user"}]}, "messages[0] (user) has neither content nor tool_calls"),
        ({"messages": [{"role": "user", "content": 4}]}, "messages[0].content is a number"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]},
            "a part that is not text",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": ["f"]}]},
            "messages[0].tool_calls is a list",
        ),
        (calling(5), "messages[0].tool_calls[0].function is a number"),
        (
            calling({"name": ["x"], "arguments": {}}),
            "messages[0].tool_calls[0] has a list as the function's name",
        ),
        (calling({"name": {"x": 1}}), "tool_calls[0] has an object as the function's name"),
        (calling({"arguments": {}}), "tool_calls[0] has null as the function's name"),
        (calling({"name": "f", "arguments": [1]}), "tool_calls[0] has a list as its arguments"),
        (answering(reasoning_content=["two and two"]), "messages[0].reasoning_content is a list"),
        (answering(thinking=2), "messages[0].thinking is a number"),
        (
            answering(reasoning="a", thinking="b"),
            "messages[0] has different texts as thinking and reasoning",
        ),
        (chat("q", tools={"name": "f"}), "tools is an object"),
        (chat("q", tools="f("), "tools is a string that is not JSON"),
    ],
)
def test_what_no_record_is(record: Any, what: str) -> None:
    with pytest.raises(RecordError) as error:
        check_record(record)
    assert what in str(error.value)
    assert " - " in str(error.value)


def test_unread_fields_are_named_once_with_their_number(model: Path, tmp_path: Path) -> None:
    records = [
        chat("q", id=1, prompt="unused"),
        chat("q", id=2, score=None),
        {"text": "how are you", "tools": []},
    ]
    records[1]["messages"][1] |= {"train": False, "weight": 0}
    summary = Run(model, write(tmp_path / "a.jsonl", records)).prepared.train_summary
    assert summary.unread_fields == {
        "id": 2,
        "prompt": 1,
        "tools": 1,
        "messages.train": 1,
        "messages.weight": 1,
    }
    (line,) = [line for line in summary.lines() if "nothing reads" in line]
    assert "id (2 records)" in line


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (b'{"text": "\xff"}', "byte 11 of the line is not UTF-8"),
        (b'{"text": "\\ud83d"}', "surrogate"),
        (b"[" * 100_000, "cannot be read"),
        (b'{"text": ' + b"1" * 5000 + b"}", "cannot be read"),
    ],
)
def test_lines_that_python_cannot_read(model: Path, tmp_path: Path, raw: bytes, what: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "hello you"}\n' + raw)
    problems = problems_of(model, tmp_path / "a.jsonl")
    assert problems[0].startswith(f"{tmp_path}/a.jsonl:2: ")
    assert what in problems[0]


def test_a_directory_is_read_by_name(model: Path, tmp_path: Path) -> None:
    write(tmp_path / "d/b.jsonl", [{"text": "second one"}, {"text": "third one"}])
    (tmp_path / "d/c.json").write_text('[{"text": "fourth one"}]')
    pq.write_table(pa.table({"text": ["first one"]}), tmp_path / "d/a.parquet")
    write(tmp_path / "d/.hidden.jsonl", ["broken"])
    (tmp_path / "d/README.md").write_text("x")
    run = Run(model, tmp_path / "d")
    assert [text.split()[0] for text, _ in run.texts()] == ["first", "second", "third", "fourth"]
    assert run.prepared.train.record.tolist() == [0, 1, 2, 3]
    assert [line for line in run.lines if "README.md" in line] == [run.said[0]]
    assert "hidden" not in str(run.lines)


@pytest.mark.parametrize(
    "text",
    [
        '[{"text": "one two"}, {"text": "three four"}]',
        '\ufeff [\n{"text": "one two"}\n,\r\n{"text": "three four"} ] \n',
        '{"text": "one two"}\n{"text": "three four"}\n',
        '{\n "text": "one two"\n}{"text": "three four"}',
    ],
)
def test_json_files_hold_an_array_or_objects(model: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text, encoding="utf-8")
    assert [text for text, _ in Run(model, tmp_path / "a.json").texts()] == [
        "one two<|im_end|>",
        "three four<|im_end|>",
    ]


@pytest.mark.parametrize(
    ("text", "index", "place"),
    [
        ('[{"text": "a b"},\n {"text": "c d"}', 2, "line 2, column 17"),
        ('[{"text": "a b"}] x', 1, "line 1, column 17"),
        ('[{"text": "a b"} {"text": "c d"}]', 1, "line 1, column 18"),
        ('[{"text": "a b"}, oops]', 1, "line 1, column 19"),
        ('{"text": "a b"}]', 1, "line 1, column 16"),
        ('[{"text": "a b"},\n]', 1, "line 2, column 1"),
        ('{"text": "a b"},', 1, "line 1, column 16"),
    ],
)
def test_json_files_that_end_or_break(
    model: Path, tmp_path: Path, text: str, index: int, place: str
) -> None:
    (tmp_path / "a.json").write_text(text)
    problem = problems_of(model, tmp_path / "a.json")[0]
    assert problem.startswith(f"{tmp_path}/a.json[{index}]: invalid JSON at {place}: ")


def test_parquet_gives_the_same_tokens_as_json(model: Path, tmp_path: Path) -> None:
    calls = [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {"y": {"z": "2"}}}]
    call = {"role": "assistant", "tool_calls": calls, "content": ""}
    records = [
        chat("how are you", tools='[{"name": "f", "default": null}]', id=1),
        {
            "messages": [
                {"role": "user", "content": "call"},
                call,
                {"role": "tool", "content": "4"},
            ],
            "id": 2,
        },
    ]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    flat = Run(model, tmp_path / "a.parquet")
    assert flat.texts() == Run(model, write(tmp_path / "a.jsonl", records)).texts()
    assert flat.prepared.train_summary.unread_fields == {"id": 2}
    assert "null" not in flat.texts()[1][0]

    pq.write_table(pa.table({"text": ["fine", None]}), tmp_path / "b.parquet")
    assert problems_of(model, tmp_path / "b.parquet")[0].startswith(
        f"{tmp_path}/b.parquet[1]: has no field"
    )
    (tmp_path / "c.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
    assert "c.parquet[0]: cannot be read" in problems_of(model, tmp_path / "c.parquet")[0]


def test_a_call_without_a_name_is_refused_with_its_line(model: Path, tmp_path: Path) -> None:
    problems = problems_of(
        model, write(tmp_path / "a.jsonl", [chat("q"), calling({"name": ["x"], "arguments": {}})])
    )
    assert problems[0].startswith(
        f"{tmp_path}/a.jsonl:2: messages[0].tool_calls[0] has a list as the function's name"
    )


NOT_UTF8 = pa.StringArray.from_buffers(
    2, pa.py_buffer(struct.pack("3i", 0, 3, 5)), pa.py_buffer(b"a b\xff\xfe")
)
CALL_WITH_BYTES = {
    "messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": b"y"}}]}]
}


@pytest.mark.parametrize(
    ("table", "place", "what"),
    [
        (pa.table({"text": NOT_UTF8}), 1, "not UTF-8"),
        (
            pa.table({"text": pa.array([[("a", "b")]], pa.map_(pa.string(), pa.string()))}),
            0,
            "map<string, string",
        ),
        (pa.table({"text": [b"a b"]}), 0, "text is bytes"),
        (pa.table({"text": [datetime.date(2026, 1, 1)]}), 0, "text is date"),
        (pa.Table.from_pylist([CALL_WITH_BYTES]), 0, "x is bytes"),
    ],
)
def test_what_parquet_holds_and_json_does_not(
    model: Path, tmp_path: Path, table: pa.Table, place: int, what: str
) -> None:
    pq.write_table(table, tmp_path / "a.parquet")
    problem = problems_of(model, tmp_path / "a.parquet")[0]
    assert problem.startswith(f"{tmp_path}/a.parquet[{place}]: ") and what in problem


def test_objects_that_a_dataset_holds_as_json_are_parsed(model: Path, tmp_path: Path) -> None:
    tools = [[{"name": "f", "x": {"y": 1}}], [{"name": "g", "x": 2}]]
    mixed = datasets.Dataset.from_list(
        [chat("q", tools=tool) for tool in tools], on_mixed_types="use_json"
    )
    mixed.to_parquet(tmp_path / "a.parquet")
    texts = Run(model, tmp_path / "a.parquet").texts()
    assert [json.loads(text.partition("<|im_start|>")[0]) for text, _ in texts] == tools


def test_a_hub_dataset_is_read_like_a_file(tmp_path: Path) -> None:
    datasets.Dataset.from_list([{"text": f"number {i}", "id": i} for i in range(600)]).save_to_disk(
        tmp_path / "saved"
    )
    source = Source("", hub_name="org/name", hub=datasets.load_from_disk(tmp_path / "saved"))
    chunks = list(source.chunks("train"))
    assert [chunk.first_record for chunk in chunks] == [0, 512]
    assert chunks[1].place(1) == "org/name[513]"
    assert list(chunks[1].parse())[1] == {"text": "number 513"}
    assert chunks[0].unread_columns == ("id",)
    assert (
        source.digest()
        == Source("", hub_name="org/name", hub=datasets.load_from_disk(tmp_path / "saved")).digest()
    )


def test_every_missing_source_is_named_at_once(model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.csv").touch()
    problems = problems_of(model, tmp_path / "no.jsonl", eval=str(tmp_path / "empty"))
    assert [problem.partition("=")[0] for problem in problems] == ["data.train", "data.eval"]
    assert "a .csv file" in problems_of(model, tmp_path / "a.csv")[0]
