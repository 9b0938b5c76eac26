"""`eval.keep_best`: the model of the lowest evaluation loss, whatever happens to its writer."""

import errno
import math
import os
import re
import shutil
import signal
import subprocess
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from helpers.chats import chats, write_jsonl
from helpers.commands import finish, read_metrics
from helpers.faults import ALWAYS, Fault, fails, run_with
from helpers.ranks import run_script, train, train_on_nodes, world_of
from helpers.small_runs import (
    CONSTANT,
    SETTINGS,
    checkpoint,
    digests,
    names,
    write_inputs,
)

from shardtune.__main__ import run
from shardtune.checkpoint import durable_fs
from shardtune.checkpoint.assets import listing_json, read_listing
from shardtune.checkpoint.export.live import Best
from shardtune.checkpoint.run_dir import RunDir
from shardtune.training import evaluate

KEEP_BEST = (
    *SETTINGS,
    *CONSTANT,
    "data.eval=eval.jsonl",
    "eval.every_steps=1",
    "eval.keep_best=true",
    "checkpoint.every_steps=1",
    "checkpoint.keep=9",
    "checkpoint.mode=sync",
    "export.final=false",
)
Losses = dict[int, float]


@pytest.fixture
def folder(tmp_path: Path, models: dict[str, Path]) -> Path:
    write_inputs(tmp_path, models["glm"])
    write_jsonl(tmp_path / "eval.jsonl", chats(3))
    return tmp_path


def train_with(losses: Losses, arguments: list[str], kill: str = "") -> None:
    """Train with these evaluation losses; end by SIGKILL around a rename of the second best."""
    entry, rename = evaluate._entry, durable_fs.rename

    def changed(step: int, *sums: Any) -> dict[str, Any]:
        loss = losses[step]
        return entry(step, *sums) | {"loss": loss, "perplexity": math.exp(loss)}

    def rename_and_die(old: Path, new: Path) -> Path | None:
        aside = rename(old, new)
        is_second = (new.parent / ".best.old").exists()
        if is_second and new.name == {"between": ".best.old", "after": "best"}.get(kill):
            os.kill(os.getpid(), signal.SIGKILL)
        return aside

    evaluate._entry, durable_fs.rename = changed, rename_and_die
    run_script(arguments)


def keep_best(
    folder: Path, losses: Losses, last: int, *more: str, ranks: int = 1, kill: str = ""
) -> subprocess.CompletedProcess[str]:
    """Train until that step with these evaluation losses."""
    work = partial(train_with, losses, kill=kill)
    return train(ranks, *KEEP_BEST, f"train.max_steps={last}", *more, cwd=folder, work=work)


def best_steps(folder: Path) -> list[int]:
    return [entry["step"] for entry in read_metrics(folder / "run", "best")]


def model_files(directory: Path) -> dict[str, str]:
    """All but where the weights are from."""
    return {name: d for name, d in digests(directory).items() if name != "export.json"}


def test_each_lower_loss_is_the_best_and_none_that_is_not_a_number():
    live: Any = SimpleNamespace(n_bytes=0, write=lambda *_: "")
    best = Best(RunDir(Path("unwritten"), [0], None), live, world_of(0, 1, dist.HashStore()))
    losses = [math.nan, 3.0, 2.0, math.nan, 2.0, 2.5, math.inf, 1.5]
    evaluations: Any = [
        {"step": step, "loss": loss, "perplexity": 1.0, "tokens": 1}
        for step, loss in enumerate(losses, start=1)
    ]
    assert [each["step"] for each in map(best.offer, evaluations) if each] == [2, 3, 8]


@pytest.mark.full
def test_the_best_model_is_the_export_of_its_step(folder, tmp_path):
    """Over a resume, too. The baseline does not count, nor does a loss that is not a number."""
    losses = {0: 0.5, 1: 3.0, 2: 2.0, 3: math.nan, 4: 2.5, 5: 1.5, 6: 1.5}
    best = folder / "run/best"
    for last, step, written in ((4, 2, [1, 2]), (6, 5, [1, 2, 5])):
        said = finish(keep_best(folder, losses, last, ranks=2))
        assert best_steps(folder) == written
        about = {"step": step, "loss": losses[step], "perplexity": math.exp(losses[step])}
        assert f"Saved the best model so far, of step {step}, " in said
        assert read_listing(best).items() >= about.items()
        out = tmp_path / f"out{step}"
        assert run(["export", str(checkpoint(folder / "run", step)), str(out)]) == 0
        assert model_files(best) == model_files(out)
        assert run(["verify", str(best)]) == 0
    assert not any(name.startswith(".best") for name in names(folder / "run"))

    # Steps that are repeated leave the same record, and write nothing. Other numbers in them, as
    # after a change of settings, leave the better model and the line that belongs to it.
    before, older = best.stat().st_ino, checkpoint(folder / "run", 4)

    def forget_the_last_steps() -> None:
        for step in (5, 6):
            shutil.rmtree(checkpoint(folder / "run", step))

    forget_the_last_steps()
    for repeated, more in ((losses, []), (losses | {5: 1.75}, [f"run.resume={older}"])):
        said = finish(keep_best(folder, repeated, 6, *more, ranks=2))
        assert "Saved the best" not in said and "\nBest model: kept from step 5, " in said
        assert best_steps(folder) == [1, 2, 5] and best.stat().st_ino == before
    assert read_listing(best)["loss"] == read_metrics(folder / "run", "best")[-1]["loss"] == 1.5
    forget_the_last_steps()
    finish(keep_best(folder, losses | {5: 1.75, 6: 1.25}, 6, *more))
    assert best_steps(folder) == [1, 2, 5, 6] and read_listing(best)["step"] == 6


@pytest.mark.parametrize(
    ("kill", "step"),
    [
        ("between", 1),
        pytest.param("after", 2, marks=pytest.mark.full),
    ],
)
def test_a_kill_leaves_the_old_best_or_the_new_one(kill, step, folder):
    losses = {0: 9.0, 1: 3.0, 2: 2.0}
    killed = keep_best(folder, losses, 2, kill=kill)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (folder / "run/best").exists() == (kill != "between")
    finish(keep_best(folder, losses | {2: 8.0}, 2))
    assert run(["verify", str(folder / "run/best")]) == 0
    assert read_listing(folder / "run/best")["step"] == step
    assert not any(name.startswith(".best") for name in names(folder / "run"))


def test_a_model_for_which_the_disk_has_no_room(folder):
    """Training goes on without the best one; without the final one the run fails."""
    faults = [
        Fault("write", f"*/.{name}.writing/model*", fails(errno.ENOSPC), nth=3, times=ALWAYS)
        for name in ("best", "model")
    ]
    given = [*KEEP_BEST, "train.max_steps=2", "eval.every_steps=2", "export.final=true"]
    done = train(2, *given, cwd=folder, work=partial(run_with, faults))
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    room = r"\[Errno 28\] No space left on device; it takes (?!0 )\S+ GB of the disk of \S*run"
    assert re.search(f"Best model of step 2 not kept: {room} - ", done.stdout)
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("ERROR: rank 0 ")]
    assert re.fullmatch(rf"ERROR: .*: the final model was not written: {room} - .+", error)
    assert best_steps(folder) == []
    assert not any("best" in name for name in names(folder / "run"))


def test_the_best_model_of_an_earlier_run_is_moved_aside(folder):
    for losses in ({0: 9.0, 1: 1.0}, {0: 9.0, 1: 2.0}):
        finish(keep_best(folder, losses, 1, "run.resume=never"))
    assert read_listing(folder / "run/best")["loss"] == 2.0
    assert read_listing(folder / "run/best.aside1")["loss"] == 1.0


@pytest.fixture
def nodes(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two folders of a run, each on a disk of its own."""
    other = tmp_path_factory.mktemp("other") / "node"
    shutil.copytree(folder, other)
    return folder, other


def test_nodes_that_come_back_in_another_order_know_the_lowest_loss(nodes):
    """Node 0 writes no model of a higher loss, and a lower one takes the place of the other's."""
    a, b = nodes
    losses = {0: 9.0, 1: 3.0, 2: 2.0, 3: 2.5, 4: 1.5, 5: 1.75}
    for order, last in (((a, b), 2), ((b, a), 4), ((a, b), 5)):
        given = [*KEEP_BEST, "checkpoint.mirror=false", f"train.max_steps={last}"]
        work = partial(train_with, losses)
        said = finish(train_on_nodes([(node, 1) for node in order], *given, work=work))
        keeper, other, best = (a, b, 2) if last == 2 else (b, a, 4)
        assert read_listing(keeper / "run/best")["step"] == best
        assert not (other / "run/best").exists()
        assert best_steps(order[0]) == {2: [1, 2], 4: [4], 5: [1, 2]}[last]
        if last > 2:
            step, node = {4: 2, 5: 4}[last], f"node 1 ({os.uname().nodename})"
            assert f"is not on node 0: best/ is of step {step} on {node}\n" in said
            assert f"metrics.jsonl: the steps up to {step} are on {node} - " in said
    assert [entry["step"] for entry in read_metrics(a / "run", "step")] == [1, 2, 5]
    assert [entry["step"] for entry in read_metrics(b / "run", "step")] == [3, 4]


def test_a_lost_best_model_is_said_and_no_worse_one_takes_its_name(folder):
    """A checkpoint that was saved without keep_best, as an older one, leaves it to the folder."""
    losses, best = {0: 9.0, 1: 3.0, 2: 2.0, 3: 2.5}, folder / "run/best"
    for last, more in ((1, ["eval.keep_best=false"]), (2, []), (3, [])):
        said = finish(keep_best(folder, losses, last, *more))
        assert best_steps(folder) == []
        if last == 1:
            best.mkdir()
            result = {"step": 1, "loss": 1.0, "perplexity": math.e, "files": {}}
            (best / "export.json").write_bytes(listing_json(result))
        else:
            shutil.rmtree(best, ignore_errors=True)
    assert "is not on node 0: best/ is on none of the disks of this run" in said
    assert not best.exists()
