"""`inspect-data --html`: what is marked is what is trained, and the rest has a reason."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.data_run import chat, save_model, write
from transformers import AutoTokenizer

from shardtune.__main__ import run

MANY_TURNS = {
    "messages": [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "you", "train": False},
        {"role": "user", "content": "how are you"},
        {"role": "assistant", "content": "fine"},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "fine <b> & fine"},
    ]
}
RECORDS = [
    chat("how", "fine"),
    MANY_TURNS,
    {"text": "hello you"},
    {"prompt": "a", "completion": "b"},
]


pytestmark = pytest.mark.usefixtures("handlers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    save_model(folder / "model")
    write(folder / "train.jsonl", RECORDS)
    write(folder / "long.jsonl", [*RECORDS, chat("q " * 80, "fine"), {"text": "a b " * 40}])
    (folder / "run.yaml").write_text(
        f"model: {{path: {folder}/model}}\ndata: {{train: {folder}/train.jsonl}}\n", "utf-8"
    )
    return folder


def page_of(folder: Path, *arguments: str) -> str:
    out = folder / "page.html"
    config = f"{folder}/run.yaml"
    assert run(["inspect-data", "--config", config, "--html", str(out), *arguments]) == 0
    return out.read_text(encoding="utf-8")


def articles(page: str) -> list[tuple[set[str], list[tuple[str, str]]]]:
    """Return the filters and the spans, (reason or "", text), of each record."""
    return [
        (
            set(re.findall(r"is-(\w+)", kinds)),
            [
                (html.unescape(reason), html.unescape(marked or text))
                for marked, reason, text in re.findall(
                    r'<mark>(.*?)</mark>|<span title="(.*?)">(.*?)</span>', body, re.DOTALL
                )
            ],
        )
        for kinds, body in re.findall(
            r'<article id="record-[\w.-]+" class="(.*?)">(.*?)</article>', page, re.DOTALL
        )
    ]


def test_the_page_marks_the_tokens_that_are_trained(folder, capsys):
    page = page_of(folder)
    assert "4 records in" in capsys.readouterr().out
    assert run(["inspect-data", "--config", f"{folder}/run.yaml", "--json"]) == 0
    sequences: list[dict[str, Any]] = [
        json.loads(line) for line in capsys.readouterr().out.splitlines()
    ]
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    shown = articles(page)
    assert len(shown) == len(sequences) == 4
    for (_, spans), sequence in zip(shown, sequences, strict=True):
        assert "".join(text for _, text in spans) == tokenizer.decode(sequence["input_ids"])
        pairs = zip(sequence["input_ids"], sequence["trained"], strict=True)
        trained = tokenizer.decode([token for token, is_trained in pairs if is_trained])
        assert "".join(text for reason, text in spans if not reason) == trained
    assert not re.search(r'(?:src|href)="[^#]|<script', page)


def test_the_page_says_why_a_turn_is_not_trained(folder):
    (_, prompt), (_, turns), (_, text), (_, completion) = articles(page_of(folder))[:4]
    assert prompt[0][0].startswith("message 0 (user) is context; what the template writes before")
    said = "message 0 (user) is context; message 1 (assistant) is marked as not to be trained; "
    assert turns[0][0].startswith(said)
    assert text[0][0] == "the first token, which nothing predicts"
    assert completion[0][0] == "the prompt"
    (_, turns), *_ = articles(page_of(folder, "data.loss_on=last"))[1:]
    assert "message 3 (assistant) is not the last turn (loss_on=last)" in turns[0][0]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_broken_and_untrained_records_stand_on_the_page_with_their_text(kind, folder, capsys):
    silent = {"messages": [{"role": "user", "content": "nobody answers <me>"}]}
    broken = {"messages": [{"role": "human", "content": "a broken one"}]}
    good = [chat(f"q{i}") for i in range(600)]
    others = [{"messages": []}, good[0], chat("<image>")]  # broken, repeated, trained as text
    records = [*good[:300], silent, broken, *good[300:], broken, *others]
    train = write(folder / "broken.jsonl", records)
    if kind == "parquet":
        records = [json.loads(line) for line in train.read_text().splitlines()]
        pq.write_table(pa.Table.from_pylist(records), train := train.with_suffix(".parquet"))
    arguments = (f"data.train={train}", "data.on_broken=drop")
    page = page_of(folder, *arguments, "--records", "3")
    dropped = [spans for kinds, spans in articles(page) if "dropped" in kinds]
    assert [[reason for reason, _ in spans] for spans in dropped] == [["dropped"]] * 4
    texts = [spans[0][1] for spans in dropped]
    assert "nobody answers <me>" in texts[0] and all("a broken one" in text for text in texts[1:3])
    assert "messages[0].role is &#39;human&#39; - write user" in page
    warnings = re.findall(r'<p class="warning">(.*?)</p>', page)
    assert [html.unescape(re.sub("<.*?>", "", line)) for line in warnings] == [
        line for line in capsys.readouterr().out.splitlines() if "WARN" in line
    ]


@pytest.mark.parametrize("overflow", ["turns", "truncate"])
def test_the_cut_part_of_a_record_stands_behind_the_kept_one(folder, overflow):
    write(folder / "cut.jsonl", [MANY_TURNS])
    train = f"data.train={folder}/cut.jsonl"
    (_, whole), *_ = articles(page_of(folder, train))
    n_tokens = 55  # between the end of message 3 and that of message 5
    arguments = (train, f"data.max_length={n_tokens}", f"data.overflow={overflow}")
    ((kinds, spans),) = articles(page_of(folder, *arguments))
    assert "cut" in kinds
    assert spans[-1][0] == "cut off: longer than data.max_length"
    assert "again" in spans[-1][1] or overflow == "truncate"
    assert "".join(text for _, text in spans) == "".join(text for _, text in whole)
    assert "".join(text for reason, text in spans if not reason).startswith("fine")


def test_dropped_records_are_found_wherever_they_are(folder):
    untrained = [chat(f"hello {i}", "") for i in range(60)]
    for record in untrained:
        record["messages"][1]["train"] = False
    write(folder / "drop.jsonl", [*(chat(f"how {i}", "fine") for i in range(600)), *untrained])
    arguments = (f"data.train={folder}/drop.jsonl", "data.eval_fraction=0.3", "--records", "2")
    page = page_of(folder, *arguments)
    titles = re.findall(
        r'<article id="record-\d+" class="[^"]*is-dropped[^"]*">\s*<h2>Record (\d+)', page
    )
    assert len(titles) == 20 and min(map(int, titles)) >= 600
    assert page.count("held out for evaluation") < 6  # only those of the first two


def test_the_page_overwrites_no_other_file_and_excludes_json(folder, capsys):
    config = folder / "run.yaml"
    before = config.read_bytes()
    assert run(["inspect-data", "--config", str(config), "--html", str(config)]) == 2
    assert "this file is not a page" in capsys.readouterr().err
    assert config.read_bytes() == before
    assert run(["inspect-data", "--config", str(config), "--html", "a.html", "--json"]) == 2
    assert "--html and --json" in capsys.readouterr().err
