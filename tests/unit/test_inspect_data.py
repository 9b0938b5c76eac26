"""The command `inspect-data`: which tokens of real records are trained."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from helpers.data_run import chat, save_model, write

from shardtune.__main__ import run
from shardtune.data.inspect_data import picture

pytestmark = pytest.mark.usefixtures("handlers")


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


def inspect(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> tuple[str, str]:
    """Standard output and standard error of the command."""
    assert run(["inspect-data", "--config", f"{folder}/run.yaml", *arguments]) == 0
    return capsys.readouterr()


def test_the_picture_shows_what_is_trained(folder, capsys):
    out, _ = inspect(capsys, folder, "data.max_length=40")
    first, second, *rest = out.split("\nRecord ")
    assert first.startswith(f"Record 0 of {folder}/train.jsonl:1: ")
    assert second.startswith(f"2 of {folder}/train.jsonl:3: ") and rest == []
    assert first.count("⟦") == first.count("⟧") == 1
    trained = first.partition("⟦")[2].partition("⟧")[0].split("│")
    assert "".join(trained) == "fine\\x1b[31m é<|im_end|>"  # two halves of a letter, two tokens
    assert f", {len(trained) + 1} trained\n" in first
    assert "data.train: WARNING: records without a token to train, dropped: 1" in out


@pytest.mark.parametrize("text", ["öffnen", "你好, 世界", "👩\u200d💻 fine", "a \ufffd b"])
def test_tokens_of_a_character_are_joined(text, tokenizer):
    tokens = tokenizer(text)["input_ids"]
    said = picture(tokenizer, tokens, [True] * len(tokens))
    joined = said.removeprefix("⟦").removesuffix("⟧").replace("│", "")
    assert joined == text.replace("\u200d", "\\u200d")


def test_json_holds_every_sequence_and_nothing_else(folder, capsys):
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
        (("--config", "{}/run.yaml", "model.path={}"), "no tokenizer"),
        (("--config", "{}/run.yaml", "data.train={}/broken.jsonl"), "1 of 2 records broken"),
    ],
)
def test_a_wrong_command_is_refused_in_one_line(folder, arguments, what, capsys):
    assert run(["inspect-data", *(argument.format(folder) for argument in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    line = err.splitlines()[-1]
    assert line.startswith("ERROR: ") and what in line and " - " in line
    assert "Traceback" not in err


def test_the_source_of_a_record_is_shown(folder, capsys):
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
