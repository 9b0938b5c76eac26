"""A run that was killed, or that goes on with other ranks, is the run that nothing happened to."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from conftest import read_metrics
from helpers.ranks import on_ranks, run_script, train, train_until
from helpers.small_runs import (
    CONSTANT,
    SETTINGS,
    checkpoint,
    close_to,
    digests,
    names,
    steps_of,
    write_inputs,
)
from safetensors.torch import load_file

import shardtune.model.build
import shardtune.training.evaluate
from shardtune.checkpoint import durable_fs as disk


@pytest.mark.parametrize(
    ("name", "ranks", "seed"),
    [
        ("glm", 2, 2),
        pytest.param("llama", 2, 1, marks=pytest.mark.full),
        pytest.param("qwen3", 2, 3, marks=pytest.mark.full),
        *(
            pytest.param(name, ranks, seed, marks=pytest.mark.full)
            for name in ("llama", "qwen3", "glm")
            for ranks in (1, 2, 3)
            for seed in (4, 5)
        ),
    ],
)
def test_a_run_that_is_killed_again_and_again(
    name: str, ranks: int, seed: int, tmp_path: Path, models: dict[str, Path]
) -> None:
    """With dropout, accumulation and packing, and a save under way when it is killed, as often as not."""
    settings = (*SETTINGS, "train.gradient_accumulation_steps=2", "checkpoint.every_steps=2")
    write_inputs(tmp_path, models[name], dropout=0.2)
    assert train(ranks, *settings, "run.dir=whole", cwd=tmp_path).returncode == 0
    expected = steps_of(tmp_path / "whole")
    total = len(expected)

    source = random.Random(seed)
    for step in sorted(source.sample(range(1, total), 3)):
        train_until(step, source.uniform(0, 0.03), ranks, *settings, cwd=tmp_path)
    done = train(ranks, *settings, cwd=tmp_path)
    assert done.returncode == 0 and "Resumed from" in done.stdout, done.stderr
    assert steps_of(tmp_path / "run") == expected
    assert len({step["loss"] for step in expected}) == total
    for folder in (f"checkpoints/checkpoint_{total:07d}", "model"):
        written = digests(tmp_path / "run" / folder, "*.safetensors")
        assert written and written == digests(tmp_path / "whole" / folder, "*.safetensors")


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("llama", (1, 2, 3, 1)),
        (
            "glm",
            (4, 2),
        ),  # of six experts four ranks cannot each have some, so they are cut elsewhere; one has no router
        *(
            pytest.param(name, sizes, marks=pytest.mark.full)
            for name, sizes in (
                ("qwen3", (1, 2, 3, 1)),
                ("glm", (1, 2, 3, 1)),
                ("llama", (4, 2)),
                ("qwen3", (6, 2, 4)),  # a norm of eight numbers leaves two of six ranks without any
                ("glm", (2, 4, 3)),
            )
        ),
    ],
)
def test_other_numbers_of_ranks(
    name: str, sizes: tuple[int, ...], tmp_path: Path, models: dict[str, Path]
) -> None:
    """Two steps on each, mid-epoch, with the same twelve rows a step."""
    write_inputs(tmp_path, models[name])
    settings = (*SETTINGS, *CONSTANT)

    def go_on(ranks: int, last_step: int, run_dir: str) -> str:
        rows = (f"train.gradient_accumulation_steps={12 // ranks}", f"train.max_steps={last_step}")
        done = train(ranks, *settings, *rows, f"run.dir={run_dir}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    go_on(1, 2 * len(sizes), "whole")
    for number, ranks in enumerate(sizes):
        said = go_on(ranks, 2 * number + 2, "run")
        if number:
            assert f"Resumed from checkpoint_{2 * number:07d}\n" in said
            before = sizes[number - 1]
            assert f"checkpoint_{2 * number:07d}: world size was {before}, is {ranks}" in said
            assert f"accumulation_steps was {12 // before}, is {12 // ranks}" in said
    assert steps_of(tmp_path / "run") == close_to(steps_of(tmp_path / "whole"))
    assert any(step["tokens"] % 12 for step in steps_of(tmp_path / "whole"))
    one, other = (load_file(tmp_path / run / "model/model.safetensors") for run in ("whole", "run"))
    assert one.keys() == other.keys()
    assert max((one[key] - other[key]).abs().max().item() for key in one) < 1e-4


def run_and_signal(nth: int, arguments: list[str]) -> None:
    """Rank 1 gets SIGTERM in the third micro-batch of the nth evaluation; the ranks ask one another after each."""
    evaluate: Any = shardtune.training.evaluate
    evaluate._ASK_TO_STOP_EVERY_S = 0
    assign_rows, summed_loss, evaluations, batches = (
        evaluate.assign_rows,
        evaluate.summed_loss,
        [],
        [],
    )

    def begin(*arguments: Any) -> Any:
        evaluations.append(None)
        batches.clear()
        return assign_rows(*arguments)

    def signal_in_third(*arguments: Any) -> Any:
        batches.append(None)
        if len(evaluations) == nth and len(batches) == 3 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        assert len(evaluations) < nth or len(batches) <= 3
        return summed_loss(*arguments)

    evaluate.assign_rows, evaluate.summed_loss = begin, signal_in_third
    run_script(["--config", "config.yaml", *arguments])


def test_an_evaluation_that_a_signal_cuts_short_is_made_after_the_resume(
    tmp_path: Path, models: dict[str, Path]
) -> None:
    """Amid the run and after its last step, before which the resumed run has nothing to do."""
    write_inputs(tmp_path, models["llama"], dropout=0.2)
    settings = (*SETTINGS, "data.eval=train.jsonl", "eval.every_steps=2", "train.max_steps=5")
    assert train(2, *settings, "run.dir=whole", cwd=tmp_path).returncode == 0
    for nth, step in (
        (3, 4),
        (2, 5),
    ):  # after the baseline and that of step 2; after that of step 4
        stopped = on_ranks(2, run_and_signal, nth, settings, cwd=tmp_path)
        assert stopped.returncode == 75, stopped.stderr
        assert (
            f"Saved checkpoint_{step:07d}" in stopped.stdout
            and f" | Step: {step}\n" not in stopped.stdout
        )
    for _ in range(2):
        done = train(2, *settings, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert "Nothing is left to do" in done.stdout and "Perplexity" not in done.stdout
    for kind, values in (
        ("eval", ("step", "loss", "tokens")),
        ("step", ("step", "loss", "grad_norm")),
    ):
        whole, run = (
            [[entry[value] for value in values] for entry in read_metrics(tmp_path / name, kind)]
            for name in ("whole", "run")
        )
        assert run == whole
    assert (tmp_path / "run/model/model.safetensors").is_file()


def test_other_micro_batches_see_the_same_records(tmp_path: Path, models: dict[str, Path]) -> None:
    write_inputs(tmp_path, models["qwen3"])
    for run_dir, shapes in (("whole", [(9, 1, 4)]), ("run", [(3, 1, 4), (6, 4, 1), (9, 2, 2)])):
        for last, rows, accumulation in shapes:
            shape = (
                f"train.micro_batch_size={rows}",
                f"train.gradient_accumulation_steps={accumulation}",
            )
            steps = (*SETTINGS, *CONSTANT, f"train.max_steps={last}", f"run.dir={run_dir}")
            done = train(2, *steps, *shape, "export.final=false", cwd=tmp_path)
            assert done.returncode == 0, done.stderr
    assert (
        "train.micro_batch_size was 4, is 2" in done.stdout
        and "Resumed from checkpoint_0000006" in done.stdout
    )
    assert steps_of(tmp_path / "run") == close_to(steps_of(tmp_path / "whole"))


@pytest.mark.parametrize("name", ["llama", pytest.param("glm", marks=pytest.mark.full)])
def test_saving_does_not_change_training(
    name: str, tmp_path: Path, models: dict[str, Path]
) -> None:
    """With dropout, to the last bit."""
    write_inputs(tmp_path, models[name], dropout=0.2)
    settings = (*SETTINGS, "train.gradient_accumulation_steps=2", "train.epochs=2")
    for run_dir, every_steps, mode in (
        ("without", 0, "sync"),
        ("async", 1, "async"),
        ("sync", 1, "sync"),
    ):
        saves = (
            f"checkpoint.every_steps={every_steps}",
            f"checkpoint.mode={mode}",
            f"run.dir={run_dir}",
        )
        done = train(2, *settings, *saves, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("Saved checkpoint_") == (
            len(steps_of(tmp_path / run_dir)) if every_steps else 1
        )
    assert (
        steps_of(tmp_path / "async")
        == steps_of(tmp_path / "sync")
        == steps_of(tmp_path / "without")
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Path:
    """A folder with a run of two ranks and two steps that is at its end."""
    folder = write_inputs(tmp_path_factory.mktemp("finished"), models["glm"])
    assert train(2, *SETTINGS, *CONSTANT, "train.max_steps=2", cwd=folder).returncode == 0
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return tmp_path


MAY_CHANGE = {
    "run.ignore_plan": ("false", "true"),
    "train.epochs": ("9", "8"),
    "train.max_steps": ("2", "3"),
    "train.micro_batch_size": ("1", "2"),
    "train.gradient_accumulation_steps": ("1", "3"),
    "eval.baseline": ("true", "false"),
    "eval.every_steps": ("0", "7"),
    "checkpoint.every_steps": ("500", "1"),
    "checkpoint.keep": ("2", "1"),
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
    "data.eval": ("null", '"train.jsonl"'),
    "data.eval_fraction": ("0.0", "0.5"),
    "data.max_length": ("128", "64"),
    "data.overflow": ('"truncate"', '"split"'),
    "data.loss_on": ('"assistant"', '"all"'),
    "data.packing": ("true", "false"),
    "optimizer.betas": ("[0.9, 0.95]", "[0.9, 0.99]"),
    "optimizer.eps": ("1e-08", "1e-07"),
    "optimizer.weight_decay": ("0.0", "0.1"),
    "lora.alpha": ("null", "8.0"),
}


def assigned(changes: dict[str, tuple[str, str]]) -> list[str]:
    """The settings of the finished run, with these changes."""
    before = dict(setting.split("=", 1) for setting in (*SETTINGS, *CONSTANT, "train.max_steps=2"))
    return [
        f"{key}={value}"
        for key, value in (before | {key: new for key, (_, new) in changes.items()}).items()
    ]


def test_what_may_change_is_said(folder: Path) -> None:
    done = train(1, *assigned(MAY_CHANGE), cwd=folder)
    assert done.returncode == 0, done.stderr
    said = [
        line
        for line in done.stdout.splitlines()
        if line.startswith("Changed since checkpoint_0000002: ")
    ]
    assert sorted(line.split(": ", 1)[1] for line in said) == sorted(
        [f"{key} was {old}, is {new}" for key, (old, new) in MAY_CHANGE.items()]
        + ["world size was 2, is 1"]
    )
    assert names(folder / "run/checkpoints") == ["checkpoint_0000003"]


def test_what_may_not_change_is_refused_with_both_values(folder: Path) -> None:
    before = digests(folder / "run")
    done = train(2, *assigned(MAY_NOT_CHANGE), cwd=folder)
    assert done.returncode == 2 and digests(folder / "run") == before
    for key, (old, new) in MAY_NOT_CHANGE.items():
        assert f"ERROR: {key} is {new} and was {old} in checkpoint_0000002 - " in done.stderr
    assert done.stderr.count("ERROR: ") == len(MAY_NOT_CHANGE)


def test_another_model_is_refused_with_both_values(folder: Path) -> None:
    before = digests(folder / "run")
    file = folder / "model/config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(
        json.dumps(settings | {"rms_norm_eps": 0.5, "max_position_embeddings": 4096}),
        encoding="utf-8",
    )
    done = train(2, *SETTINGS, *CONSTANT, "train.max_steps=4", cwd=folder)
    assert done.returncode == 2 and digests(folder / "run") == before
    for key, new in (("max_position_embeddings", 4096), ("rms_norm_eps", 0.5)):
        old = json.dumps(settings[key])
        assert (
            f"ERROR: {key} of the model's config.json is {new} and was {old} in checkpoint_0000002 - "
            in done.stderr
        )
    assert done.stderr.count("ERROR: ") == 2


def test_what_garbles_the_metrics_does_not_stop_a_resume(folder: Path) -> None:
    metrics = folder / "run/metrics.jsonl"
    kept = metrics.read_bytes()
    metrics.write_bytes(kept + b'\xff\xfe\n17\n{"kind": "step"}\n' + bytes(100) + b'\n{"kind": "st')
    done = train(2, *SETTINGS, *CONSTANT, "train.max_steps=3", cwd=folder)
    assert done.returncode == 0 and "Resumed from checkpoint_0000002\n" in done.stdout, done.stderr
    assert metrics.read_bytes().startswith(kept)
    assert [step["step"] for step in steps_of(folder / "run")] == [1, 2, 3]


def run_script_without_a_model(arguments: list[str]) -> None:
    def build_model(*_: object) -> None:
        raise AssertionError("the model was built")

    shardtune.model.build.build_model = build_model
    run_script(arguments)


@pytest.mark.parametrize(
    ("ranks", "lost"),
    [(2, "."), (1, "model.safetensors"), pytest.param(3, "config.json", marks=pytest.mark.full)],
)
def test_a_finished_run_writes_its_model_again(ranks: int, lost: str, folder: Path) -> None:
    run_dir = folder / "run"
    checkpoints, model = digests(run_dir / "checkpoints"), digests(run_dir / "model")
    metrics = (run_dir / "metrics.jsonl").read_bytes()
    disk.delete(run_dir / "model" / lost)

    def again(dtype: str) -> str:
        arguments = [
            "--config",
            "config.yaml",
            *SETTINGS,
            *CONSTANT,
            "train.max_steps=2",
            f"export.dtype={dtype}",
        ]
        done = on_ranks(ranks, run_script_without_a_model, arguments, cwd=folder)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1].startswith(
            "Finished: checkpoint_0000002 is the last of 2 steps."
        )
        return done.stdout

    assert "Saved the final model in run/model\n" in again("source")
    assert digests(run_dir / "model") == model
    assert "Saved the final model" not in again("source")
    assert "Saved the final model in run/model\n" in again("float16")
    assert (
        json.loads((run_dir / "model/config.json").read_text(encoding="utf-8"))["dtype"]
        == "float16"
    )
    assert (
        digests(run_dir / "checkpoints") == checkpoints
        and (run_dir / "metrics.jsonl").read_bytes() == metrics
    )
    kept = [name for name in names(run_dir) if not name.startswith("model.aside")]
    assert kept == [".lock", "checkpoints", "config.yaml", "metrics.jsonl", "model"]


def test_what_a_killed_run_left_is_collected_though_it_was_finished(folder: Path) -> None:
    """The last save had been committed, and the deletion of an older checkpoint was interrupted."""
    deleting = checkpoint(folder / "run", 1).with_name(".checkpoint_0000001.deleting")
    deleting.mkdir()
    (deleting / "rank_00001.safetensors").write_bytes(b"half")
    done = train(2, *SETTINGS, *CONSTANT, "train.max_steps=2", cwd=folder)
    assert done.returncode == 0 and "Finished: " in done.stdout
    assert names(folder / "run/checkpoints") == ["checkpoint_0000002"]
