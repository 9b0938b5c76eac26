"""`export.every_steps` and `export.command`: models of steps, and what a user's command says."""

import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from helpers.commands import completed, finish, read_metrics, wait_until
from helpers.configs import configured
from helpers.ranks import train, world_of
from helpers.small_runs import CONSTANT, SETTINGS, checkpoint, digests, names, write_inputs

from shardtune.__main__ import run
from shardtune.checkpoint import durable_fs
from shardtune.checkpoint.assets import LISTING, listing_json, read_listing
from shardtune.checkpoint.export.live import StepModels
from shardtune.checkpoint.run_dir import RunDir
from shardtune.training.build_context import find_pending_model
from shardtune.training.observers.export_command import ExportCommand
from shardtune.training.observers.metrics import Metrics

EVERY_STEP = (*SETTINGS, *CONSTANT, "export.every_steps=1", "checkpoint.every_steps=1")
SCORE = """
import json, os, pathlib, sys
ranks = "RANK", "WORLD", "LOCAL_", "MASTER", "TORCHEL", "JOIN_", "OMP_"
names = [n for n in os.environ if n.startswith(ranks)]
assert os.environ["PATH"].startswith(f"{pathlib.Path(sys.executable).parent}:")
model = pathlib.Path(os.environ["SHARDTUNE_MODEL"])
print("read", model.name)
with open("ran.txt", "a") as file:
    file.write(model.name + "\\n")
print(json.dumps({
    "files": len(list(model.iterdir())), "step": int(os.environ["SHARDTUNE_STEP"]),
    "of_ranks": len(names),
}))
print()
"""
LEFT = "sleep 600 & echo $! > left;"  # a process that the command leaves behind


def command(code: str) -> str:
    return f"export.command={shlex.join([sys.executable, '-c', code])}"


@pytest.fixture
def folder(tmp_path: Path, models: dict[str, Path]) -> Path:
    return write_inputs(tmp_path, models["glm"])


def test_models_of_steps_are_exports_and_are_scored(folder, tmp_path, monkeypatch):
    """The newest are kept, over a resume too, and no other folder is touched."""
    monkeypatch.setenv("JOIN_SECRET", "of the launch")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    given = ["checkpoint.keep=9", "run.dir=run", command(SCORE)]
    mine = folder / "run/models/step_0000001"
    mine.mkdir(parents=True)
    (mine / "notes.txt").touch()
    mine.with_name("mine").mkdir()  # as where run.dir is the folder with the source
    steps = (*EVERY_STEP, *given, "train.max_steps=4", "export.final=false")
    said = finish(train(2, *steps, cwd=folder))
    aside = mine.with_name("step_0000001.aside1")
    assert names(folder / "run/models") == ["mine", aside.name, "step_0000003", "step_0000004"]
    assert names(aside) == ["notes.txt"]
    for step in (3, 4):
        out, model = tmp_path / f"out{step}", folder / f"run/models/step_000000{step}"
        assert run(["export", str(checkpoint(folder / "run", step)), str(out)]) == 0
        exported, written = digests(out), digests(model)
        assert exported.keys() == written.keys()
        assert all(exported[name] == written[name] for name in exported if name != "export.json")
        assert run(["verify", str(model)]) == 0
    scores = {entry["model"]: entry for entry in read_metrics(folder / "run", "score")}
    assert "models/step_0000004" in scores, "the newest of those that wait"
    for entry in scores.values():
        assert entry["scores"]["of_ranks"] == 0 and entry["scores"]["step"] == entry["step"]
        assert entry["scores"]["files"] > 3
    ran = (folder / "ran.txt").read_text(encoding="utf-8").split()
    assert sorted(ran) == sorted(Path(name).name for name in scores), "on one rank alone"
    assert "Score of step_0000004, in " in said

    # Step 3 is taken again, and is the last one, whose model is model/. Those of steps 3 and 4
    # count no more. That of step 2 was deleted, and is the newest again.
    older = checkpoint(folder / "run", 2)
    given += [f"run.resume={older}", "train.max_steps=3"]
    (folder / "run/models/.step_0000009.writing").mkdir()  # a kill has left it
    said = finish(train(1, *EVERY_STEP, *given, cwd=folder))
    log = (folder / "run/commands/model.log").read_text(encoding="utf-8")
    assert "Score of model, in " in said and "read model" in log
    assert names(folder / "run/models") == ["mine", aside.name, "step_0000002"]
    listing = read_listing(folder / "run/model")
    assert listing and listing["step"] == 3
    scores = {entry["model"]: entry["step"] for entry in read_metrics(folder / "run", "score")}
    assert scores["model"] == 3 == max(scores.values())
    finish(train(1, *EVERY_STEP, "run.resume=never", "train.max_steps=1", cwd=folder))
    assert names(folder / "run/models") == ["mine", aside.name, "step_0000002.aside1"]
    assert (folder / "run/commands.aside1/model.log").exists()


def test_a_model_that_a_kill_has_left_out_is_written_by_the_resume(folder):
    """That of the last step, too, where nothing else is left."""
    given = (*EVERY_STEP, "run.dir=run", "train.max_steps=1", "export.final=false")
    finish(train(1, *given, cwd=folder))
    model = folder / "run/models/step_0000001"
    written = digests(model)
    model.rename(durable_fs.unfinished(model))
    finish(train(1, *given, cwd=folder))
    assert digests(model) == written and names(model.parent) == [model.name]
    assert "Finished: " in finish(train(1, *given, cwd=folder))


@pytest.mark.parametrize(
    ("step", "models", "pending"),
    [
        (4, (), 4),
        (4, (4,), None),
        (5, (), None),
        (6, (4,), None),  # the last one, whose model is model/
    ],
)
def test_a_model_that_is_due_and_missing_is_pending(step, models, pending, tmp_path):
    for number in models:
        make_step_model(tmp_path, number)
    run: Any = SimpleNamespace(
        config=configured("export.every_steps=2"),
        resumed=SimpleNamespace(step=step),
        directory=RunDir(tmp_path, [0], None),
        world=world_of(0, 1, dist.HashStore()),
    )
    schedule: Any = SimpleNamespace(is_due=lambda step, every: step % every == 0, total_steps=6)
    assert find_pending_model(run, schedule) == pending


def make_step_model(run_dir: Path, step: int) -> None:
    folder = run_dir / f"models/step_{step:07d}"
    folder.mkdir(parents=True)
    (folder / LISTING).write_bytes(listing_json({"files": {}, "models": "models"}))


def test_a_model_that_is_deleted_in_part_has_its_name_no_more(tmp_path, monkeypatch):
    for step in (1, 2):
        make_step_model(tmp_path, step)
    live: Any = SimpleNamespace()
    world = world_of(0, 1, dist.HashStore())
    monkeypatch.setattr(durable_fs, "delete", Mock(side_effect=OSError))
    StepModels(RunDir(tmp_path, [0], None), live, 1, world).delete_old(2, [])
    assert names(tmp_path / "models") == [".step_0000001.writing", "step_0000002"]


def test_of_adapters_the_adapter_is_written(folder):
    """One that a command reads is kept beside the newest."""
    given = ["run.dir=run", "lora.rank=2", "train.max_steps=4", "export.keep=1"]
    code = "n=$SHARDTUNE_STEP; test $n -gt 1 || sleep 3; ls $SHARDTUNE_MODEL > files$n"
    given += [f"export.command={code}"]
    finish(train(2, *EVERY_STEP, *given, cwd=folder))
    for step in (1, 3):
        assert "adapter_config.json" in names(folder / f"run/models/step_000000{step}")
    assert "adapter_config.json" in (folder / "files1").read_text(encoding="utf-8")


NO_SCORES = "its last line for {} is no JSON object of numbers"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys; print('no such benchmark'); sys.exit(3)", 'ended with 3 for {}: "no such'),
        ('print(\'{"a": "b"}\')', NO_SCORES),
        ("import json; print(json.dumps(dict(a=10**400)))", NO_SCORES),
        ("import shutil; shutil.rmtree('run/commands')", NO_SCORES),
        ("import time; time.sleep(999)", "is ended for {}, since it took longer than"),
    ],
)
def test_a_command_that_fails_ends_nothing(code, said, folder):
    given = ["run.dir=run", "train.max_steps=1", "distributed.save_timeout_s=3"]
    done = train(1, *SETTINGS, *CONSTANT, *given, command(code), cwd=folder)
    assert said.format("model") in finish(done)
    failed = re.findall("ended with (-?[0-9]+)", said)
    scores = read_metrics(folder / "run", "score")
    assert [(entry["scores"], f"{entry['exit_code']}") for entry in scores] == [
        ({}, code) for code in failed
    ]


@pytest.mark.parametrize(
    "every",
    [2, 0],  # 0: while the run waits for the command of model/
)
def test_a_run_that_ends_early_ends_the_command_with_its_processes(every, folder):
    # The rank is back from the start of the command by then.
    code = f"{LEFT} sleep {0 if every else 2}; kill -TERM $PPID; wait"
    given = [f"export.command={code}", "run.dir=run"]
    given += [f"export.every_steps={every}", "export.keep=99", "checkpoint.every_steps=2"]
    given += ["train.max_steps=90" if every else "train.max_steps=1", "train.epochs=99"]
    done = train(1, *SETTINGS, *CONSTANT, *given, cwd=folder)
    assert done.returncode == 75, done.stderr
    assert_ended(folder / "left")


def test_where_a_signal_comes_in_the_last_step_no_command_is_waited_for(tmp_path):
    metrics = Metrics(tmp_path / "metrics.jsonl", world_of(0, 1, dist.HashStore()), None)
    pid, model = tmp_path / "left", tmp_path / "model"
    model.mkdir()
    code = f"cd {tmp_path}; {LEFT} wait"
    with ExportCommand(code, tmp_path, 1, 600, metrics) as commands:
        commands.start(model, 1)
        wait_until(lambda: pid.exists() and pid.read_text())
        commands.give_up()
        commands.start(model, 2)
        assert not [*commands.models_in_use()]
    assert_ended(pid)


def assert_ended(file: Path) -> None:
    """Expect that the process whose id is in `file` ends within 80 s."""
    asked = ["ps", "-o", "stat=", "-p", file.read_text(encoding="utf-8").strip()]
    wait_until(lambda: completed(asked).stdout.strip()[:1] in ("", "Z"), within_s=80)


def test_of_commands_that_wait_the_newest_is_kept(tmp_path, caplog):
    metrics = Metrics(tmp_path / "metrics.jsonl", world_of(0, 1, dist.HashStore()), None)
    (tmp_path / "commands").mkdir()
    (tmp_path / "commands/model.log").touch()
    code = f'cd {tmp_path}; {LEFT} sleep 0.3; echo \'{{"a": 1, "b": 2.5}}\''
    with caplog.at_level("INFO"), ExportCommand(code, tmp_path, 1, 60, metrics) as commands:
        for step in (1, 2, 3):
            model = tmp_path / f"step_{step}"
            model.mkdir()
            commands.start(model, step)
        assert [model.name for model in commands.models_in_use()] == ["step_1", "step_3"]
    assert [entry["step"] for entry in read_metrics(tmp_path, "score")] == [1, 3]
    assert "step_2 is skipped for step_3" in caplog.text
    assert names(tmp_path / "commands") == ["model.log", "step_3.log"]
    assert_ended(tmp_path / "left")
