"""`inspect-data --html`: what is marked is what is trained, and the rest has a reason."""

from __future__ import annotations

import html
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.data_run import chat, save_model, write
from transformers import AutoTokenizer

from shardtune.__main__ import run
from shardtune.log import logger

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


@pytest.fixture(autouse=True)
def handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the command sets end with the test."""
    monkeypatch.setattr(logger, "handlers", logger.handlers)
    monkeypatch.setattr(logger, "level", logging.INFO)


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
        for kinds, body in re.findall(r'<article class="(.*?)">(.*?)</article>', page, re.DOTALL)
    ]


def test_what_is_marked_is_what_is_trained(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert not re.search(r'(?:src|href)="[^#]|<script', page) and page.count("<svg") == 3


def test_each_reason(folder: Path) -> None:
    (_, prompt), (_, turns), (_, text), (_, completion) = articles(page_of(folder))[:4]
    assert prompt[0][0].startswith("message 0 (user) is context; what the template writes before")
    reasons = [reason for reason, _ in turns if reason]
    assert reasons[0].startswith(
        "message 0 (user) is context; message 1 (assistant) says train: false or weight: 0; "
        "message 2 (user) is context; "
    )
    assert reasons[1].startswith("message 4 (user) is context; ")
    assert text[0][0] == "the first token, which nothing predicts"
    assert completion[0][0] == "the prompt"
    (_, turns), *_ = articles(page_of(folder, "data.loss_on=last"))[1:]
    assert "message 3 (assistant) is not the last turn (loss_on=last)" in turns[0][0]


@pytest.mark.parametrize("overflow", ["turns", "truncate", "drop"])
def test_what_is_cut_and_what_is_dropped(folder: Path, overflow: str) -> None:
    page = page_of(
        *(folder, f"data.train={folder}/long.jsonl", "data.max_length=60"),
        *(f"data.overflow={overflow}", "--records", "9"),
    )
    chat_, text = articles(page)[-2:]
    is_cut = {"turns": (False, True), "truncate": (False, True), "drop": (False, False)}[overflow]
    assert ("cut" in chat_[0], "cut" in text[0]) == is_cut
    assert "dropped" in chat_[0] and {reason for reason, _ in chat_[1]} == {"dropped"}
    assert "records longer than data.max_length=60" in page


def test_html_and_json_exclude_each_other(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = f"{folder}/run.yaml"
    assert run(["inspect-data", "--config", config, "--html", "a.html", "--json"]) == 2
    assert "--html and --json" in capsys.readouterr().err
