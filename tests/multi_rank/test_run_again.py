"""The same command again, on what a run has left: from which checkpoint it goes on, what may have
changed, and what it leaves untouched."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from helpers.chats import chats, write_jsonl
from helpers.commands import finish, read_metrics
from helpers.ranks import run_script, train
from helpers.small_runs import (
    CONSTANT,
    SETTINGS,
    checkpoint,
    digests,
    flip_bit,
    names,
    steps_of,
    write_inputs,
)

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
RUN_FILES = [".lock", "checkpoints", "config.yaml", "metrics.jsonl", "model", "origins.json"]
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


def assignments(changes: dict[str, tuple[str, str]]) -> list[str]:
    return [f"{key}={new}" for key, (_, new) in changes.items()]


def test_a_resume_says_each_changed_key(tmp_path, run_again):
    said = finish(run_again(*assignments(MAY_CHANGE), ranks=2))
    changes = re.findall("^Changed since checkpoint_0000003: (.*)$", said, re.MULTILINE)
    expected = [f"{key} was {old}, is {new}" for key, (old, new) in MAY_CHANGE.items()]
    assert sorted(changes) == sorted([*expected, "world size was 1, is 2"])
    assert names(tmp_path / "run/checkpoints") == ["checkpoint_0000004"]


@pytest.fixture
def refusal(tmp_path: Path, run_again: RunAgain) -> RunAgain:
    """Continue it, and expect that it is refused and left as it is."""

    def refused(*changes: str) -> subprocess.CompletedProcess[str]:
        before = digests(tmp_path / "run")
        done = run_again(*changes)
        assert done.returncode == 2 and digests(tmp_path / "run") == before
        return done

    return refused


def test_a_forbidden_change_is_refused_with_both_values_and_both_remedies(tmp_path, refusal):
    """Before any shard is read: the newest checkpoint would be damaged."""
    flip_bit(checkpoint(tmp_path / "run", 3) / "rank_00000.safetensors")
    done = refusal(*assignments(MAY_NOT_CHANGE))
    assert "Checking every byte" not in done.stdout
    for key, (old, new) in MAY_NOT_CHANGE.items():
        what = re.escape(f"{key} is {new} and was {old} in checkpoint_0000003")
        assert re.search(
            f"^ERROR: {what} - .*run.resume=never.* run.dir$", done.stderr, re.MULTILINE
        )
    assert done.stderr.count("ERROR: ") == len(MAY_NOT_CHANGE)


def test_other_data_is_refused(tmp_path, refusal):
    write_jsonl(tmp_path / "train.jsonl", chats(36))
    digest = r"ERROR: the digest of the data is .* and was .* in checkpoint_0000003 - "
    assert re.search(digest, refusal("train.max_steps=5").stderr)


def test_another_model_is_refused_with_both_values(tmp_path, refusal):
    file = tmp_path / "model/config.json"
    old = json.loads(file.read_text(encoding="utf-8"))
    new = {"max_position_embeddings": 4096, "rms_norm_eps": 0.5}
    file.write_text(json.dumps(old | new), encoding="utf-8")
    said = refusal("train.max_steps=4").stderr
    assert said.count("ERROR: ") == 2
    for key, value in new.items():
        what = f"{key} of the model's config.json is {value} and was {json.dumps(old[key])} "
        assert f"ERROR: {what}in checkpoint_0000003 - " in said


def test_starting_anew_sets_the_earlier_run_aside(tmp_path, run_again, refusal):
    """All of it, with a save that was prepared and has no name yet."""
    newest = tmp_path / "run/checkpoints/checkpoint_0000003"
    prepared = newest.rename(newest.with_name(".checkpoint_0000003.0123456789ab"))
    before = digests(tmp_path / "run")
    refusal("run.resume=never", "train.max_steps=1", "data.train=missing.jsonl")
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
    assert names(tmp_path / "run/checkpoints") == ["checkpoint_0000001"]


def run_with(environ: dict[str, str], arguments: list[str]) -> None:
    os.environ |= environ
    run_script(arguments)


@pytest.mark.usefixtures("run_again")
def test_what_restarts_by_itself_goes_on_or_says_that_it_begins_anew(tmp_path):
    def start(environ: dict[str, str]) -> str:
        given, work = settings("run.resume=never", "train.max_steps=5"), partial(run_with, environ)
        return finish(train(1, *given, cwd=tmp_path, work=work))

    said = start({"SLURM_RESTART_COUNT": "1"})
    assert "Resumed from checkpoint_0000003" in said and "Moved aside" not in said
    # Of a job that had not yet begun.
    said = start({"SLURM_RESTART_COUNT": "1", "SLURM_JOB_ID": "8"})
    assert "Resumed" not in said and "Moved aside" in said
    said = start({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "TORCHELASTIC_MAX_RESTARTS": "0"})
    assert "WARNING: run.resume=never: KUBERNETES_SERVICE_HOST is set" in said
    assert "Resumed" not in said and "TORCHELASTIC" not in said


def test_a_resume_from_a_named_checkpoint_sets_later_ones_aside(tmp_path, run_again):
    run_dir = tmp_path / "run"
    undisturbed = steps_of(run_dir)
    said = finish(run_again("run.resume=run/checkpoints/checkpoint_0000001", "train.max_steps=3"))
    assert "Resumed from checkpoint_0000001\n" in said
    aside = [f"checkpoint_000000{step}{end}" for step in (2, 3) for end in ("", ".aside1")]
    assert names(run_dir / "checkpoints") == ["checkpoint_0000001", *aside]
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
    aside = [f"{name}.aside1" for name in ("checkpoints", "metrics.jsonl", "model")]
    assert names(tmp_path / "other") == sorted([*RUN_FILES, *aside])


def test_a_named_checkpoint_that_is_none_is_refused(tmp_path, refusal):
    """Also with a name of its own, such as an unfinished save has one that begins with a dot."""
    mine = Path(shutil.copytree(checkpoint(tmp_path / "run", 1), tmp_path / ".mine"))
    flip_bit(mine / "rank_00000.safetensors")
    assert "not a complete" in refusal("run.resume=run/checkpoints/checkpoint_0000009").stderr
    assert "rank_00000" in refusal("run.resume=.mine").stderr
    (mine / "COMPLETE").unlink()
    (mine / "manifest.json").unlink()
    assert ".mine: not a complete checkpoint" in refusal("run.resume=.mine").stderr


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
        given = settings(f"export.dtype={dtype}")
        said = finish(train(2, *given, cwd=tmp_path, work=run_script_without_a_model))
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
    assert [name for name in names(run_dir) if "aside" not in name] == RUN_FILES
