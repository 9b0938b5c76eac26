"""A run that was killed, or that goes on with other ranks, is the run that nothing happened to."""

import json
import os
import random
import signal
from functools import partial
from typing import Any

import pytest
from helpers.chats import chats, write_jsonl
from helpers.commands import finish, read_metrics
from helpers.plain_training import assert_same_steps, assert_same_weights, on_uneven_chats
from helpers.ranks import run_script, train, train_until
from helpers.small_runs import (
    CONSTANT,
    SETTINGS,
    close_to,
    digests,
    steps_of,
    tensors_of,
    write_inputs,
)

from shardtune.__main__ import run as run_command
from shardtune.training import evaluate, pipeline


@pytest.mark.full
def test_a_run_that_is_killed_again_and_again_repeats_and_skips_no_row(tmp_path, models):
    """With dropout, accumulation and packing; half of the kills hit a save."""
    settings = (*SETTINGS, "train.gradient_accumulation_steps=2", "checkpoint.every_steps=2")
    settings += ("train.epochs=2", "data.eval=eval.jsonl", "eval.every_steps=3")
    write_inputs(tmp_path, models["glm"], dropout=0.2)
    write_jsonl(tmp_path / "eval.jsonl", chats(3, seed=1))
    assert train(3, *settings, "run.dir=whole", cwd=tmp_path).returncode == 0
    expected = steps_of(tmp_path / "whole")
    total = len(expected)

    source = random.Random(2)
    for step in sorted(source.sample(range(1, total), 3)):
        train_until(step, source.uniform(0, 0.03), 3, *settings, cwd=tmp_path)
    done = train(3, *settings, cwd=tmp_path)
    assert done.returncode == 0 and "Resumed from" in done.stdout, done.stderr
    assert "Baseline" not in done.stdout
    assert steps_of(tmp_path / "run") == expected
    assert read_metrics(tmp_path / "run", "eval") == read_metrics(tmp_path / "whole", "eval")
    assert len({step["loss"] for step in expected}) == total
    for folder in (f"checkpoints/checkpoint_{total:07d}", "model"):
        written = digests(tmp_path / "run" / folder, "*.safetensors")
        assert written and written == digests(tmp_path / "whole" / folder, "*.safetensors")


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        # Four ranks cannot each have some of six experts, so these are cut along another dimension.
        ("glm", (4, 2)),
        pytest.param("llama", (1, 2, 3, 1), marks=pytest.mark.full),
    ],
)
def test_a_checkpoint_resumes_on_other_numbers_of_ranks(
    name, sizes, tmp_path, models, capsys, monkeypatch, handlers
):
    """Two steps on each, mid-epoch, with the same twelve rows a step."""
    write_inputs(tmp_path, models[name])
    settings = (*SETTINGS, *CONSTANT)

    def go_on(ranks: int, last_step: int, run_dir: str) -> str:
        rows = (f"train.gradient_accumulation_steps={12 // ranks}", f"train.max_steps={last_step}")
        return finish(train(ranks, *settings, *rows, f"run.dir={run_dir}", cwd=tmp_path))

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
    monkeypatch.chdir(tmp_path)
    for step in steps_of(tmp_path / "run")[1:4:2]:  # the last one on the first ranks, and on others
        words = ["--config", "run/config.yaml", "--step", str(step["step"]), "--json"]
        capsys.readouterr()
        assert run_command(["inspect-data", *words]) == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert sum(len(row["input_ids"]) for row in rows) == step["tokens"]
        assert sum(sum(row["trained"]) for row in rows) == step["trained_tokens"]
        assert {row["data_rank"] for row in rows} == set(range(sizes[(step["step"] - 1) // 2]))
    one, other = (tensors_of(tmp_path / run / "model") for run in ("whole", "run"))
    assert one.keys() == other.keys()
    assert max((one[key] - other[key]).abs().max().item() for key in one) < 1e-4


def run_and_signal(nth: int, arguments: list[str]) -> None:
    """Send rank 1 SIGTERM in the third micro-batch of the nth evaluation."""
    assign_rows, summed_loss = evaluate.assign_rows, pipeline.summed_loss
    evaluations: list[None] = []
    batches: list[None] = []

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

    vars(evaluate)["assign_rows"], vars(pipeline)["summed_loss"] = begin, signal_in_third
    run_script(arguments)


@pytest.mark.full
def test_an_evaluation_that_a_signal_cuts_short_is_made_after_the_resume(tmp_path, models):
    """Amid the run and after its last step, before which the resumed run has nothing to do."""
    write_inputs(tmp_path, models["llama"], dropout=0.2)
    settings = (*SETTINGS, "data.eval=train.jsonl", "eval.every_steps=2", "train.max_steps=5")
    assert train(2, *settings, "run.dir=whole", cwd=tmp_path).returncode == 0
    for nth, step in ((3, 4), (2, 5)):  # the first after the baseline and that of step 2
        stopped = train(2, *settings, cwd=tmp_path, work=partial(run_and_signal, nth))
        assert stopped.returncode == 75, stopped.stderr
        assert f"Saved checkpoint_{step:07d}" in stopped.stdout
        assert f" | Step: {step}\n" not in stopped.stdout
    for _ in range(2):
        said = finish(train(2, *settings, cwd=tmp_path))
    assert "Nothing is left to train" in said and "Perplexity" not in said
    assert read_metrics(tmp_path / "run", "eval") == read_metrics(tmp_path / "whole", "eval")
    assert steps_of(tmp_path / "run") == steps_of(tmp_path / "whole")
    assert (tmp_path / "run/model/model.safetensors").is_file()


@pytest.mark.full
def test_a_resume_with_other_micro_batches_sees_the_same_records(tmp_path, models):
    write_inputs(tmp_path, models["qwen3"])
    for run_dir, shapes in (("whole", [(9, 1, 4)]), ("run", [(3, 1, 4), (6, 4, 1), (9, 2, 2)])):
        for last, rows, accumulation in shapes:
            given = [*SETTINGS, *CONSTANT, f"train.max_steps={last}", f"run.dir={run_dir}"]
            given += [f"train.micro_batch_size={rows}", "export.final=false"]
            given += [f"train.gradient_accumulation_steps={accumulation}"]
            said = finish(train(2, *given, cwd=tmp_path))
    assert "Resumed from checkpoint_0000006" in said
    assert "train.micro_batch_size was 4, is 2" in said
    assert steps_of(tmp_path / "run") == close_to(steps_of(tmp_path / "whole"))


def test_saving_does_not_change_training(tmp_path, models):
    """With dropout, to the last bit."""
    write_inputs(tmp_path, models["glm"], dropout=0.2)
    settings = (*SETTINGS, "train.gradient_accumulation_steps=2", "train.epochs=2")
    for run, every_steps in (("without", 0), ("async", 1), ("sync", 1)):
        saves = [f"checkpoint.every_steps={every_steps}", f"run.dir={run}"]
        saves += [f"checkpoint.mode={run}"] if every_steps else []
        said = finish(train(2, *settings, *saves, cwd=tmp_path))
        steps = steps_of(tmp_path / run)
        assert said.count("Saved checkpoint_") == (len(steps) if every_steps else 1)
        assert steps == steps_of(tmp_path / "without")


def test_a_resume_with_another_learning_rate_keeps_weights_and_moments(sharp, plain, tmp_path):
    """Two steps at 3e-3; then the line from 2e-3 to its half over five steps, at steps 3 to 5."""
    rows = "train.gradient_accumulation_steps=4"
    given = on_uneven_chats(sharp["llama"], tmp_path, rows, "train.epochs=2")
    finish(train(2, *given, cwd=tmp_path))
    new = ("optimizer.lr=2e-3", "scheduler.name=linear", "scheduler.min_lr_ratio=0.5")
    given = on_uneven_chats(sharp["llama"], tmp_path, rows, *new, "train.epochs=5")
    said = finish(train(2, *given, cwd=tmp_path))
    for change in ("optimizer.lr was 0.003, is 0.002", 'name was "constant", is "linear"'):
        assert f"{change}\n" in said
    rates = (3e-3, 3e-3, 1.4e-3, 1.2e-3, 1e-3)
    steps = read_metrics(tmp_path / "run", "step")
    assert [step["lr"] for step in steps] == pytest.approx(rates)
    assert_same_steps(tmp_path / "run", plain("llama", rates))
    assert_same_weights(tmp_path / "run", plain("llama", rates))
