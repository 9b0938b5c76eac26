"""`shardtune train`: the launch scripts' run on one machine, by one command."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.commands import REPOSITORY, finish, piped, read_metrics, wait_for_steps
from helpers.documented import error_line, require_error_line
from helpers.launches import FORWARD, break_rank, end, write_run
from helpers.pinned import on_path
from helpers.ranks import train

from shardtune.__main__ import COMMANDS, run
from shardtune.cluster import one_machine
from shardtune.config_io import load_config

TRAIN = ["-m", "shardtune", "train", "--config", "config.yaml"]


@pytest.fixture
def folder(tmp_path: Path, models: dict[str, Path]) -> Path:
    return write_run(tmp_path, models["llama"])


def start(*arguments: str, cwd: Path, **settings: str) -> subprocess.Popen[str]:
    """As a user who has never launched anything, in a checkout that is not installed."""
    env = os.environ | on_path(REPOSITORY) | settings
    return piped([sys.executable, *TRAIN, *arguments], cwd, env)


def test_two_cpu_processes_train_to_the_losses_of_the_script(folder):
    others = {"GPUS_PER_NODE": "3", "MASTER_PORT": "1"}
    code, output, errors = end(start("train.max_steps=2", "--processes=2", cwd=folder, **others))
    assert code == 0, errors
    before, _, _ = output.partition("Step 1/2")
    assert before.count("\n") <= 20 and "NODE" not in before
    finish(train(2, "train.max_steps=2", "run.dir=other", "export.final=false", cwd=folder))
    alone, other = (read_metrics(folder / run_dir, "step") for run_dir in ("run", "other"))
    assert [step["loss"] for step in alone] == [step["loss"] for step in other]


@pytest.mark.full
def test_ctrl_c_saves_and_the_same_command_resumes(folder):
    arguments = ("train.epochs=9999", "scheduler.name=constant", "export.final=false")
    node = start(*arguments, cwd=folder)
    wait_for_steps(folder / "run", 1)
    node.send_signal(signal.SIGINT)
    code, _, errors = end(node)
    assert code == 75, errors
    last = error_line(errors)
    assert last.startswith("ERROR: stopped by SIGINT on ")
    steps = len(read_metrics(folder / "run", "step")) + 1
    code, output, errors = end(start(*arguments, f"train.max_steps={steps}", cwd=folder))
    assert code == 0, errors
    assert "Resumed from checkpoint_" in output


def test_a_refusal_of_the_agent_is_the_last_line(folder):
    code, output, errors = end(start("data.train=absent.jsonl", cwd=folder))
    assert code == 2 and "NODE" not in output
    assert "data.train=absent.jsonl: no such file" in errors
    require_error_line(errors.strip())


@pytest.mark.full
def test_a_refusal_and_a_failure_of_ranks_end_with_their_codes_and_lines(folder):
    (folder / "broken.jsonl").write_text("{}\n", encoding="utf-8")
    code, output, errors = end(start("data.train=broken.jsonl", "--processes", "1", cwd=folder))
    assert code == 2 and "Preflight: 1 x CPU process, " in output
    assert errors.splitlines()[-1].startswith("ERROR: data.train: 1 of 1 records broken - ")

    fault = break_rank(folder, 0, FORWARD, "os.kill(os.getpid(), signal.SIGKILL)", nth=1)
    code, output, errors = end(start("--processes=1", cwd=folder, MAX_RESTARTS="1", **fault))
    assert code == 1 and "Restart 1 of 1 after: " in output
    require_error_line(errors.splitlines()[-1])


@pytest.mark.parametrize(
    ("environ", "line"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "the environment has RANK, WORLD_SIZE, as torchrun and"),
        ({"NNODES": "2"}, "NNODES is '2', and this command trains on this machine alone - "),
        ({"NNODES": "1", "NODE_RANK": "1"}, "NODE_RANK is '1', and this command trains on this"),
    ],
)
def test_the_environment_of_another_launch_is_refused(environ, line, folder, monkeypatch, capsys):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert run(["train", "--config", str(folder / "config.yaml")]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"ERROR: {line}") and errors.count("\n") == 1
    require_error_line(errors.strip())


def test_a_wrong_command_line_is_refused_before_anything_is_started(folder, capsys):
    config = str(folder / "config.yaml")
    assert run(["train", "--config", config, "--processes", "0", "train.epoch=2"]) == 2
    assert capsys.readouterr().err.startswith("ERROR: --processes 0 is less than 1 - ")
    assert run(["train", "--config", config, "train.epoch=2"]) == 2
    assert capsys.readouterr().err.startswith("ERROR: train.epoch (command line) is not known - ")


@pytest.mark.parametrize(
    ("gpus", "settings", "count"),
    [("8", [], 8), ("0", [], 2), ("8", ["distributed.backend=gloo"], 2)],
)
def test_all_gpus_are_used_or_two_cpu_processes(gpus, settings, count, folder, monkeypatch):
    monkeypatch.setattr(one_machine, "_COUNT_GPUS", f"print({gpus})")
    assert one_machine._processes(load_config(folder / "config.yaml", settings, {})) == count


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_a_help(name, capsys):
    with pytest.raises(SystemExit, match="0"):
        run([name, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: shardtune {name} ")
