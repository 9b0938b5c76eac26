from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.data_run import chat, save_model, write
from helpers.ranks import type_command

from shardtune.__main__ import run

ROOT = Path(__file__).parents[2]


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
    (folder / "run.yaml").write_text(
        f"model: {{path: {folder}/model}}\ndata: {{train: {folder}/train.jsonl}}\n"
    )
    return folder


def environment(folder: Path, **extra: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TERM")}
    return {**kept, "HF_HUB_OFFLINE": "1", "SHARDTUNE_CACHE": str(folder / "cache"), **extra}


def inspect(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return type_command("inspect-data", *arguments, cwd=folder)


def last_line(text: str) -> str:
    return text.splitlines()[-1]


def test_the_picture_shows_what_is_trained(folder: Path) -> None:
    done = inspect(folder, "--config", f"{folder}/run.yaml", "data.max_length=40")
    assert done.returncode == 0, done.stderr
    first, second, third, *rest = done.stdout.split("\nRecord ")
    assert first.startswith(f"Record 0 ({folder}/train.jsonl:1), sequence 1 of 1: ")
    assert first.count("⟦") == first.count("⟧") == 1
    trained = first.partition("⟦")[2].partition("⟧")[0].replace("│", "")
    assert trained == "fine\\x1b[31m Ã©<|im_end|>"  # the two halves of a letter are two tokens
    assert "<|im_start|>│user│⏎\n" in first
    assert second.startswith(f"1 ({folder}/train.jsonl:2): dropped, no token to train")
    assert third.startswith(f"2 ({folder}/train.jsonl:3), sequence 1 of 1: ")
    assert rest == []
    table = {
        line.split()[0]: line.split()[1:]
        for line in done.stdout.splitlines()
        if line.startswith("  ")
    }
    assert table["user"][1] == table["template"][1] == "0"
    assert table["assistant"][0] == table["assistant"][1] != "0"
    assert "data.train: WARNING: 1 record without a token to train, dropped" in done.stdout
    assert "data.train: fields that nothing reads: id (1 record)" in done.stdout
    assert "tokens in a sequence: min " in done.stdout


def test_json_holds_every_sequence_and_nothing_else(folder: Path) -> None:
    arguments = (
        "--json",
        "--config",
        f"{folder}/run.yaml",
        "data.max_length=8",
        "data.overflow=split",
    )
    done = inspect(folder, *arguments)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(list(row) == ["record", "input_ids", "trained"] for row in rows)
    assert sorted({row["record"] for row in rows}) == [0, 2, 3]
    assert max(len(row["input_ids"]) for row in rows) == 8
    assert all(
        len(row["trained"]) == len(row["input_ids"]) and not row["trained"][0] for row in rows
    )
    assert "data.train: 4 records" in done.stderr

    limited = inspect(folder, *arguments, "--records", "2")
    assert limited.stdout.splitlines() == [
        line for line in done.stdout.splitlines() if '"record": 0' in line
    ]
    assert limited.stderr.startswith("Data: cached in ")


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
    ],
)
def test_what_is_refused(
    folder: Path, arguments: tuple[str, ...], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["inspect-data", *(argument.format(folder) for argument in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert last_line(err).startswith("ERROR: ")
    assert what in last_line(err)
    assert " - " in last_line(err)
    assert "Traceback" not in err


def test_a_refused_command_exits_with_2(folder: Path) -> None:
    write(folder / "broken.jsonl", [chat("q"), {"id": 1}])
    done = inspect(folder, "--config", f"{folder}/run.yaml", f"data.train={folder}/broken.jsonl")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        f"ERROR: {folder}/broken.jsonl:2: has none of messages, tools, prompt, completion, text, but id"
        " - write messages, prompt and completion, or text",
        "ERROR: data.train: 1 of 2 records broken - repair or remove them",
    ]


def test_a_hub_out_of_reach_is_one_line(folder: Path) -> None:
    done = inspect(folder, "--config", f"{folder}/run.yaml", "data.train=org/name:config:split")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "ERROR: data.train=org/name:config:split: neither a file or directory here nor a dataset of"
    )


def test_a_reader_that_leaves_ends_it_quietly(folder: Path) -> None:
    write(folder / "many.jsonl", [chat(f"number {i}") for i in range(3000)])
    command = f"{sys.executable} -m shardtune inspect-data --config {folder}/run.yaml --json data.train={folder}/many.jsonl"
    done = subprocess.run(
        ["bash", "-c", f"{command} | head -n 1; echo ${{PIPESTATUS[0]}}"],
        cwd=ROOT,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=120,
    )
    row, status = done.stdout.splitlines()
    assert json.loads(row)["record"] == 0
    assert status == "0"
    assert "Error" not in done.stderr


def on_a_terminal(folder: Path, no_color: str) -> tuple[subprocess.Popen[bytes], int]:
    """The command, and the other side of its terminal."""
    main, terminal = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "shardtune",
        "inspect-data",
        "--config",
        f"{folder}/run.yaml",
        "--records",
        "1",
    ]
    env = environment(folder, TERM="xterm", NO_COLOR=no_color)
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=terminal, stderr=subprocess.DEVNULL
    )
    os.close(terminal)
    return process, main


def shown(process: subprocess.Popen[bytes], main: int) -> bytes:
    blocks = []
    with contextlib.suppress(OSError):  # so ends a terminal whose other side is closed
        while block := os.read(main, 65536):
            blocks.append(block)
    os.close(main)
    assert process.wait(timeout=60) == 0
    return b"".join(blocks)


def test_a_terminal_gets_colour_unless_told_not_to(folder: Path) -> None:
    started = [on_a_terminal(folder, no_color) for no_color in ("", "1")]
    coloured, plain = (shown(*each) for each in started)
    assert b"\x1b[1;32mf" in coloured and "⟦".encode() not in coloured
    assert b"\x1b[1;32mf" not in plain and "⟦".encode() in plain
