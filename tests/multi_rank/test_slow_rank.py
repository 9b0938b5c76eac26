"""The rank that the others wait for is named, with what it does meanwhile."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.chats import chats, write_jsonl
from helpers.commands import read_metrics
from helpers.documented import QUOTES, is_in
from helpers.ranks import on_ranks, run_script, train, train_until

from shardtune.training import optim, prefetch

ARGUMENTS = (
    "--config",
    "config.yaml",
    "model.compute_dtype=float32",
    "data.max_length=128",
    "train.epochs=99",
    "train.gradient_accumulation_steps=2",
    "export.final=false",
)
SLOW_S = 0.03
SLOW_DATA_S = 0.2  # made while the loop trains, so it takes more than a step until anyone waits


def slowed(original: Callable[..., Any], slow_s: float) -> Callable[..., Any]:
    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(slow_s)
        return original(*arguments, **options)

    return slow


def run_with_a_slow_rank(rank: int, phase: str, arguments: list[str]) -> None:
    if int(os.environ["RANK"]) == rank:
        module, name = {
            "data": (prefetch, "build_batch"),
            "forward and backward": (
                torch.nn.functional,
                "silu",
            ),  # within a layer, between its collectives
            "optimizer": (optim, "clip_gradients"),
        }[phase]
        setattr(
            module, name, slowed(getattr(module, name), SLOW_DATA_S if phase == "data" else SLOW_S)
        )
    run_script(arguments)


def run(folder: Path, model: Path, ranks: int, rank: int, phase: str, *more: str) -> str:
    write_jsonl(folder / "train.jsonl", chats(30))
    (folder / "config.yaml").write_text(
        "run: {dir: run}\ndata: {train: train.jsonl}\n", encoding="utf-8"
    )
    arguments = [*ARGUMENTS, f"model.path={model}", "checkpoint.every_steps=0", *more]
    done = on_ranks(ranks, run_with_a_slow_rank, rank, phase, arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("ranks", "replicas", "rank", "phase"),
    [
        (2, 1, 1, "forward and backward"),
        (2, 2, 1, "forward and backward"),
        pytest.param(4, 2, 2, "forward and backward", marks=pytest.mark.full),
        pytest.param(2, 1, 0, "data", marks=pytest.mark.full),
        pytest.param(2, 1, 1, "optimizer", marks=pytest.mark.full),
    ],
)
def test_a_slow_rank_is_named(
    ranks: int, replicas: int, rank: int, phase: str, tmp_path: Path, models: dict[str, Path]
) -> None:
    more = [f"parallel.replicate={replicas}", "train.max_steps=22"]
    said = run(tmp_path, models["llama"], ranks, rank, phase, *more)
    lines = re.findall(
        r"^Slowest: rank (\d) on (\S+), (\d+\.\d\d) x the median, in (.+) "
        r"\(a step: data \S+ s, forward and backward "
        r"\S+ s, optimizer \S+ s, waiting \S+ s\)$",
        said,
        re.MULTILINE,
    )
    assert len(lines) == 1 and is_in(QUOTES["slow"][0], said)
    entries = read_metrics(tmp_path / "run", "ranks")
    assert [entry["step"] for entry in entries] == [11, 21]
    assert lines == [
        (str(rank), socket.gethostname(), f"{entries[1]['ratio']:.2f}", phase)
    ]  # slow for the second time
    for entry in entries:
        assert (entry["slowest_rank"], entry["host"], entry["phase"]) == (
            rank,
            socket.gethostname(),
            phase,
        )
        assert entry["seconds"][phase] > SLOW_S
    steps = read_metrics(tmp_path / "run", "step")[
        2:
    ]  # the first waits for what is made when the run begins
    waited = sum(step["data_seconds"] for step in steps) / sum(step["seconds"] for step in steps)
    assert 0.5 < waited < 1 if phase == "data" else 0 < waited < 0.1


@pytest.mark.full
def test_a_resumed_run_has_no_report_of_steps_that_it_repeats(
    tmp_path: Path, models: dict[str, Path]
) -> None:
    """The run is killed after the report at step 11, and goes on from step 8."""
    write_jsonl(tmp_path / "train.jsonl", chats(30))
    arguments = [
        *ARGUMENTS[2:],
        f"model.path={models['llama']}",
        "data.train=train.jsonl",
        "checkpoint.every_steps=8",
    ]
    arguments.append("checkpoint.mode=sync")
    train_until(13, 0, 2, *arguments, cwd=tmp_path)
    run_dir = tmp_path / "runs/config"
    assert [entry["step"] for entry in read_metrics(run_dir, "ranks")] == [11]
    done = train(2, *arguments, "train.max_steps=20", cwd=tmp_path)
    assert "Resumed from checkpoint_0000008" in done.stdout, done.stderr
    assert [entry["step"] for entry in read_metrics(run_dir, "step")] == list(range(1, 21))
    assert [entry["step"] for entry in read_metrics(run_dir, "ranks")] == [19]
