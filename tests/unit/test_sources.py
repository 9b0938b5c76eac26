"""How records are read, from which files, and in which order."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.data_run import chat, write
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtune.config import DataConfig
from shardtune.data.dataset import find_sources
from shardtune.data.records import RecordError
from shardtune.data.sources import Source, find_source, read_records
from shardtune.errors import UserError


def read(path: Path) -> list[Any]:
    chunks = find_source("data.train", str(path)).chunks()
    return [value for chunk in chunks for value in chunk.parse()]


def problems(path: Path) -> list[str]:
    return [
        f"{chunk.place(i)}: {value}"
        for chunk in find_source("data.train", str(path)).chunks()
        for i, value in enumerate(chunk.parse())
        if isinstance(value, RecordError)
    ]


TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.dictionaries(TEXTS, st.one_of(TEXTS, st.integers(), st.booleans()), min_size=1)


@given(st.lists(VALUES, max_size=5), st.booleans())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_every_kind_of_json_file_gives_the_same_records(
    tmp_path_factory: pytest.TempPathFactory, records: list[Any], ascii_only: bool
) -> None:
    texts = [json.dumps(record, ensure_ascii=ascii_only) for record in records]
    folder = tmp_path_factory.mktemp("json")
    for name, content in {
        "a.jsonl": "\r\n\n".join(texts),
        "a.json": "[" + " ,\n".join(texts) + "]",
        "b.json": "\n".join(texts),
        "c.json": "\ufeff [" + ",".join(texts) + "]\n",
    }.items():
        (folder / name).write_bytes(content.encode())
        assert read(folder / name) == records


def test_only_newlines_end_a_line_of_json(tmp_path: Path) -> None:
    odd = "a\u2028b\u2029c\x85d"
    lines = [json.dumps({"text": odd}, ensure_ascii=False), "", "  \t", '{"text":\r"hello you"}']
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode("utf-8"))
    assert read(file) == [{"text": odd}, {"text": "hello you"}]
    file.write_text("\n".join([*lines, '{"text": "a\x0bb"}']), encoding="utf-8", newline="")
    (problem,) = problems(file)
    assert problem.startswith(f"{file}:5: invalid JSON (Invalid control character")


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (b"{oops", "column 2"),
        (b'{"text": "\xff"}', "position 10"),
        (b'{"text": "\\ud83d"}', "surrogates not allowed"),
        (b"[" * 100_000, "recursion"),
        (b'{"text": ' + b"1" * 5000 + b"}", "digits"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path: Path, raw: bytes, what: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "hello you"}\n' + raw)
    (problem,) = problems(file)
    assert problem.startswith(f"{file}:2: invalid JSON (")
    assert what in problem and " - " in problem


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('[{"text": "a b"},\n {"text": "c d"}', "[0]: invalid JSON (.*line 2 column 17"),
        ('[{"text": "a b"} {"text": "c d"}]', "[0]: invalid JSON (.*: column 18"),
        ('{"text": "a b"}\n{"text"}', "[1]: invalid JSON (.*: column 8"),
    ],
)
def test_a_json_file_that_breaks_is_named_with_the_place(
    tmp_path: Path, text: str, where: str
) -> None:
    (tmp_path / "a.json").write_text(text)
    (problem,) = problems(tmp_path / "a.json")
    assert re.search(".*".join(map(re.escape, f"a.json{where}".split(".*"))), problem)


def test_a_directory_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    write(tmp_path / "d/b.jsonl", [{"text": "second"}, {"text": "third"}])
    (tmp_path / "d/c.json").write_text('[{"text": "fourth"}]')
    pq.write_table(pa.table({"text": ["first"]}), tmp_path / "d/a.parquet")
    write(tmp_path / "d/.hidden.jsonl", ["broken"])
    (tmp_path / "d/README.md").write_text("x")
    texts = [record["text"] for record in read(tmp_path / "d")]
    assert texts == ["first", "second", "third", "fourth"]
    source = find_source("data.train", str(tmp_path / "d"))
    assert source.ignored == ("README.md",)
    assert [chunk.first_record for chunk in read_records({"train": [source]})] == [0, 1, 3]


def test_parquet_gives_the_same_records_as_json(tmp_path: Path) -> None:
    calls = [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {"y": {"z": "2"}}}]
    call = {"role": "assistant", "tool_calls": calls, "content": ""}
    records = [
        chat("how are you", tools='[{"name": "f", "default": null}]'),
        {"messages": [{"role": "user", "content": "call"}, call, {"role": "tool", "content": "4"}]},
    ]
    table = pa.Table.from_pylist([record | {"id": 1} for record in records])
    pq.write_table(table, tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == records
    (chunk,) = find_source("data.train", str(tmp_path / "a.parquet")).chunks()
    assert chunk.unread_columns == ("id",)

    (tmp_path / "c.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
    assert "c.parquet[0]: cannot be read" in problems(tmp_path / "c.parquet")[0]


def test_objects_that_a_dataset_holds_as_json_are_parsed(tmp_path: Path) -> None:
    tools = [[{"name": "f", "x": {"y": 1}}], [{"name": "g", "x": 2}]]
    mixed = datasets.Dataset.from_list(
        [chat("q", tools=tool) for tool in tools], on_mixed_types="use_json"
    )
    mixed.to_parquet(tmp_path / "a.parquet")
    assert [record["tools"] for record in read(tmp_path / "a.parquet")] == tools


def test_a_hub_dataset_is_read_like_a_file(tmp_path: Path) -> None:
    records = [{"text": f"number {i}", "id": i} for i in range(600)]
    datasets.Dataset.from_list(records).save_to_disk(tmp_path / "saved")
    files = tuple((tmp_path / "saved").glob("*.arrow"))
    hub = datasets.load_from_disk(tmp_path / "saved")
    source, again = (Source("data.train", "org/name", files, hub=hub) for _ in range(2))
    chunks = list(read_records({"train": [source]}))
    assert [chunk.first_record for chunk in chunks] == [0, 512]
    assert chunks[1].place(1) == "org/name[513]"
    assert list(chunks[1].parse())[1] == {"text": "number 513"}
    assert chunks[0].unread_columns == ("id",)
    assert source.digest() == again.digest()


def test_a_digest_is_of_the_records_and_not_of_their_path(tmp_path: Path) -> None:
    files = [write(tmp_path / name, [chat("q")]) for name in ("a.jsonl", "b/c.jsonl")]
    files.append(write(tmp_path / "d.jsonl", [chat("r")]))
    digests = [find_source("data.train", str(file)).digest() for file in files]
    assert digests[0] == digests[1] != digests[2]


def test_the_first_directory_that_is_missing_is_named(tmp_path: Path) -> None:
    file = tmp_path / "sft/v2/a.jsonl"
    missing = f" (the directory {tmp_path}/sft does not exist)"
    for there, words in ((tmp_path, missing), (file.parent, "")):
        there.mkdir(parents=True, exist_ok=True)
        with pytest.raises(UserError) as refused:
            find_source("data.train", str(file))
        what = f"data.train={file}: no such file or directory{words} - correct the path"
        assert refused.value.problems == [what]


def test_every_missing_source_is_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.csv").touch()
    with pytest.raises(UserError) as caught:
        find_sources(DataConfig(train=f"{tmp_path}/no.jsonl", eval=f"{tmp_path}/empty"))
    keys = [problem.partition("=")[0] for problem in caught.value.problems]
    assert keys == ["data.train", "data.eval"]
    with pytest.raises(UserError, match=r"a .csv file"):
        find_source("data.train", f"{tmp_path}/a.csv")


def test_a_hub_out_of_reach_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"data.train=org/name:config:split: neither a file or dir"):
        find_source("data.train", "org/name:config:split")


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    source = find_source("data.train", str(write(tmp_path / "a.jsonl", [{"text": "a"}])))
    source.files[0].unlink()
    with pytest.raises(UserError, match=r"a\.jsonl.* - make the file readable"):
        source.digest()
