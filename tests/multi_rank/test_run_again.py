"""The same command again, on what a run has left: from which checkpoint it goes on, what may have
changed, and what it leaves untouched."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.chats import chats, write_jsonl
from helpers.commands import finish, read_metrics
from helpers.ranks import on_ranks, run_script, train
from helpers.small_runs import (
    CONSTANT,
    SETTINGS,
    checkpoint,
    digests,
    names,
    steps_of,
    write_inputs,
)
from safetensors.torch import load_file

import shardtune.model.build
from shardtune.checkpoint import durable_fs

RESUMABLE = (
    *SETTINGS,
    *CONSTANT,
    "data.eval=eval.jsonl",
    "checkpoint.every_steps=1",
    "checkpoint.keep=3",
    "train.max_steps=3",
)
RunAgain = Callable[..., subprocess.CompletedProcess[str]]


def settings(*changes: str) -> list[str]:
    """Return the settings of the earlier run, with these changes."""
    changed = dict(setting.split("=", 1) for setting in (*RESUMABLE, *changes))
    return [f"{key}={value}" for key, value in changed.items()]


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Path:
    """A folder with a finished run of one rank and three steps, each with its checkpoint."""
    folder = write_inputs(tmp_path_factory.mktemp("earlier") / "run", models["llama"], dropout=0.2)
    write_jsonl(folder / "eval.jsonl", chats(5, seed=1))
    finish(train(1, *RESUMABLE, cwd=folder))
    return folder


@pytest.fixture
def run_again(earlier: Path, tmp_path: Path) -> RunAgain:
    """Continue a copy of the earlier run, in `tmp_path`, with these assignments."""
    shutil.copytree(earlier, tmp_path, dirs_exist_ok=True)
    return lambda *changes, ranks=1: train(ranks, *settings(*changes), cwd=tmp_path)


def test_a_finished_run_says_so(tmp_path, run_again):
    before = digests(tmp_path / "run")
    for max_steps in (3, 2):
        done = run_again(f"train.max_steps={max_steps}")
        assert done.returncode == 0 and "Finished: checkpoint_0000003" in done.stdout
        assert "Step " not in done.stdout and digests(tmp_path / "run") == before


def test_more_steps_continue_the_run(tmp_path, run_again):
    said = finish(run_again("train.max_steps=5"))
    assert [entry["step"] for entry in read_metrics(tmp_path / "run", "eval")] == [0, 3, 5]
    assert re.findall(r"^Step (\d)/5 ", said, re.MULTILINE) == ["4", "5"]
    assert run_again("train.max_steps=5", "run.dir=whole").returncode == 0
    assert steps_of(tmp_path / "whole") == steps_of(tmp_path / "run")


MAY_CHANGE = {
    "run.ignore_plan": ("false", "true"),
    "train.epochs": ("9", "8"),
    "train.max_steps": ("3", "4"),
    "train.micro_batch_size": ("1", "2"),
    "train.gradient_accumulation_steps": ("1", "3"),
    "eval.baseline": ("true", "false"),
    "eval.every_steps": ("0", "7"),
    "checkpoint.every_steps": ("1", "2"),
    "checkpoint.keep": ("3", "1"),
    "checkpoint.mode": ('"async"', '"sync"'),
    "export.final": ("true", "false"),
    "export.dtype": ('"source"', '"float16"'),
    "logging.every_steps": ("1", "2"),
    "distributed.backend": ('"auto"', '"gloo"'),
    "distributed.join_timeout_s": ("300.0", "30.0"),
    "distributed.step_timeout_s": ("600.0", "60.0"),
    "distributed.save_timeout_s": ("3600.0", "90.0"),
    "model.activation_checkpointing": ('"none"', '"full"'),
    "model.attention": ('"auto"', '"eager"'),
    "train.max_grad_norm": ("1.0", "2.0"),
    "optimizer.lr": ("0.001", "0.002"),
    "scheduler.name": ('"constant"', '"cosine"'),
    "scheduler.warmup_ratio": ("0.0", "0.1"),
    "scheduler.min_lr_ratio": ("0.1", "0.2"),
}
MAY_NOT_CHANGE = {
    "run.seed": ("1234", "7"),
    "model.init": ('"pretrained"', '"random"'),
    "model.compute_dtype": ('"float32"', '"auto"'),
    "model.reduce_dtype": ('"float32"', '"bfloat16"'),
    "data.eval": ('"eval.jsonl"', "null"),
    "data.eval_fraction": ("0.0", "0.5"),
    "data.max_length": ("128", "64"),
    "data.template_options": ("{}", '{"enable_thinking": false}'),
    "data.overflow": ('"turns"', '"truncate"'),
    "data.loss_on": ('"assistant"', '"all"'),
    "data.packing": ("true", "false"),
    "optimizer.betas": ("[0.9, 0.95]", "[0.9, 0.99]"),
    "optimizer.eps": ("1e-08", "1e-07"),
    "optimizer.weight_decay": ("0.0", "0.1"),
    "lora.alpha": ("null", "8.0"),
}


REMEDIES = "set it back, or start anew with run.resume=never or another run.dir"


def assignments(changes: dict[str, tuple[str, str]]) -> list[str]:
    return [f"{key}={new}" for key, (_, new) in changes.items()]


def test_a_resume_says_each_changed_key(tmp_path, run_again):
    said = finish(run_again(*assignments(MAY_CHANGE), ranks=2))
    changes = [
        line for line in said.splitlines() if line.startswith("Changed since checkpoint_0000003: ")
    ]
    assert sorted(line.split(": ", 1)[1] for line in changes) == sorted(
        [f"{key} was {old}, is {new}" for key, (old, new) in MAY_CHANGE.items()]
        + ["world size was 1, is 2"]
    )
    assert names(tmp_path / "run/checkpoints") == ["checkpoint_0000004"]


def test_a_forbidden_change_is_refused_with_both_values_and_both_remedies(tmp_path, run_again):
    """Before any shard is read: the newest checkpoint would be damaged."""
    flip_a_byte(checkpoint(tmp_path / "run", 3))
    before = digests(tmp_path / "run")
    done = run_again(*assignments(MAY_NOT_CHANGE))
    assert done.returncode == 2 and digests(tmp_path / "run") == before
    assert "Checking every byte" not in done.stdout
    for key, (old, new) in MAY_NOT_CHANGE.items():
        assert (
            f"ERROR: {key} is {new} and was {old} in checkpoint_0000003 - {REMEDIES}\n"
            in done.stderr
        )
    assert done.stderr.count("ERROR: ") == len(MAY_NOT_CHANGE)


def test_other_data_is_refused(tmp_path, run_again):
    before = digests(tmp_path / "run")
    write_jsonl(tmp_path / "train.jsonl", chats(36))
    done = run_again("train.max_steps=5")
    assert done.returncode == 2 and digests(tmp_path / "run") == before
    assert re.search(
        r"ERROR: the digest of the data is .* and was .* in checkpoint_0000003 - ", done.stderr
    )


def test_another_model_is_refused_with_both_values(tmp_path, run_again):
    before = digests(tmp_path / "run")
    file = tmp_path / "model/config.json"
    old = json.loads(file.read_text(encoding="utf-8"))
    new = {"max_position_embeddings": 4096, "rms_norm_eps": 0.5}
    file.write_text(json.dumps(old | new), encoding="utf-8")
    done = run_again("train.max_steps=4")
    assert done.returncode == 2 and digests(tmp_path / "run") == before
    assert done.stderr.count("ERROR: ") == 2
    for key, value in new.items():
        assert (
            f"ERROR: {key} of the model's config.json is {value} and was {json.dumps(old[key])} "
            "in checkpoint_0000003 - "
        ) in done.stderr


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


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path, run_again):
    checkpoints = tmp_path / "run/checkpoints"
    undisturbed = steps_of(tmp_path / "run")
    flip_a_byte(checkpoints / "checkpoint_0000003")
    left = digests(checkpoints / "checkpoint_0000003")
    said = finish(run_again("train.max_steps=3"))
    reason = next(line for line in said.splitlines() if line.startswith("Not accepted: "))
    assert "checkpoint_0000003/rank_00000.safetensors" in reason
    assert "Resumed from checkpoint_0000002\n" in said
    assert "checkpoint_0000003.aside1" in said
    assert digests(checkpoints / "checkpoint_0000003.aside1") == left
    assert steps_of(tmp_path / "run") == undisturbed


def test_a_run_without_an_intact_checkpoint_is_refused_and_left_as_it_is(tmp_path, run_again):
    for saved, damage in zip(
        sorted((tmp_path / "run/checkpoints").iterdir()),
        (flip_a_byte, truncate_manifest, remove_complete),
        strict=True,
    ):
        damage(saved)
    before = digests(tmp_path / "run")
    done = run_again("train.max_steps=5")
    assert done.returncode == 2 and digests(tmp_path / "run") == before
    errors = done.stderr.splitlines()
    assert len(errors) == 4 and "run.resume=never" in errors[-1]
    assert all(
        name in line
        for name, line in zip(("COMPLETE", "manifest.json", "rank_00000"), errors, strict=False)
    )


def test_starting_anew_sets_the_earlier_run_aside(tmp_path, run_again):
    """All of it, with a save that was prepared and has no name yet."""
    newest = tmp_path / "run/checkpoints/checkpoint_0000003"
    prepared = newest.rename(newest.with_name(".checkpoint_0000003.0123456789ab"))
    before = digests(tmp_path / "run")
    refused = run_again("run.resume=never", "train.max_steps=1", "data.train=missing.jsonl")
    assert refused.returncode == 2 and digests(tmp_path / "run") == before
    before = {
        file.replace(prepared.name, f"{newest.name}.aside1"): digest
        for file, digest in before.items()
    }

    said = finish(run_again("run.resume=never", "train.max_steps=1"))
    after = digests(tmp_path / "run")
    for name in ("checkpoints", "metrics.jsonl", "model"):
        assert f"run/{name}.aside1\n" in said
        kept = {
            file.replace(f"{name}.aside1", name, 1): digest
            for file, digest in after.items()
            if file.startswith(f"{name}.aside1")
        }
        assert kept == {file: digest for file, digest in before.items() if file.startswith(name)}
    assert [entry["step"] for entry in read_metrics(tmp_path / "run", "eval")] == [0, 1]
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == [
        "checkpoint_0000001"
    ]


def run_with(environ: dict[str, str], arguments: list[str]) -> None:
    os.environ |= environ
    run_script(arguments)


@pytest.mark.usefixtures("run_again")
def test_what_restarts_by_itself_goes_on_or_says_that_it_begins_anew(tmp_path):
    given = ["--config", "config.yaml", *settings("run.resume=never", "train.max_steps=5")]
    requeued = {"SLURM_RESTART_COUNT": "1"}
    said = finish(on_ranks(1, run_with, requeued, given, cwd=tmp_path))
    assert "Resumed from checkpoint_0000003" in said and "Moved aside" not in said
    another = {"SLURM_RESTART_COUNT": "1", "SLURM_JOB_ID": "8"}  # which had not yet begun
    said = finish(on_ranks(1, run_with, another, given, cwd=tmp_path))
    assert "Resumed" not in said and "Moved aside" in said
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "TORCHELASTIC_MAX_RESTARTS": "0"}
    said = finish(on_ranks(1, run_with, pod, given, cwd=tmp_path))
    assert "WARNING: run.resume=never: KUBERNETES_SERVICE_HOST is set" in said
    assert "Resumed" not in said and "TORCHELASTIC" not in said


def test_a_resume_from_a_named_checkpoint_sets_later_ones_aside(tmp_path, run_again):
    run_dir = tmp_path / "run"
    undisturbed = steps_of(run_dir)
    said = finish(run_again("run.resume=run/checkpoints/checkpoint_0000001", "train.max_steps=3"))
    assert "Resumed from checkpoint_0000001\n" in said
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == [
        "checkpoint_0000001",
        "checkpoint_0000002",
        "checkpoint_0000002.aside1",
        "checkpoint_0000003",
        "checkpoint_0000003.aside1",
    ]
    assert steps_of(run_dir) == undisturbed


def test_a_run_may_begin_with_the_checkpoint_of_another(tmp_path, run_again):
    """The other run keeps its files; what lay in this run's folder is set aside."""
    undisturbed = steps_of(tmp_path / "run")
    before = digests(tmp_path / "run")
    assert run_again("run.dir=other", "run.seed=7").returncode == 0
    from_it = ("run.dir=other", "run.resume=run/checkpoints/checkpoint_0000001")
    said = finish(run_again(*from_it, "train.max_steps=2", "export.final=false"))
    assert 'Changed since checkpoint_0000001: run.dir was "run", is "other"\n' in said
    said = finish(run_again("run.dir=other"))  # as the agent restarts it
    assert "Resumed from checkpoint_0000002\n" in said
    said = finish(run_again(from_it[0], f"{from_it[1]}/"))  # as what starts the launch again does
    assert "Finished: checkpoint_0000003" in said and "Moved aside" not in said
    assert steps_of(tmp_path / "other") == undisturbed[1:]
    assert digests(tmp_path / "run") == before
    assert names(tmp_path / "other") == [
        ".lock",
        "checkpoints",
        "checkpoints.aside1",
        "config.yaml",
        "metrics.jsonl",
        "metrics.jsonl.aside1",
        "model",
        "model.aside1",
        "origins.json",
    ]


def test_a_named_checkpoint_that_is_none_is_refused(tmp_path, run_again):
    """Also with a name of its own, such as an unfinished save has one that begins with a dot."""
    mine = Path(
        shutil.copytree(tmp_path / "run/checkpoints/checkpoint_0000001", tmp_path / ".mine")
    )
    flip_a_byte(mine)
    before = digests(tmp_path / "run")
    for name, words in (
        ("run/checkpoints/checkpoint_0000009", "not a complete"),
        (".mine", "rank_00000"),
    ):
        done = run_again(f"run.resume={name}")
        assert done.returncode == 2 and words in done.stderr
    (mine / "COMPLETE").unlink()
    (mine / "manifest.json").unlink()
    done = run_again("run.resume=.mine")
    assert done.returncode == 2 and ".mine: not a complete checkpoint" in done.stderr
    assert digests(tmp_path / "run") == before


def run_with_small_files(arguments: list[str], bytes_per_file: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_per_file, resource.RLIM_INFINITY))
    run_script(arguments)


@pytest.mark.parametrize(("max_steps", "what"), [(4, ".* was not saved: "), (3, "")])
def test_a_full_disk_ends_the_run_which_goes_on_when_there_is_room(
    max_steps, what, tmp_path, run_again
):
    """The run goes on when there is room; at step 3, only the export is left."""
    run_dir = tmp_path / "run"
    shutil.rmtree(run_dir / "model")
    before = digests(run_dir / "checkpoints")
    arguments = ["--config", "config.yaml", *settings(f"train.max_steps={max_steps}")]
    full = on_ranks(1, run_with_small_files, arguments, 60_000, cwd=tmp_path)
    assert full.returncode == 1
    last = full.stderr.splitlines()[-1]
    assert re.match(rf"ERROR: {what}rank 0 on \S+: .*File too large.* - ", last)
    assert digests(run_dir / "checkpoints") == before
    assert {path.name for path in run_dir.iterdir()} == {
        ".lock",
        "checkpoints",
        "config.yaml",
        "metrics.jsonl",
        "origins.json",
    }

    finish(run_again(f"train.max_steps={max_steps}"))
    assert [entry["step"] for entry in read_metrics(run_dir, "step")] == list(
        range(1, max_steps + 1)
    )
    assert load_file(run_dir / "model/model.safetensors")


def test_an_interrupted_save_and_garbled_metrics_leave_nothing_behind(tmp_path, run_again):
    checkpoints, metrics = tmp_path / "run/checkpoints", tmp_path / "run/metrics.jsonl"
    for abandoned in (".checkpoint_0000009.writing", ".checkpoint_0000001.deleting"):
        (checkpoints / abandoned).mkdir()
        (checkpoints / abandoned / "rank_00000.safetensors").write_bytes(b"half")
    kept = metrics.read_bytes()
    garbage = b'\xff\xfe\n17\n{"kind": "step"}\n' + bytes(100) + b'\n{"kind": "st'
    metrics.write_bytes(kept + b'{"kind": "step", "step": 4, "loss": 1.0}\n' + garbage)
    assert run_again("train.max_steps=4").returncode == 0
    assert not list(checkpoints.glob(".*"))
    assert metrics.read_bytes().startswith(kept)
    steps = read_metrics(tmp_path / "run", "step")
    assert [entry["step"] for entry in steps] == [1, 2, 3, 4] and steps[-1]["loss"] != 1.0


def run_script_without_a_model(arguments: list[str]) -> None:
    def build_model(*_: object) -> None:
        raise AssertionError("the model was built")

    shardtune.model.build.build_model = build_model
    run_script(arguments)


def test_a_finished_run_writes_its_model_again(tmp_path, run_again):
    run_dir = tmp_path / "run"
    checkpoints, model = digests(run_dir / "checkpoints"), digests(run_dir / "model")
    metrics = (run_dir / "metrics.jsonl").read_bytes()
    durable_fs.delete(run_dir / "model")
    # The end of a deletion that was interrupted after the last save was committed.
    deleting = checkpoint(run_dir, 0).with_name(".checkpoint_0000000.deleting")
    deleting.mkdir()
    (deleting / "rank_00001.safetensors").write_bytes(b"half")

    def again(dtype: str) -> str:
        arguments = ["--config", "config.yaml", *settings(f"export.dtype={dtype}")]
        said = finish(on_ranks(2, run_script_without_a_model, arguments, cwd=tmp_path))
        assert "\nFinished: checkpoint_0000003 is the last of 3 steps." in said
        return said

    assert "Saved the final model in run/model\n" in again("source")
    assert digests(run_dir / "model") == model
    assert "Saved the final model" not in again("source")
    assert "Saved the final model in run/model\n" in again("float16")
    exported = json.loads((run_dir / "model/config.json").read_text(encoding="utf-8"))
    assert exported["dtype"] == "float16"
    assert digests(run_dir / "checkpoints") == checkpoints
    assert (run_dir / "metrics.jsonl").read_bytes() == metrics
    kept = [name for name in names(run_dir) if not name.startswith("model.aside")]
    assert kept == [".lock", "checkpoints", "config.yaml", "metrics.jsonl", "model", "origins.json"]
