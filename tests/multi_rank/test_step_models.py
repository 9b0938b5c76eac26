"""`export.every_steps` and `export.command`: models of steps, and what a user's command says."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.commands import finish, read_metrics
from helpers.ranks import on_ranks, run_script, train
from helpers.small_runs import CONSTANT, SETTINGS, checkpoint, digests, names, write_inputs

from shardtune.__main__ import run
from shardtune.checkpoint.export.listing import read_listing
from shardtune.training.observers.export_command import ExportCommand
from shardtune.training.observers.metrics import Metrics

EVERY_STEP = (*SETTINGS, *CONSTANT, "export.every_steps=1", "checkpoint.every_steps=1")
SCORE = """
import json, os, pathlib
names = [n for n in os.environ if n.startswith(("RANK", "WORLD", "LOCAL_", "MASTER", "TORCHEL"))]
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


def command(code: str) -> str:
    return f"export.command={shlex.join([sys.executable, '-c', code])}"


@pytest.fixture
def folder(tmp_path: Path, models: dict[str, Path]) -> Path:
    return write_inputs(tmp_path, models["glm"])


def test_models_of_steps_are_exports_and_are_scored(folder, tmp_path):
    """The newest are kept, over a resume too, and no other folder is touched."""
    given = ["checkpoint.keep=9", "run.dir=run", command(SCORE)]
    mine = folder / "run/models/step_0000001"
    mine.mkdir(parents=True)
    (mine / "notes.txt").touch()
    said = finish(train(2, *EVERY_STEP, *given, "train.max_steps=4", cwd=folder))
    aside = mine.with_name("step_0000001.aside1")
    assert names(folder / "run/models") == [aside.name, "step_0000003", "step_0000004"]
    assert names(aside) == ["notes.txt"]
    for step in (3, 4):
        out, model = tmp_path / f"out{step}", folder / f"run/models/step_000000{step}"
        assert run(["export", str(checkpoint(folder / "run", step)), str(out)]) == 0
        exported, written = digests(out), digests(model)
        assert exported.keys() == written.keys()
        assert all(exported[name] == written[name] for name in exported if name != "export.json")
        assert run(["verify", str(model)]) == 0
    scores = {entry["model"]: entry for entry in read_metrics(folder / "run", "score")}
    assert {"models/step_0000004", "model"} <= scores.keys()
    for entry in scores.values():
        assert entry["scores"]["of_ranks"] == 0 and entry["scores"]["step"] == entry["step"]
        assert entry["scores"]["files"] > 3
    ran = (folder / "ran.txt").read_text(encoding="utf-8").split()
    assert sorted(ran) == sorted(Path(name).name for name in scores), "on one rank alone"
    assert "Score of model, in " in said and "read model" in (
        folder / "run/commands/model.log"
    ).read_text(encoding="utf-8")

    # Step 3 is taken again: its model is written anew, and that of step 4 counts no more.
    older = checkpoint(folder / "run", 2)
    given += [f"run.resume={older}", "train.max_steps=3"]
    finish(train(1, *EVERY_STEP, *given, cwd=folder))
    assert names(folder / "run/models") == [aside.name, "step_0000003"]
    listing = read_listing(folder / "run/models/step_0000003")
    assert listing and listing["step"] == 3
    assert max(entry["step"] for entry in read_metrics(folder / "run", "score")) == 3


def test_of_adapters_the_adapter_is_written(folder):
    finish(train(2, *EVERY_STEP, "run.dir=run", "lora.rank=2", "train.max_steps=2", cwd=folder))
    for step in (1, 2):
        assert "adapter_config.json" in names(folder / f"run/models/step_000000{step}")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "import sys; print('no such benchmark'); sys.exit(3)",
            'ended with 3 for {}: "no such ben',
        ),
        ('print(\'{"a": "b"}\')', "its last line for {} is no JSON object of numbers"),
        (
            "import json; print(json.dumps(dict(a=10**400)))",
            "its last line for {} is no JSON object of numbers",
        ),
        (
            "import shutil; shutil.rmtree('run/commands')",
            "its last line for {} is no JSON object of numbers",
        ),
        ("import time; time.sleep(999)", "is ended for {}, since it took longer than"),
    ],
)
def test_a_command_that_fails_ends_nothing(code, said, folder):
    given = ["run.dir=run", "train.max_steps=1", "distributed.save_timeout_s=3"]
    done = train(1, *SETTINGS, *CONSTANT, *given, command(code), cwd=folder)
    assert said.format("model") in finish(done)
    assert read_metrics(folder / "run", "score") == []


def end_while_it_runs(number: int, arguments: list[str]) -> None:
    """Send this rank a signal once the command has begun."""
    launch = ExportCommand._launch

    def launch_and_end(self: ExportCommand, model: Path, step: int) -> None:
        launch(self, model, step)
        while not (pid := Path("pid")).exists() or not pid.read_text():
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    ExportCommand._launch = launch_and_end  # type: ignore[method-assign]
    run_script(arguments)


@pytest.mark.parametrize(
    ("number", "every", "code"),
    [
        (signal.SIGTERM, 1, 0),  # in the last step
        (signal.SIGTERM, 2, 75),
        (signal.SIGTERM, 0, 75),  # while the run waits for the command of model/
        (signal.SIGKILL, 1, -signal.SIGKILL),
    ],
)
def test_a_stop_ends_the_command_with_its_processes(number, every, code, folder):
    given = ["run.dir=run", f"train.max_steps={4 if every == 2 else 2}"]
    given += [
        "export.command=sleep 600 & echo $! > pid; wait",
        f"export.every_steps={every}",
        "checkpoint.every_steps=1",
    ]
    arguments = ["--config", "config.yaml", *SETTINGS, *CONSTANT, *given]
    done = on_ranks(1, end_while_it_runs, number, arguments, cwd=folder)
    assert done.returncode == code, done.stderr
    pid = (folder / "pid").read_text(encoding="utf-8").strip()
    deadline, state = time.monotonic() + 20, "S"
    while state not in ("", "Z") and time.monotonic() < deadline:
        asked = ["ps", "-o", "stat=", "-p", pid]
        state = subprocess.run(asked, capture_output=True, text=True).stdout.strip()[:1]
        time.sleep(0.1)
    assert state in ("", "Z")


def test_of_commands_that_wait_the_newest_is_kept(tmp_path, caplog):
    class NoMetrics:
        def write(self, *entries: object) -> None:
            written.extend(entries)

    written: list[object] = []
    code = 'sleep 0.3; echo \'{"a": 1, "b": 2.5}\''
    metrics: Metrics = NoMetrics()  # type: ignore[assignment]
    with caplog.at_level("INFO"), ExportCommand(code, tmp_path, 60, metrics) as commands:
        for step in (1, 2, 3):
            model = tmp_path / f"step_{step}"
            model.mkdir()
            commands.start(model, step)
        assert [model.name for model in commands.models_in_use()] == ["step_1", "step_3"]
    assert [json.loads(json.dumps(entry))["step"] for entry in written] == [1, 3]
    assert "step_2 is skipped for step_3" in caplog.text
