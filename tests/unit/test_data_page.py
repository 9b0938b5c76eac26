"""`inspect-data --html`: what is marked is what is trained."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

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


def shown(page: str) -> list[list[tuple[str, str]]]:
    """Return the runs of text, (trained text, other text), of each sequence."""
    bodies = re.findall(r"<pre>(.*?)</pre>", page, re.DOTALL)
    runs = re.compile(r"<mark>(.*?)</mark>|<span>(.*?)</span>", re.DOTALL)
    return [[(html.unescape(a), html.unescape(b)) for a, b in runs.findall(x)] for x in bodies]


def test_the_page_marks_the_tokens_that_are_trained(folder, capsys):
    page = page_of(folder)
    assert "4 records in" in capsys.readouterr().out
    assert run(["inspect-data", "--config", f"{folder}/run.yaml", "--json"]) == 0
    sequences: list[dict[str, Any]] = [
        json.loads(line) for line in capsys.readouterr().out.splitlines()
    ]
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    runs_of = shown(page)
    assert len(runs_of) == len(sequences) == 4
    for runs, sequence in zip(runs_of, sequences, strict=True):
        assert "".join(a + b for a, b in runs) == tokenizer.decode(sequence["input_ids"])
        pairs = zip(sequence["input_ids"], sequence["trained"], strict=True)
        trained = tokenizer.decode([token for token, is_trained in pairs if is_trained])
        assert "".join(text for text, _ in runs) == trained
    assert len(shown(page_of(folder, "--records", "2"))) == 2
    assert not re.search(r'(?:src|href)="[^#]|<script', page)


def test_the_page_names_the_first_record_of_each_warning(folder, capsys):
    broken = {"messages": [{"role": "human", "content": "a broken one"}]}
    long = chat("q " * 80, "fine")
    train = write(folder / "broken.jsonl", [*RECORDS[:1] * 30, broken, long, *RECORDS, broken])
    more = (f"data.train={train}", "data.on_broken={drop: 0.1}", "data.max_length=90")
    page = page_of(folder, *more)
    lines = re.findall(r'<p class="(warning|soft)">(.*?)</p>', page)
    warned = [html.unescape(line) for kind, line in lines if kind == "warning"]
    said = [line for line in capsys.readouterr().out.splitlines() if "WARN" in line]
    assert [line.rpartition(" (first: ")[0] or line for line in warned] == said
    assert f"{train}:31" in warned[-1] and "human" in warned[-1]
    (dropped,) = (line for _, line in lines if "longer than data.max_length=90" in line)
    assert dropped.endswith(f"(first: {train}:32)")


def test_the_page_overwrites_no_other_file_and_excludes_json(folder, capsys):
    config = folder / "run.yaml"
    before = config.read_bytes()
    assert run(["inspect-data", "--config", str(config), "--html", str(config)]) == 2
    assert "this file is not a page" in capsys.readouterr().err
    assert config.read_bytes() == before
    assert run(["inspect-data", "--config", str(config), "--html", "a.html", "--json"]) == 2
    assert "--html and --json" in capsys.readouterr().err
