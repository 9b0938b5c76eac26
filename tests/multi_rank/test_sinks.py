"""TensorBoard, Weights & Biases and the profiler beside a run."""

import gzip
import json
import math
import os
import re
import socket
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.chats import chats, write_jsonl
from helpers.commands import finish, launch, read_metrics
from helpers.pinned import on_path
from helpers.ranks import on_ranks, run_script
from helpers.small_runs import SETTINGS, write_inputs
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shardtune.__main__ import run as run_command
from shardtune.training.observers import sinks
from shardtune.training.observers.sinks import scalars

needs_wandb = pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
ARGUMENTS = (
    *SETTINGS,
    "data.eval=eval.jsonl",
    "eval.every_steps=2",
    "export.final=false",
    "train.max_steps=4",
    "checkpoint.every_steps=2",
)


@pytest.fixture
def folder(tmp_path: Path, models: dict[str, Path]) -> Path:
    write_inputs(tmp_path, models["llama"])
    write_jsonl(tmp_path / "eval.jsonl", chats(5, seed=1))
    return tmp_path


def train(folder: Path, *arguments: str, **env: str) -> str:
    given = ["--config", "config.yaml", *ARGUMENTS, *arguments]
    return finish(on_ranks(2, run_in, env, given, cwd=folder))


def run_in(env: dict[str, str], arguments: list[str]) -> None:
    """On a rank: wait no minute for the server of a tracker."""
    os.environ |= env
    sinks._OPEN_TIMEOUT_S = 5
    run_script(arguments)


@pytest.mark.full
def test_tensorboard_has_what_the_metrics_have_and_the_profile_its_files(folder):
    score = ("export.final=true", """export.command=echo '{"em":0.5}'""")
    said = train(folder, "logging.tensorboard=true", "logging.profile_steps=[3, 9]", *score)
    run = folder / "run"
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("score/em")] == [(4, 0.5)]
    for kind, name in (("step", "loss"), ("step", "grad_norm"), ("eval", "perplexity")):
        tag = f"{'train' if kind == 'step' else kind}/{name}"
        expected = [(entry["step"], entry[name]) for entry in read_metrics(run, kind)]
        shown = [(event.step, event.value) for event in events.Scalars(tag)]
        assert [step for step, _ in shown] == [step for step, _ in expected]
        for (_, value), (_, number) in zip(shown, expected, strict=True):
            assert math.isclose(value, number, rel_tol=1e-6)  # TensorBoard has float32

    assert f"Profiled: steps 3 to 4, in {Path('run/profile')}" in said
    names = [f"steps_0000003_0000004_rank_{rank:05d}" for rank in range(2)]
    assert sorted(file.name for file in (run / "profile").iterdir()) == sorted(
        f"{name}{end}" for name in names for end in (".json.gz", ".txt")
    )
    for name in names:
        trace = json.loads(gzip.decompress((run / f"profile/{name}.json.gz").read_bytes()))
        operators = {event.get("name") for event in trace["traceEvents"]}
        assert "aten::mm" in operators and any("all_gather" in str(each) for each in operators)
        table = (run / f"profile/{name}.txt").read_text(encoding="utf-8")
        assert len(re.findall(r"^.*\d%.*\d\s*$", table, re.MULTILINE)) == 10
    (profile,) = read_metrics(run, "profile")
    assert (profile["first_step"], profile["step"]) == (3, 4)
    times = {
        (entry["kind"], entry["step"]): datetime.fromisoformat(entry["time"]).timestamp()
        for entry in map(json.loads, (run / "metrics.jsonl").read_text("utf-8").splitlines())
    }
    since_evaluation = times["step", 3] - times["eval", 2]
    assert read_metrics(run, "step")[2]["seconds"] < since_evaluation + 0.002, "and saves left out"
    taken = sum(entry["seconds"] for entry in read_metrics(run, "step")[2:]) / 2
    assert 0 < sum(profile["seconds"].values()) <= taken * 1.01
    assert min(profile["seconds"].values()) >= 0 < profile["seconds"]["waiting"]

    assert run_command(["report", str(run)]) == 0
    page = (run / "report.html").read_text(encoding="utf-8")
    assert f'href="profile/{names[1]}.json.gz"' in page and "steps 3 to 4: optimizer" in page


def test_a_tracker_that_fails_is_said_once_and_the_run_goes_on(folder):
    train(folder, "train.max_steps=1")
    (folder / "run/tensorboard").write_text("in the way", encoding="utf-8")
    said = train(folder, "logging.tensorboard=true", "logging.profile_steps=[9, 9]")
    assert said.count("TensorBoard failed (") == 1
    assert "logging.profile_steps = [9, 9] has no effect: steps 2 to 4 are left" in said
    assert len(read_metrics(folder / "run", "step")) == 4


@pytest.mark.full
def test_a_tracker_that_is_not_installed_is_refused_by_name(folder):
    (folder / "without/tensorboard").mkdir(parents=True)
    (folder / "without/sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda n, *a: None if n in ('tensorboard', 'wandb') else find(n, *a)\n",
        encoding="utf-8",
    )
    done = launch(
        *(0, "--config", "config.yaml", *ARGUMENTS, "logging.tensorboard=true", "logging.wandb=a"),
        cwd=folder,
        env=on_path(folder / "without"),
    )
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
    assert done.returncode == 2 and len(errors) == 2, done.stderr
    for error, name in zip(errors, ("tensorboard", "wandb"), strict=True):
        assert f"the package {name} is not installed - pip install -e .[{name}]" in error


def test_each_metric_has_its_name_in_the_sinks():
    assert scalars({"kind": "step", "step": 3, "loss": 1.5, "mfu": None}) == {"train/loss": 1.5}
    named = {"kind": "eval", "set": "code", "step": 3, "perplexity": 9.0}
    assert scalars(named) == {"eval/code/perplexity": 9.0}
    layers = [
        {"entropy": 0.9, "without_tokens": 1, "rank_imbalance": 1.5},
        {"entropy": 0.8, "without_tokens": 2, "rank_imbalance": 1.1},
    ]
    assert scalars({"kind": "experts", "step": 3, "layers": layers}) == {
        "experts/lowest_entropy": 0.8,
        "experts/without_tokens": 3,
        "experts/rank_imbalance": 1.5,
    }


@pytest.mark.full
@needs_wandb
@pytest.mark.parametrize("mode", ["offline", "silent server"])
def test_a_run_logs_to_weights_and_biases_offline_and_past_a_dead_server(mode, folder):
    """Offline it writes its files without an account; a server that does not answer is said."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()  # and never accepts
        environment = {"WANDB_MODE": "offline"}
        if mode != "offline":
            url = f"http://127.0.0.1:{server.getsockname()[1]}"
            environment = {"WANDB_BASE_URL": url, "WANDB_API_KEY": "0" * 40}
        said = train(folder, "logging.wandb=project", **environment)
    run = folder / "run"
    assert len(read_metrics(run, "step")) == 4
    if mode == "offline":
        assert "Weights & Biases" not in said
        (written,) = run.glob("wandb/offline-run-*/run-*.wandb")
        assert b"train/loss" in written.read_bytes()
        identity = (run / "wandb_run_id").read_text(encoding="utf-8")
        assert identity in written.name
        train(folder, "logging.wandb=project", "train.max_steps=6", **environment)
        assert len(list(run.glob(f"wandb/offline-run-*-{identity}"))) == 2
    else:
        assert said.count("Weights & Biases") == 1, said
