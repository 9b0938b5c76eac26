"""How a run ends when it is told to, when nodes do not fit together, and when its reader goes
away."""

import os
import platform
import re
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.chats import chats, write_jsonl
from helpers.commands import (
    REPOSITORY,
    a_free_port,
    finish,
    piped,
    read_metrics,
    wait_for_steps,
    wait_until,
)
from helpers.documented import error_line, require_error_line
from helpers.faults import Fault, gets, run_with
from helpers.launches import break_rank, descendants, environment
from helpers.ranks import on_ranks, run_script, train, train_on_nodes

from shardtune.distributed import signals
from shardtune.errors import AGAIN, Aborted

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
LONG = (
    "model.compute_dtype=float32",
    "data.max_length=128",
    "data.train=train.jsonl",
    "train.epochs=5000",
    "scheduler.name=constant",
    "scheduler.warmup_ratio=0",
    "export.final=false",
    "checkpoint.every_steps=0",
    "parallel.expert=1",
    "parallel.stages=1",
)


def command(*arguments: object) -> list[str]:
    return [
        sys.executable,
        str(REPOSITORY / "train_fsdp.py"),
        "--config",
        str(REPOSITORY / "config.yaml"),
        "data.eval=null",
        *map(str, arguments),
    ]


@pytest.fixture(autouse=True)
def _data(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", chats(30))


def test_a_signal_saves_exits_75_and_the_same_command_resumes(tmp_path, models):
    arguments = command(*LONG, f"model.path={models['llama']}", "run.dir=run")
    process = piped(arguments, tmp_path)
    wait_for_steps(tmp_path / "run", 3)
    process.send_signal(signal.SIGTERM)
    said, errors = process.communicate(timeout=500)
    assert process.returncode == 75, errors
    step = read_metrics(tmp_path / "run", "step")[-1]["step"]
    assert said.splitlines()[-1] == f"Saved checkpoint_{step:07d}"
    assert errors.splitlines()[-1].startswith(
        f"ERROR: stopped by SIGTERM on {platform.node()} after saving step {step} - "
    )

    again = [*arguments[2:], f"train.max_steps={step + 1}"]
    said = finish(on_ranks(1, run_script, again, cwd=tmp_path))
    assert f"Resumed from checkpoint_{step:07d}" in said
    assert [entry["step"] for entry in read_metrics(tmp_path / "run", "step")] == list(
        range(1, step + 2)
    )


def one_node(
    models: dict[str, Path], ranks: str, output: Any, *prefix: str, cwd: Path, **settings: str
) -> subprocess.Popen[bytes]:
    """A launch script alone, whose run has no end."""
    arguments = [*LONG, "data.eval=null", f"model.path={models['llama']}", "run.dir=run"]
    return subprocess.Popen(
        [*prefix, str(REPOSITORY / "launch_node0.sh"), *arguments],
        cwd=cwd,
        env=environment(MASTER_PORT=a_free_port(), NNODES="1", GPUS_PER_NODE=ranks, **settings),
        stdout=output,
        stderr=subprocess.STDOUT,
    )


@pytest.mark.full
def test_nodes_with_different_configurations_are_refused(tmp_path, models):
    """By the run itself, where no preflight has compared them; run.dir may be each node's own."""
    folders = [tmp_path / name for name in ("one", "two")]
    for folder, settings in zip(folders, ("", "optimizer: {lr: 1.0e-3}\n"), strict=True):
        folder.mkdir()
        write_jsonl(folder / "train.jsonl", chats(10))
        own = f"run: {{dir: {folder / 'run'}, seed: {7 if settings else 1234}}}\n"
        (folder / "config.yaml").write_text(own + settings, encoding="utf-8")
    nodes = [(folder, 1) for folder in folders]
    given = [*LONG, f"model.path={models['llama']}", "train.max_steps=1"]
    # Each node has an agent of its own, which lets its rank speak.
    done = train_on_nodes(nodes, *given, grace_s=20)
    assert done.returncode == 2, done.stderr
    host = socket.gethostname()
    for key, first, second in (("run.seed", "1234", "7"), ("optimizer.lr", "1e-05", "0.001")):
        said = f"{key} is {first} on node 0 ({host}) and {second} on node 1 ({host}) - start every"
        assert done.stderr.count(f"ERROR: {said} node") == 2
    assert done.stderr.count("ERROR: ") == 4 and "Parameters:" not in done.stdout


@pytest.mark.full
def test_a_signal_before_the_first_step_ends_the_run_with_a_line(tmp_path, models):
    """Rank 0 tokenises and the other waits for it."""
    write_jsonl(tmp_path / "train.jsonl", chats(40_000, longest_answer=90))
    with (tmp_path / "log").open("w") as log:
        process = one_node(models, "2", log, cwd=tmp_path)
    wait_until(lambda: "Training Configuration:" in (tmp_path / "log").read_text("utf-8"))
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=25) == 1
    last = error_line((tmp_path / "log").read_text(encoding="utf-8"))
    assert last.startswith("ERROR: ended by SIGINT before the first step")


def test_a_pipe_that_ends_first_does_not_stop_the_save(tmp_path, models):
    """Ctrl-C reaches the launch script and `tee` alike: nobody reads what the run says of its
    end. Before that, SIGHUP is ignored under nohup, by all that it starts."""
    process = one_node(models, "1", subprocess.PIPE, "nohup", cwd=tmp_path)
    assert process.stdout is not None
    process.stdout.readline()  # nohup has begun: it has made way for the script
    for pid in descendants(process.pid):  # to the preflight
        os.kill(pid, signal.SIGHUP)
    wait_for_steps(tmp_path / "run", 3)
    for pid in descendants(process.pid):
        os.kill(pid, signal.SIGHUP)
    wait_for_steps(tmp_path / "run", len(read_metrics(tmp_path / "run", "step")) + 3)
    process.stdout.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=500) == 75
    step = read_metrics(tmp_path / "run", "step")[-1]["step"]
    assert (tmp_path / f"run/checkpoints/checkpoint_{step:07d}/COMPLETE").is_file()


@pytest.mark.full
def test_a_scheduler_that_signals_every_process_asks_once(tmp_path, models):
    """The agent passes its own on to the rank, which has one already, and waits for its save."""
    saving = ("shardtune.checkpoint.durable_fs", "write_file")
    # Longer than torchrun gives its processes by default.
    settings = break_rank(tmp_path, 0, saving, "time.sleep(33)", nth=1)
    # Of different kinds, because the system may make one of several of a kind.
    kinds = (signal.SIGTERM, signal.SIGUSR1)
    with (tmp_path / "log").open("w") as log:
        process = one_node(models, "1", log, cwd=tmp_path, **settings)
    wait_for_steps(tmp_path / "run", 3)
    for pid, number in zip(descendants(process.pid), kinds, strict=True):
        os.kill(pid, number)
    assert process.wait(timeout=500) == 75
    last = (tmp_path / "log").read_text(encoding="utf-8").splitlines()[-1]
    step = read_metrics(tmp_path / "run", "step")[-1]["step"]
    assert re.match(
        f"ERROR: stopped by SIG(TERM|USR1) on {platform.node()} after saving step {step} ",
        last,
    )
    assert (tmp_path / f"run/checkpoints/checkpoint_{step:07d}/COMPLETE").is_file()


def ask_again_and_again() -> None:
    """Each signal several times, with the others, and five seconds later."""
    clock = SimpleNamespace(now_s=100.0, monotonic=lambda: clock.now_s)
    vars(signals)["time"] = clock
    for number in SIGNALS:
        stop = signals.StopRequest()
        assert stop.received is None
        for other in SIGNALS:
            signal.raise_signal(number)
            signal.raise_signal(other)
            assert stop.received == f"{number.name} on {platform.node()}"
        clock.now_s += 5
        with pytest.raises(
            Aborted, match=f"^ended by a second signal, {number.name}, .* - "
        ) as ended:
            signal.raise_signal(number)
        assert ended.value.code == 1


@pytest.mark.full
def test_only_a_later_signal_is_another_request(tmp_path):
    finish(on_ranks(1, ask_again_and_again, cwd=tmp_path))


def saving(
    cwd: Path, model: Path, *more: str, faults: list[Fault], ranks: int
) -> subprocess.CompletedProcess[str]:
    """A run that saves after each step."""
    given = (*LONG, f"model.path={model}", "checkpoint.every_steps=1", "run.dir=run", *more)
    return train(ranks, *given, cwd=cwd, work=partial(run_with, faults))


@pytest.mark.parametrize(("number", "resume"), [(signal.SIGHUP, "auto"), (signal.SIGUSR1, "never")])
def test_what_resumes_after_a_signal_is_said(number, resume, tmp_path, models):
    asked = Fault("open", "*/rank_00000.safetensors", gets(number, number, signal.SIGTERM), rank=0)
    done = saving(tmp_path, models["llama"], f"run.resume={resume}", faults=[asked], ranks=2)
    step = read_metrics(tmp_path / "run", "step")[-1]["step"]
    how = "" if resume == "auto" else " with run.resume=auto"
    line = f"ERROR: stopped by {number.name} on {platform.node()} after saving step {step} - "
    line += f"run the same command again{how} to resume\n"
    assert done.returncode == 75 and done.stderr.endswith(line), done.stderr
    require_error_line(line.strip())
    assert (tmp_path / f"run/checkpoints/checkpoint_{step:07d}/COMPLETE").is_file()


def insist(do: Any, *arguments: Any) -> Any:
    """A second signal, late enough, while the save does not end.

    Python may overlook one that comes just before its main thread begins to wait for the save.
    """
    vars(signals)["_SAME_REQUEST_S"] = -1
    for _ in range(60):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
    return do(*arguments)


def test_a_second_request_does_not_wait_for_the_save(tmp_path, models):
    asked = Fault("open", "*/.checkpoint_0000001.*/rank_00000.safetensors", gets(signal.SIGTERM))
    asked_again = Fault("write", "*/.checkpoint_000000[2-9].*/rank_00000.safetensors", insist)
    done = saving(tmp_path, models["llama"], faults=[asked, asked_again], ranks=1)
    line = f"ERROR: ended by a second signal, SIGTERM, without a save - {AGAIN}\n"
    assert done.returncode == 1 and done.stderr.endswith(line), done.stderr
    require_error_line(line.strip())
    assert [path.parent.name for path in tmp_path.glob("run/checkpoints/*/COMPLETE")] == [
        "checkpoint_0000001"
    ]
