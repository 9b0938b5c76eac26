"""The same command again, on what a run has left: from which checkpoint it goes on, what may have changed, and what it
leaves untouched."""

from __future__ import annotations

import os
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import chats, read_metrics, write_jsonl
from helpers.ranks import on_ranks, run_script, train
from helpers.small_runs import digests, steps_of
from safetensors.torch import load_file
from test_run import Completed, said, with_dropout, write_inputs

RESUMABLE = (
    "scheduler.name=constant",
    "scheduler.warmup_ratio=0",
    "checkpoint.every_steps=1",
    "checkpoint.keep=3",
)


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Path:
    """A folder with a finished run of one rank and three steps, each with its checkpoint."""
    folder = tmp_path_factory.mktemp("earlier")
    done = train(
        1,
        *RESUMABLE,
        "train.max_steps=3",
        cwd=write_inputs(folder, with_dropout(folder, models["llama"])),
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def run_again(earlier: Path, tmp_path: Path) -> Callable[..., Completed]:
    """Continue a copy of the earlier run, in `tmp_path`, with these assignments."""
    shutil.copytree(earlier, tmp_path, dirs_exist_ok=True)
    return lambda *assignments, ranks=1: train(ranks, *RESUMABLE, *assignments, cwd=tmp_path)


def test_a_finished_run_says_so(tmp_path: Path, run_again: Callable[..., Completed]) -> None:
    before = digests(tmp_path / "runs")
    for lower in (3, 2):
        done = run_again(f"train.max_steps={lower}")
        assert done.returncode == 0 and "Finished: checkpoint_0000003" in done.stdout
        assert "Step " not in done.stdout and digests(tmp_path / "runs") == before


def test_what_may_change_is_said(tmp_path: Path, run_again: Callable[..., Completed]) -> None:
    done = run_again("train.max_steps=5", "export.dtype=float32", "logging.every_steps=2")
    assert done.returncode == 0, done.stderr
    for change in (
        "train.max_steps was 3, is 5",
        'export.dtype was "source", is "float32"',
        "logging.every_steps was 1, is 2",
    ):
        assert f"Changed since checkpoint_0000003: {change}\n" in done.stdout
    assert [entry["step"] for entry in read_metrics(tmp_path / "runs/config", "step")] == [
        1,
        2,
        3,
        4,
        5,
    ]
    assert [entry["step"] for entry in read_metrics(tmp_path / "runs/config", "eval")] == [0, 3, 5]
    assert [(kind, match[1]) for kind, match in said(done.stdout) if kind == "step"] == [
        ("step", "4"),
        ("step", "5"),
    ]

    other = tmp_path / "uninterrupted"
    shutil.copytree(tmp_path, other, ignore=shutil.ignore_patterns("runs", "uninterrupted"))
    assert train(1, *RESUMABLE, "train.max_steps=5", cwd=other).returncode == 0
    assert steps_of(other / "runs/config") == steps_of(tmp_path / "runs/config")


def test_what_may_not_change_is_refused(
    tmp_path: Path, run_again: Callable[..., Completed]
) -> None:
    before = digests(tmp_path / "runs")
    done = run_again(
        "train.max_steps=5", "optimizer.betas=[0.9,0.99]", "run.seed=7", "data.max_length=64"
    )
    assert done.returncode == 2
    errors = done.stderr.splitlines()
    assert len(errors) == 3 and all(error.startswith("ERROR: ") for error in errors)
    for change in (
        "optimizer.betas is [0.9, 0.99] and was [0.9, 0.95]",
        "run.seed is 7 and was 1234",
        "data.max_length is 64 and was ",
    ):
        assert change in done.stderr
    assert digests(tmp_path / "runs") == before

    write_jsonl(tmp_path / "train.jsonl", chats(36))
    done = run_again("train.max_steps=5")
    assert (
        done.returncode == 2 and "the data" in done.stderr and digests(tmp_path / "runs") == before
    )


def flip_a_byte(checkpoint: Path) -> None:
    with (checkpoint / "rank_00000.safetensors").open("r+b") as file:
        file.seek(-20, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-20, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


def truncate_manifest(checkpoint: Path) -> None:
    os.truncate(checkpoint / "manifest.json", 1000)


def remove_complete(checkpoint: Path) -> None:
    (checkpoint / "COMPLETE").unlink()


def garble_complete(checkpoint: Path) -> None:
    (checkpoint / "COMPLETE").write_bytes(b"\xff\xfe")


def remove_rank_file(checkpoint: Path) -> None:
    (checkpoint / "rank_00000.safetensors").unlink()


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (flip_a_byte, "rank_00000.safetensors"),
        (truncate_manifest, "manifest.json"),
        (remove_complete, "COMPLETE"),
        (garble_complete, "manifest.json"),
        (remove_rank_file, "rank_00000.safetensors"),
    ],
)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    damage: Callable[[Path], None],
    named: str,
    tmp_path: Path,
    run_again: Callable[..., Completed],
) -> None:
    checkpoints = tmp_path / "runs/config/checkpoints"
    undisturbed = steps_of(tmp_path / "runs/config")
    damage(checkpoints / "checkpoint_0000003")
    left = digests(checkpoints / "checkpoint_0000003")
    done = run_again("train.max_steps=3")
    assert done.returncode == 0, done.stderr
    reason = next(line for line in done.stdout.splitlines() if line.startswith("Not accepted: "))
    assert "checkpoint_0000003" in reason and named in reason
    assert "Resumed from checkpoint_0000002\n" in done.stdout
    assert "checkpoint_0000003.aside1" in done.stdout
    assert digests(checkpoints / "checkpoint_0000003.aside1") == left
    assert steps_of(tmp_path / "runs/config") == undisturbed


def test_without_an_intact_checkpoint_nothing_is_touched(
    tmp_path: Path, run_again: Callable[..., Completed]
) -> None:
    for checkpoint, damage in zip(
        sorted((tmp_path / "runs/config/checkpoints").iterdir()),
        (flip_a_byte, truncate_manifest, remove_complete),
        strict=True,
    ):
        damage(checkpoint)
    before = digests(tmp_path / "runs")
    done = run_again("train.max_steps=5")
    assert done.returncode == 2 and digests(tmp_path / "runs") == before
    errors = done.stderr.splitlines()
    assert len(errors) == 4 and "run.resume=never" in errors[-1]
    assert all(
        name in line
        for name, line in zip(("COMPLETE", "manifest.json", "rank_00000"), errors, strict=False)
    )


def test_starting_anew_sets_the_earlier_run_aside(
    tmp_path: Path, run_again: Callable[..., Completed]
) -> None:
    """All of it, with a save that was prepared and has no name yet."""
    newest = tmp_path / "runs/config/checkpoints/checkpoint_0000003"
    prepared = newest.rename(newest.with_name(".checkpoint_0000003.0123456789ab"))
    before = digests(tmp_path / "runs/config")
    refused = run_again("run.resume=never", "train.max_steps=1", "data.train=missing.jsonl")
    assert refused.returncode == 2 and digests(tmp_path / "runs/config") == before
    before = {
        file.replace(prepared.name, f"{newest.name}.aside1"): digest
        for file, digest in before.items()
    }

    done = run_again("run.resume=never", "train.max_steps=1")
    assert done.returncode == 0, done.stderr
    after = digests(tmp_path / "runs/config")
    for name in ("checkpoints", "metrics.jsonl", "model"):
        assert f"runs/config/{name}.aside1\n" in done.stdout
        kept = {
            file.replace(f"{name}.aside1", name, 1): digest
            for file, digest in after.items()
            if file.startswith(f"{name}.aside1")
        }
        assert kept == {file: digest for file, digest in before.items() if file.startswith(name)}
    assert [entry["step"] for entry in read_metrics(tmp_path / "runs/config", "eval")] == [0, 1]
    assert [path.name for path in (tmp_path / "runs/config/checkpoints").iterdir()] == [
        "checkpoint_0000001"
    ]


def test_resuming_from_a_named_checkpoint_leaves_what_came_after_it(
    tmp_path: Path,
    run_again: Callable[..., Completed],
) -> None:
    run_dir = tmp_path / "runs/config"
    undisturbed = steps_of(run_dir)
    done = run_again("run.resume=runs/config/checkpoints/checkpoint_0000001", "train.max_steps=3")
    assert done.returncode == 0, done.stderr
    assert "Resumed from checkpoint_0000001\n" in done.stdout
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == [
        "checkpoint_0000001",
        "checkpoint_0000002",
        "checkpoint_0000002.aside1",
        "checkpoint_0000003",
        "checkpoint_0000003.aside1",
    ]
    assert steps_of(run_dir) == undisturbed


def test_resuming_from_another_runs_checkpoint(
    tmp_path: Path, run_again: Callable[..., Completed]
) -> None:
    """The other run keeps its files, and what lay in this run's folder is not mixed with its own."""
    undisturbed = steps_of(tmp_path / "runs/config")
    before = digests(tmp_path / "runs/config")
    assert run_again("run.dir=runs/other", "run.seed=7", "train.max_steps=3").returncode == 0
    done = run_again(
        "run.dir=runs/other",
        "run.resume=runs/config/checkpoints/checkpoint_0000001",
        "train.max_steps=3",
    )
    assert done.returncode == 0, done.stderr
    assert (
        'Changed since checkpoint_0000001: run.dir was "runs/config", is "runs/other"\n'
        in done.stdout
    )
    assert steps_of(tmp_path / "runs/other") == undisturbed[1:]
    assert digests(tmp_path / "runs/config") == before
    assert sorted(path.name for path in (tmp_path / "runs/other").iterdir()) == [
        ".lock",
        "checkpoints",
        "checkpoints.aside1",
        "config.yaml",
        "metrics.jsonl",
        "metrics.jsonl.aside1",
        "model",
        "model.aside1",
    ]


def test_a_named_checkpoint_that_is_none_is_refused(
    tmp_path: Path, run_again: Callable[..., Completed]
) -> None:
    """Also with a name of its own, such as an unfinished save has one that begins with a dot."""
    mine = Path(
        shutil.copytree(tmp_path / "runs/config/checkpoints/checkpoint_0000001", tmp_path / ".mine")
    )
    flip_a_byte(mine)
    before = digests(tmp_path / "runs")
    for name, words in (
        ("runs/config/checkpoints/checkpoint_0000009", "not a complete"),
        (".mine", "rank_00000"),
    ):
        done = run_again(f"run.resume={name}")
        assert done.returncode == 2 and words in done.stderr
    (mine / "COMPLETE").unlink()
    (mine / "manifest.json").unlink()
    done = run_again("run.resume=.mine")
    assert done.returncode == 2 and ".mine: not a complete checkpoint" in done.stderr
    assert digests(tmp_path / "runs") == before


def run_with_small_files(arguments: list[str], bytes_per_file: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_per_file, resource.RLIM_INFINITY))
    run_script(arguments)


@pytest.mark.parametrize(("max_steps", "what"), [(4, "checkpoint_0000004"), (3, "the final model")])
def test_a_disk_that_takes_no_more(
    max_steps: int,
    what: str,
    tmp_path: Path,
    run_again: Callable[..., Completed],
) -> None:
    """It says so, leaves nothing half-written and goes on when there is room; at step 3, only the export is left."""
    run_dir = tmp_path / "runs/config"
    shutil.rmtree(run_dir / "model")
    before = digests(run_dir / "checkpoints")
    arguments = ["--config", "config.yaml", *RESUMABLE, f"train.max_steps={max_steps}"]
    full = on_ranks(1, run_with_small_files, arguments, 60_000, cwd=tmp_path)
    assert full.returncode == 1
    assert re.fullmatch(rf"ERROR: {what} was not .*File too large.* - .*\n", full.stderr)
    assert digests(run_dir / "checkpoints") == before
    assert {path.name for path in run_dir.iterdir()} == {
        ".lock",
        "checkpoints",
        "config.yaml",
        "metrics.jsonl",
    }

    again = run_again(f"train.max_steps={max_steps}")
    assert again.returncode == 0, again.stderr
    assert [entry["step"] for entry in read_metrics(run_dir, "step")] == list(
        range(1, max_steps + 1)
    )
    assert load_file(run_dir / "model/model.safetensors")


def test_an_interrupted_save_leaves_nothing_behind(
    tmp_path: Path, run_again: Callable[..., Completed]
) -> None:
    checkpoints = tmp_path / "runs/config/checkpoints"
    for abandoned in (".checkpoint_0000009.writing", ".checkpoint_0000001.deleting"):
        (checkpoints / abandoned).mkdir()
        (checkpoints / abandoned / "rank_00000.safetensors").write_bytes(b"half")
    with (tmp_path / "runs/config/metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"kind": "step", "step": 4, "loss": 1.0}\n{"kind": "st')
    assert run_again("train.max_steps=4").returncode == 0
    assert not list(checkpoints.glob(".*"))
    assert [entry["step"] for entry in read_metrics(tmp_path / "runs/config", "step")] == [
        1,
        2,
        3,
        4,
    ]
    assert read_metrics(tmp_path / "runs/config", "step")[-1]["loss"] != 1.0
