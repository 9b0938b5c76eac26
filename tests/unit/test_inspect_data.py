"""The command `inspect-data`: which tokens of real records are trained."""

from __future__ import annotations

import json
import logging
import re
import sys
from pathlib import Path

import pytest
from helpers.data_run import TEMPLATE, chat, save_model, write

from shardtune.__main__ import run
from shardtune.data import dataset
from shardtune.log import logger


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspect")
    save_model(folder / "model")
    silent = {"messages": [{"role": "user", "content": "hello"}]}
    records = [
        chat("how are you", "fine\x1b[31m é", id=1),
        silent,
        {"text": "hello 0123456789"},
        chat("hello", "you"),
    ]
    write(folder / "train.jsonl", records)
    write(folder / "broken.jsonl", [chat("q"), {"id": 1}])
    (folder / "run.yaml").write_text(
        f"model: {{path: {folder}/model}}\ndata: {{train: {folder}/train.jsonl}}\n"
    )
    return folder


@pytest.fixture(autouse=True)
def handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the command sets end with the test."""
    monkeypatch.setattr(logger, "handlers", logger.handlers)
    monkeypatch.setattr(logger, "level", logging.INFO)


def inspect(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> tuple[str, str]:
    """Standard output and standard error of the command."""
    assert run(["inspect-data", "--config", f"{folder}/run.yaml", *arguments]) == 0
    return capsys.readouterr()


def test_the_picture_shows_what_is_trained(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = inspect(capsys, folder, "data.max_length=40")
    first, second, *rest = out.split("\nRecord ")
    assert first.startswith(f"Record 0 of {folder}/train.jsonl:1: ")
    assert second.startswith(f"2 of {folder}/train.jsonl:3: ") and rest == []
    assert first.count("⟦") == first.count("⟧") == 1
    trained = first.partition("⟦")[2].partition("⟧")[0].split("│")
    assert "".join(trained) == "fine\\x1b[31m Ã©<|im_end|>"  # two halves of a letter, two tokens
    assert f", {len(trained)} trained\n" in first
    assert "<|im_start|>│user│⏎\n" in first
    assert "data.train: WARNING: records without a token to train, dropped: 1" in out
    assert "records with the field id, which nothing reads: 1" in out
    assert "tokens in a sequence: min " in out
    assert err.startswith("Data: tokenized in ") and len(err.splitlines()) == 1


def test_the_picture_shows_which_turns_train(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [("human", "q1"), ("gpt", "a1"), ("human", "q2"), ("gpt", "a2")]
    record = {"conversations": [{"from": name, "value": text} for name, text in turns]}
    record["conversations"][1] |= {"weight": 0}
    out, _ = inspect(capsys, folder, f"data.train={write(folder / 'flags.jsonl', [record])}")
    assert [run.partition("⟧")[0].replace("│", "") for run in out.split("⟦")[1:]] == [
        "a2<|im_end|>"
    ]
    assert "a│1" in out
    assert "records in the form of ShareGPT: conversations of from and value: 1" in out


def test_the_picture_has_the_options_of_the_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(tmp_path / "model", "{% if style %}style: {{ style }}{% endif %}" + TEMPLATE)
    write(tmp_path / "train.jsonl", [chat("how are you")])
    (tmp_path / "run.yaml").write_text(
        f"model: {{path: {tmp_path}/model}}\ndata: {{train: {tmp_path}/train.jsonl}}\n"
    )
    plain, _ = inspect(capsys, tmp_path)
    with_style, _ = inspect(capsys, tmp_path, "data.template_options={style: kind}")
    assert "style" not in plain.replace("│", "")
    assert "style: kind" in with_style.replace("│", "")


@pytest.mark.parametrize("no_color", ["", "1"])
def test_a_terminal_gets_colour_unless_told_not_to(
    no_color: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", no_color)
    out, _ = inspect(capsys, folder, "--records", "1")
    assert ("\x1b[1;32mf" in out) == ("⟦" not in out) == (not no_color)


def test_json_holds_every_sequence_and_nothing_else(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--json", "data.max_length=8", "data.overflow=split")
    out, err = inspect(capsys, folder, *arguments)
    rows = [json.loads(line) for line in out.splitlines()]
    assert all(list(row) == ["record", "input_ids", "trained", "place"] for row in rows)
    assert sorted({row["record"] for row in rows}) == [0, 2, 3]
    assert max(len(row["input_ids"]) for row in rows) == 8
    assert all(len(row["trained"]) == len(row["input_ids"]) for row in rows)
    assert not any(row["trained"][0] for row in rows)
    assert "data.train: 4 records" in err

    limited, err = inspect(capsys, folder, *arguments, "--records", "2")
    assert limited.splitlines() == [line for line in out.splitlines() if '"record": 0' in line]
    assert err.startswith("Data: cached in ")


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ((), "--config"),
        (
            ("--config", "{}/run.yaml", "a=1", "--nothing", "b=2"),
            "unrecognized arguments: --nothing",
        ),
        (("--config", "{}/run.yaml", "--records", "-1"), "less than 0"),
        (("--config", "{}/absent.yaml"), "absent.yaml"),
        (("--config", "{}/run.yaml", "data.max_len=4"), "data.max_length"),
        (("--config", "{}/run.yaml", "model.path={}"), "no tokenizer"),
        (("--config", "{}/run.yaml", "data.train={}/broken.jsonl"), "1 of 2 records broken"),
    ],
)
def test_a_wrong_command_is_refused_in_one_line(
    folder: Path, arguments: tuple[str, ...], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["inspect-data", *(argument.format(folder) for argument in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    line = err.splitlines()[-1]
    assert line.startswith("ERROR: ") and what in line and " - " in line
    assert "Traceback" not in err


def test_the_source_of_a_record_is_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = folder / "more.jsonl"
    more.write_text(f"\n\n{json.dumps(chat('and you'))}\n")
    sources = f"data.train=[{{path: {folder}/train.jsonl}}, {{path: {more}, name: b}}]"
    out, _ = inspect(capsys, folder, "--records", "9", sources)
    assert re.findall(rf"^Record (\d \(\w+\) of) {folder}/(.*): \d+ tok", out, re.MULTILINE) == [
        ("0 (train) of", "train.jsonl:1"),
        ("2 (train) of", "train.jsonl:3"),
        ("3 (train) of", "train.jsonl:4"),
        ("4 (b) of", "more.jsonl:3"),
    ]
    out, _ = inspect(capsys, folder, "--json", sources)
    assert [json.loads(line)["source"] for line in out.splitlines()] == ["train"] * 3 + ["b"]


@pytest.mark.parametrize("form", [(), ("--json",), ("--html",)])
def test_the_command_says_how_far_it_is(
    form: tuple[str, ...],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dataset, "_LOG_EVERY_S", 0)
    data = write(folder / "far.jsonl", [chat(f"q{i} {form}") for i in range(600)])
    page = [str(folder / "page.html")] if "--html" in form else []
    _, err = inspect(capsys, folder, *form, *page, f"data.train='{data}'")
    assert re.search(r"^Data: 512 of about \d\d\d records$", err, re.M)
    assert "Data: 600 of about 600 records" in err
