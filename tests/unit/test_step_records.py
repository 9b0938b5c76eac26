"""`inspect-data --step`: the records of a step, as the ranks of its start took them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.data_run import TEMPLATE, Run, chat, save_model, write

from shardtune.__main__ import run
from shardtune.config_io import load_config, write_config
from shardtune.data.schedule import Cost, Position, Schedule

COST = Cost(3, 5, 2)
N_RECORDS = 23
RESUMED_AT = 3
LAST_STEP = 4


pytestmark = pytest.mark.usefixtures("handlers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


def test_each_rank_is_shown_with_what_it_trained(folder, capsys):
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
def test_a_step_that_cannot_be_shown_is_refused(arguments, what, folder, capsys):
    words = arguments.format(folder).split()
    assert run(["inspect-data", "--config", f"{folder}/run.yaml", *words]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("ERROR: ") and what in line and " - " in line
