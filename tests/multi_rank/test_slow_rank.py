"""The rank that the others wait for is named, with what it does meanwhile."""

import os
import re
import socket
import time
from functools import partial
from typing import Any

import pytest
import torch
from helpers.chats import chats, write_jsonl
from helpers.commands import finish, read_metrics
from helpers.documented import QUOTES, is_in
from helpers.ranks import run_script, train
from helpers.small_runs import SETTINGS

from shardtune.distributed.rank_record import Phase
from shardtune.model.moe.token_exchange import ExpertExchange
from shardtune.training import data_and_schedule, optim

ARGUMENTS = (
    *SETTINGS,
    "train.epochs=99",
    "train.gradient_accumulation_steps=2",
    "export.final=false",
)
SLOW_S = 0.03
SLOW_STEP_S = 0.3  # once a step: also on a loaded machine this is much of it


SLOWED = {
    "data": (Phase.DATA, data_and_schedule, "build_batch", SLOW_STEP_S),
    # Within a layer, between its collectives.
    "layers": (Phase.FORWARD_BACKWARD, torch.nn.functional, "silu", SLOW_S),
    # Between the two exchanges, for the second of which the other ranks wait.
    "experts": (Phase.FORWARD_BACKWARD, ExpertExchange, "_run_experts", SLOW_S),
    "optimizer": (Phase.OPTIMIZER, optim, "clip_gradients", SLOW_STEP_S),
}


def run_with_a_slow_rank(rank: int, work: str, arguments: list[str]) -> None:
    if int(os.environ["RANK"]) == rank:
        _, module, name, slow_s = SLOWED[work]
        original = getattr(module, name)

        def slow(*given: Any, **options: Any) -> Any:
            time.sleep(slow_s)
            return original(*given, **options)

        setattr(module, name, slow)
    run_script(arguments)


@pytest.mark.parametrize(
    ("ranks", "mesh", "rank", "work"),
    [
        (2, "parallel.replicate=1", 1, "layers"),
        pytest.param(2, "parallel.expert=2", 1, "experts", marks=pytest.mark.full),
        pytest.param(2, "parallel.replicate=1", 0, "data", marks=pytest.mark.full),
        pytest.param(2, "parallel.replicate=1", 1, "optimizer", marks=pytest.mark.full),
    ],
)
def test_a_slow_rank_is_named(ranks, mesh, rank, work, tmp_path, models):
    phase, model = SLOWED[work][0], models["glm" if work == "experts" else "llama"]
    write_jsonl(tmp_path / "train.jsonl", chats(30))
    given = [*ARGUMENTS, "run.dir=run", f"model.path={model}", mesh, "checkpoint.every_steps=0"]
    slow = partial(run_with_a_slow_rank, rank, work)
    said = finish(train(ranks, *given, "train.max_steps=22", cwd=tmp_path, work=slow))
    lines = re.findall(
        r"^Slowest: rank (\d) on (\S+), (\d+\.\d\d) x the median, in (.+) "
        r"\(a step: data \S+ s, forward and backward \S+ s, optimizer \S+ s, waiting \S+ s\)$",
        said,
        re.MULTILINE,
    )
    host, entries = socket.gethostname(), read_metrics(tmp_path / "run", "ranks")
    assert [entry["step"] for entry in entries] == [11, 21]
    # Slow for the second time.
    assert lines == [(str(rank), host, f"{entries[1]['ratio']:.2f}", phase)]
    assert is_in(QUOTES["slow"][0], said)
    for entry in entries:
        assert (entry["slowest_rank"], entry["host"], entry["phase"]) == (rank, host, phase)
        assert entry["seconds"][phase] > SLOW_S
    # The first waits for what is made when the run begins.
    steps = read_metrics(tmp_path / "run", "step")[2:]
    waited = sum(step["data_seconds"] for step in steps) / sum(step["seconds"] for step in steps)
    # On a loaded machine the loop's own work takes the rest.
    assert 0.1 < waited < 1 if phase == Phase.DATA else 0 < waited < 0.1
