"""How records are read, from which files, and in which order."""

import csv
import json
import re
import shutil
from dataclasses import replace
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
from shardtune.data.records import FileError, RecordError
from shardtune.data.sources import Source, find_source, read_records
from shardtune.errors import UserError
from shardtune.paths import COMPRESSIONS


def read(path: Path | str) -> list[Any]:
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
def test_every_kind_of_json_file_gives_the_same_records(tmp_path_factory, records, ascii_only):
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
        for suffix, codec in COMPRESSIONS.items():
            compress(folder / name, folder / f"{name}{suffix}", codec)
            assert read(folder / f"{name}{suffix}") == records


def compress(file: Path, to: Path, codec: str) -> None:
    """Write two frames or members, as `cat a.gz b.gz` does."""
    content = file.read_bytes()
    parts = content[: len(content) // 2], content[len(content) // 2 :]
    to.write_bytes(b"".join(pa.compress(part, codec, asbytes=True) for part in parts if part))


CELLS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r"), max_size=8)


@given(st.lists(st.tuples(CELLS, CELLS), max_size=5))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_rows_of_a_csv_file_are_records_of_texts(tmp_path_factory, rows):
    file = tmp_path_factory.mktemp("csv") / "a.csv"
    with file.open("w", encoding="utf-8-sig", newline="") as stream:
        csv.writer(stream).writerows([("prompt", "completion"), *rows])
    compress(file, file.with_suffix(".csv.gz"), "gzip")
    records = [{"prompt": prompt, "completion": completion} for prompt, completion in rows]
    assert read(file) == read(file.with_suffix(".csv.gz")) == records


@pytest.mark.parametrize("divider", [";", "\t"])
def test_a_header_may_be_divided_by_another_character(divider, tmp_path, caplog):
    file = tmp_path / "a.csv"
    rows = [("prompt", "completion"), ("a, b", f"c{divider}d"), ("e\nf", "")]
    with file.open("w", encoding="utf-8", newline="") as stream:
        csv.writer(stream, delimiter=divider).writerows(rows)
    with caplog.at_level("INFO"):
        assert read(file) == [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
    assert caplog.text.count(f"{divider!r} divides") == 1
    file.write_text(f"text,a{divider}b\nc,d\n")
    assert read(file) == [{"text": "c", f"a{divider}b": "d"}]


def test_the_lines_of_a_csv_file_are_named(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text('prompt,completion\n"two\nlines",b\n\na\n"c,d",e\n')
    chunks = list(find_source("data.train", str(file)).chunks())
    assert [chunks[0].place(i) for i in range(3)] == [f"{file}:{line}" for line in (2, 5, 6)]
    (problem,) = problems(file)
    assert problem.startswith(f"{file}:5: 1 values under a header of 2 columns - ")


RECORD = b'{"text": "a"}\n'
ALONE = [  # a form that holds no records
    ("a.jsonl", RECORD.decode().encode("utf-16"), ":1: UTF-16"),
    ("a.jsonl", b'\n{\n "text": "a"\n}\n' * 9, ":2: JSON over many lines"),
    ("a.jsonl", b'[\n{"text": "a"}\n]', ":1: one JSON array over many lines"),
    ("a.jsonl", b'\xef\xbb\xbf[{"text": "a"}]', ":1: one JSON array holds the records"),
    ("a.csv", b"text,a,text\n1,2,3\n", ":1: two columns have the name text"),
    ("a.csv", b"text,a\nb,caf\xe9\n", ":2: not UTF-8 text"),
    ("a.csv", b'text\nb\n"c\nd\n', ":3: invalid CSV"),
    ("a.jsonl.gz", RECORD, ":1: cannot be read"),
    ("a.jsonl", pa.compress(b"{}", "gzip", asbytes=True), ":1: .* - name it a.jsonl.gz"),
    ("a.jsonl.zst", pa.compress(RECORD * 999, "zstd", asbytes=True)[:-5], ":[1-9]+: cannot be"),
]
LINES = [  # a line of others that can be read
    ("a.jsonl", RECORD + b'{"text": "\\ud83d"}', ":2: invalid JSON .*surrogates not allowed"),
    ("a.jsonl", RECORD + b"[" * 100_000, ":2: invalid JSON .*recursion"),
    ("a.jsonl", RECORD + b'{"text": ' + b"1" * 5000 + b"}", ":2: invalid JSON .*digits"),
    ("a.jsonl", '{"text": "caf\xe9"}'.encode("latin1"), ":1: not UTF-8 text"),
    ("a.json", '[{"text": "caf\xe9"}]'.encode("latin1"), r"\[0\]: not UTF-8 text"),
    ("a.json", b'[{"text": "a b"},\n {"text": "c d"}', r"\[0\]: invalid JSON .*line 2 column 17"),
    ("a.json", b'{"text": "a b"}\n{"text"}', r"\[1\]: invalid JSON .*column 8"),
]


@pytest.mark.parametrize(("name", "content", "what"), [*ALONE, *LINES])
def test_what_cannot_be_read_is_named_once_with_its_place(tmp_path, name, content, what):
    (tmp_path / name).write_bytes(content)
    chunks = list(find_source("data.train", str(tmp_path / name)).chunks())
    values = [value for chunk in chunks for value in chunk.parse()]
    if (name, content, what) in ALONE:
        assert [type(value) for value in values].count(FileError) == 1
        assert isinstance(values[-1], FileError)
    (problem,) = problems(tmp_path / name)
    assert re.match(re.escape(str(tmp_path / name)) + what, problem) and " - " in problem, problem


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "jsonl.gz", "csv.zst", "json.gz"])
def test_the_chunks_of_a_file_take_all_of_its_bytes(tmp_path, suffix):
    """The share of the data that is read, which the log and the plan use. Or only the first."""
    texts = [f"{i:09}" * 9 for i in range(1100)]
    lines = [json.dumps({"text": text}) for text in texts]
    content = "\n".join(["text", *texts] if "csv" in suffix else lines)
    plain, file = tmp_path / f"plain.{suffix.partition('.')[0]}", tmp_path / f"a.{suffix}"
    plain.write_text(content)
    if codec := COMPRESSIONS.get(file.suffix):
        compress(plain, file, codec)
    else:
        file = plain
    source = find_source("data.train", str(file))
    parts = [chunk.n_bytes for chunk in source.chunks()]
    assert len(parts) == 3 and min(parts) >= 0
    assert abs(sum(parts) - source.n_bytes) <= 1
    for most in (1, 511, 512, 513, 1024, 1099, 1100, 2000):
        chunks = replace(source, max_records=most).chunks()
        assert [row["text"] for chunk in chunks for row in chunk.parse()] == texts[:most]


def test_only_newlines_end_a_line_of_json(tmp_path):
    odd = "a\u2028b\u2029c\x85d"
    lines = [json.dumps({"text": odd}, ensure_ascii=False), "", "  \t", '{"text":\r"hello you"}']
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode("utf-8"))
    assert read(file) == [{"text": odd}, {"text": "hello you"}]
    file.write_text("\n".join([*lines, '{"text": "a\x0bb"}']), encoding="utf-8", newline="")
    (problem,) = problems(file)
    assert problem.startswith(f"{file}:5: invalid JSON (Invalid control character")


def test_a_directory_is_read_in_the_order_of_names(tmp_path):
    write(tmp_path / "d/b.jsonl", [{"text": "second"}, {"text": "third"}])
    (tmp_path / "d/c.json").write_text('[{"text": "fourth"}]')
    pq.write_table(pa.table({"text": ["first"]}), tmp_path / "d/a.parquet")
    write(tmp_path / "d/.hidden.jsonl", ["broken"])
    (tmp_path / "d/README.md").write_text("x")
    texts = [record["text"] for record in read(tmp_path / "d")]
    assert texts == ["first", "second", "third", "fourth"]
    source = find_source("data.train", str(tmp_path / "d"))
    assert source.ignored == (".hidden.jsonl", "README.md")
    with pytest.raises(UserError, match=f"in this directory - name {tmp_path}/d, which has such"):
        find_source("data.train", str(tmp_path))
    assert [chunk.first_record for chunk in read_records({"train": [source]})] == [0, 1, 3]


def test_parquet_gives_the_same_records_as_json(tmp_path):
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
    source = find_source("data.train", str(tmp_path / "a.parquet"))
    (refused,) = replace(source, columns={"messages": None}).chunks()
    assert isinstance(refused.rows[0], FileError), "no column is left that gives a form"

    (tmp_path / "c.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
    assert "c.parquet[0]: cannot be read" in problems(tmp_path / "c.parquet")[0]


def test_objects_that_a_dataset_holds_as_json_are_parsed(tmp_path):
    tools = [[{"name": "f", "x": {"y": 1}}], [{"name": "g", "x": 2}]]
    mixed = datasets.Dataset.from_list(
        [chat("q", tools=tool) for tool in tools], on_mixed_types="use_json"
    )
    mixed.to_parquet(tmp_path / "a.parquet")
    assert [record["tools"] for record in read(tmp_path / "a.parquet")] == tools


def test_a_hub_dataset_is_read_like_a_file(tmp_path):
    records = [{"text": f"number {i}", "id": i} for i in range(600)]
    datasets.Dataset.from_list(records).save_to_disk(tmp_path / "saved")
    files = tuple((tmp_path / "saved").glob("*.arrow"))
    hub = datasets.load_from_disk(tmp_path / "saved")
    source, again = (Source("data.train", "org/name", files, dataset=hub) for _ in range(2))
    chunks = list(read_records({"train": [source]}))
    assert [chunk.first_record for chunk in chunks] == [0, 512]
    assert chunks[1].place(1) == "org/name[513]"
    assert list(chunks[1].parse())[1] == {"text": "number 513"}
    assert chunks[0].unread_columns == ("id",)
    fewer = replace(again, dataset=hub.select(range(9)))  # of the same files
    assert source.digest() == again.digest() != fewer.digest()


def test_what_save_to_disk_wrote_is_read(tmp_path):
    records = [chat(f"q{i}") for i in range(5)]
    saved = datasets.Dataset.from_list(records)
    saved.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=saved, test=saved.select([4, 1])).save_to_disk(tmp_path / "dict")
    assert read(tmp_path / "one") == read(f"{tmp_path}/dict:train") == records
    assert read(f"{tmp_path}/dict:test") == [records[4], records[1]]
    datasets.DatasetDict(train=saved).save_to_disk(tmp_path / "alone")
    shutil.copytree(tmp_path / "dict", tmp_path / "moved")
    digests = [
        find_source("data.train", f"{tmp_path}/{name}").digest()
        for name in ("dict:test", "moved:test", "dict:train")
    ]
    assert digests[0] == digests[1] != digests[2]
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/state.json").write_text("{")
    saved.select([]).save_to_disk(tmp_path / "empty")  # `datasets` raises IndexError
    for spec, remedy in {
        "dict": "dict:t(rain|est)",
        "alone": "alone:train",
        "one:train": "one alone",
        "broken": "copy all of it again",
        "empty": "without a record",
    }.items():
        with pytest.raises(UserError, match=f"data.train={tmp_path}/{spec}: .* - .*{remedy}"):
            find_source("data.train", f"{tmp_path}/{spec}")


def test_a_digest_is_of_the_records_and_not_of_their_path(tmp_path):
    files = [write(tmp_path / name, [chat("q")]) for name in ("a.jsonl", "b/c.jsonl")]
    files.append(write(tmp_path / "d.jsonl", [chat("r")]))
    digests = [find_source("data.train", str(file)).digest() for file in files]
    assert digests[0] == digests[1] != digests[2]
    files = [write(tmp_path / "d" / name, [chat("q")]) for name in ("a.jsonl", "b.jsonl")]
    of_directory = [find_source("data.train", f"{tmp_path}/d").digest()]
    files[1].rename(tmp_path / "d/c.jsonl")
    of_directory.append(find_source("data.train", f"{tmp_path}/d").digest())
    (tmp_path / "d/README.md").touch()
    of_directory.append(find_source("data.train", f"{tmp_path}/d").digest())
    assert len(set(of_directory)) == 3  # the lines about a directory have the names of its files


def test_every_missing_source_is_named_at_once(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.xlsx").touch()
    with pytest.raises(UserError) as caught:
        find_sources(DataConfig(train=f"{tmp_path}/no.jsonl", eval=f"{tmp_path}/empty"))
    keys = [problem.partition("=")[0] for problem in caught.value.problems]
    assert keys == ["data.train", "data.eval"]
    with pytest.raises(UserError, match=r"a .xlsx file"):
        find_source("data.train", f"{tmp_path}/a.xlsx")


def test_a_hub_out_of_reach_and_a_file_that_cannot_be_read_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"data.train=org/name:config:split: neither a file or dir"):
        find_source("data.train", "org/name:config:split")
    source = find_source("data.train", str(write(tmp_path / "a.jsonl", [{"text": "a"}])))
    source.files[0].unlink()
    with pytest.raises(UserError, match=r"a\.jsonl.* - make the file readable"):
        source.digest()
