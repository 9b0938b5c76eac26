"""`inspect-data`: which tokens of real records are trained, as text, as a page and by step."""

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.data_run import TEMPLATE, Run, chat, save_model, write
from transformers import AutoTokenizer

from shardtune.__main__ import run
from shardtune.config_io import load_config, write_config
from shardtune.data.schedule import Cost, Position, Schedule
from shardtune.report.inspect_data import picture

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
    assert '"keeps_' in out


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
        ("", "--config"),
        ("--config {}/run.yaml a=1 --nothing b=2", "unrecognized arguments: --nothing"),
        ("--config {}/run.yaml --records -1", "less than 0"),
        ("--config {}/run.yaml model.path={}", "no tokenizer"),
        ("--config {}/run.yaml data.train={}/broken.jsonl", "1 of 2 records broken"),
    ],
)
def test_a_wrong_command_is_refused_in_one_line(folder, arguments, what, capsys):
    assert run(["inspect-data", *arguments.replace("{}", str(folder)).split()]) == 2
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


MANY_TURNS = {
    "messages": [
        *chat("hello", "you")["messages"],
        *chat("how are you")["messages"],
        *chat("again", "fine <b> & fine")["messages"],
    ]
}
MANY_TURNS["messages"][1]["train"] = False
RECORDS = [chat("how"), MANY_TURNS, {"text": "hello you"}, {"prompt": "a", "completion": "b"}]


@pytest.fixture(scope="module")
def page_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("page")
    train = write(here / "train.jsonl", RECORDS)
    (here / "run.yaml").write_text(f"model: {{path: {folder}/model}}\ndata: {{train: {train}}}\n")
    return here


def page_of(folder: Path, *arguments: str) -> str:
    out = folder / "page.html"
    config = f"{folder}/run.yaml"
    assert run(["inspect-data", "--config", config, "--html", str(out), *arguments]) == 0
    return out.read_text(encoding="utf-8")


def marked_runs(page: str) -> list[list[tuple[str, str]]]:
    """Return the runs of text, (trained text, other text), of each sequence."""
    bodies = re.findall(r"<pre>(.*?)</pre>", page, re.DOTALL)
    runs = re.compile(r"<mark>(.*?)</mark>|<span>(.*?)</span>", re.DOTALL)
    return [[(html.unescape(a), html.unescape(b)) for a, b in runs.findall(x)] for x in bodies]


def test_the_page_marks_the_tokens_that_are_trained(folder, page_folder, capsys):
    page = page_of(page_folder)
    assert "4 records in" in capsys.readouterr().out
    assert run(["inspect-data", "--config", f"{page_folder}/run.yaml", "--json"]) == 0
    sequences: list[dict[str, Any]] = [
        json.loads(line) for line in capsys.readouterr().out.splitlines()
    ]
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    runs_of = marked_runs(page)
    assert len(runs_of) == len(sequences) == 4
    for runs, sequence in zip(runs_of, sequences, strict=True):
        assert "".join(a + b for a, b in runs) == tokenizer.decode(sequence["input_ids"])
        pairs = zip(sequence["input_ids"], sequence["trained"], strict=True)
        trained = tokenizer.decode([token for token, is_trained in pairs if is_trained])
        assert "".join(text for text, _ in runs) == trained
    assert len(marked_runs(page_of(page_folder, "--records", "2"))) == 2
    assert not re.search(r'(?:src|href)="[^#]|<script', page)


def test_the_page_names_the_first_record_of_each_warning(page_folder, capsys):
    folder = page_folder
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


def test_the_page_overwrites_no_other_file_and_excludes_json(page_folder, capsys):
    config = page_folder / "run.yaml"
    before = config.read_bytes()
    assert run(["inspect-data", "--config", str(config), "--html", str(config)]) == 2
    assert "this file is not a page" in capsys.readouterr().err
    assert config.read_bytes() == before
    assert run(["inspect-data", "--config", str(config), "--html", "a.html", "--json"]) == 2
    assert "--html and --json" in capsys.readouterr().err


COST = Cost(3, 5, 2)
N_RECORDS = 23
RESUMED_AT = 3
LAST_STEP = 4


@pytest.fixture(scope="module")
def steps_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four rows a step on two ranks, that goes on behind step 3 with six rows on three."""
    folder = tmp_path_factory.mktemp("steps")
    model = save_model(folder / "model", "{{ strftime_now('%j') }}" + TEMPLATE)
    train = write(folder / "train.jsonl", [chat("hello " * i, f"a{i}") for i in range(N_RECORDS)])
    (folder / "run.yaml").write_text(
        f"run: {{dir: {folder}/run}}\nmodel: {{path: {model}}}\n"
        f"data: {{train: {train}, max_length: 90}}\n"
        "train: {epochs: 2, gradient_accumulation_steps: 2}\n"
    )
    data = Run(model, train, max_length=90).prepared
    at_resume = [step.end for step in schedule_of(data, 4, Position()).steps()][RESUMED_AT - 1]
    starts = [
        start_of(data, Position(), data_ranks=2, accumulation=2, micro_batch=1),
        start_of(data, at_resume, data_ranks=3, accumulation=1, micro_batch=2),
    ]
    took = [{"kind": "step", "step": number} for number in range(1, LAST_STEP + 1)]
    write(folder / "run/metrics.jsonl", [*starts, *took])
    write_config(load_config(folder / "run.yaml", [], {}), folder / "run/config.yaml")
    write(folder / "later/metrics.jsonl", starts[1:])
    return folder


def schedule_of(data: Any, rows: int, begin: Position) -> Schedule:
    return Schedule(data.train, 90, True, 1234, rows, 2, None, begin)


def start_of(
    data: Any, begin: Position, data_ranks: int, accumulation: int, micro_batch: int
) -> dict[str, Any]:
    return {
        "kind": "start",
        "total_steps": 8,
        "data_key": data.key,
        "date": "2026-01-31",
        "data_ranks": data_ranks,
        "micro_batch_size": micro_batch,
        "row_cost": vars(COST),
        **vars(begin),
        "gradient_accumulation_steps": accumulation,
    }


def shown(
    folder: Path, step: int, capsys: pytest.CaptureFixture[str], *more: str
) -> tuple[list[dict[str, Any]], str]:
    """The rows of a step as the command prints them, and its first line."""
    config = f"{folder}/run.yaml"
    capsys.readouterr()
    assert run(["inspect-data", "--config", config, "--step", str(step), "--json", *more]) == 0
    out, err = capsys.readouterr()
    (title,) = (line for line in err.splitlines() if line.startswith("Step "))
    return [json.loads(line) for line in out.splitlines()], title


def test_each_rank_is_shown_with_what_it_trained(steps_folder, capsys):
    folder = steps_folder
    data = Run(folder / "model", folder / "train.jsonl", max_length=90).prepared
    first = list(schedule_of(data, 4, Position()).steps())[:RESUMED_AT]
    steps = [(step, 2, 1) for step in first]
    steps += [(step, 3, 2) for step in schedule_of(data, 6, first[-1].end).steps()]
    trained: list[int] = []
    for step, ranks, micro_batch in steps:
        rows, title = shown(folder, step.number, capsys)
        for rank in range(ranks):
            for number, expected in enumerate(step.micro_batches(COST, rank, ranks, micro_batch)):
                here = [
                    row for row in rows if (row["data_rank"], row["micro_batch"]) == (rank, number)
                ]
                assert [row["record"] for row in here] == expected  # a record is a sequence here
        assert (" would take it (the last step in its metrics is 4): " in title) == (
            step.number > LAST_STEP
        )
        assert f"| Tokens: {step.tokens} | Trained tokens: {step.trained_tokens}" in title
        assert f"x {ranks} (data ranks) | Rows: {len(step.rows)} |" in title
        assert sum(len(row["input_ids"]) for row in rows) == step.tokens
        assert all(row["step"] == step.number for row in rows)
        assert all(row["place"].endswith(f"train.jsonl:{row['record'] + 1}") for row in rows)
        assert len({(row["data_rank"], row["row"]) for row in rows}) == len(step.rows)
        trained += [row["record"] for row in rows]
    assert sorted(trained) == sorted(2 * list(range(N_RECORDS)))  # two epochs


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ("--step=9", "no step 9"),
        ("--step=0", "--step 0 is less than 1"),
        ("--step=1 --html a.html", "--step prints records"),
        ("--step=3 run.dir={}/later", "begins behind step 3"),
        ("--step=1 run.dir={}/none", "none: no run (metrics.jsonl"),
        ("--step=1 --records 2", "--step prints all records of a step"),
        ("--step=1 data.loss_on=all", "has trained other data in step 1 than this"),
        ("--step=1 data.max_length=80", "data.max_length is 80, and 90 in the run - use "),
        ("--step=1 run.seed=1", "run.seed is 1, and 1234 in the run - use --config "),
    ],
)
def test_a_step_that_cannot_be_shown_is_refused(arguments, what, steps_folder, capsys):
    words = arguments.format(steps_folder).split()
    assert run(["inspect-data", "--config", f"{steps_folder}/run.yaml", *words]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("ERROR: ") and what in line and " - " in line
