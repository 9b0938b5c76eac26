"""Runs on several sources and named evaluation sets, from the command line."""

import math
import re
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from helpers.chats import chats, write_jsonl
from helpers.commands import finish, read_metrics
from helpers.plain_training import encode, plain_perplexity, sharpen, with_weights
from helpers.ranks import train, train_until
from helpers.small_runs import assert_same_tensors, steps_of

# Words of each record; no two records have as many tokens.
SOURCES = {"few": range(3, 10), "many": range(20, 25), "none": range(30, 32)}
WEIGHTS = {"few": "0.5", "many": "1.2", "none": "0"}
# floor(e w n) for e = 0..3 and n = 7, 5, 2, by hand. The binary number nearest to 1.2 is less.
USED_AFTER = {"few": (0, 3, 7, 10), "many": (0, 6, 12, 18), "none": (0, 0, 0, 0)}


@pytest.fixture
def settings(tmp_path: Path, models: dict[str, Path]) -> list[str]:
    for name, lengths in SOURCES.items():
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": " rank" * n} for n in lengths])
    for name, seed in (("new", 1), ("old", 2)):
        write_jsonl(tmp_path / f"{name}.jsonl", chats(3, seed=seed))
    sources = ", ".join(
        f"{{path: {name}.jsonl, weight: {weight}}}" for name, weight in WEIGHTS.items()
    )
    return [
        f"model.path={with_weights(models['llama'], tmp_path / 'sharp', sharpen)}",
        "model.compute_dtype=float32",
        f"data.train=[{sources}]",
        "data.eval={new: new.jsonl, old: old.jsonl}",
        "data.max_length=256",
        "data.overflow=error",
        "data.packing=false",
        "train.epochs=3",
        "eval.every_steps=3",
        "run.dir=run",
        "checkpoint.every_steps=2",
        "export.final=false",
        "optimizer.lr=1e-3",
    ]


def run(ranks: int, settings: list[str], *more: str, cwd: Path) -> str:
    return finish(train(ranks, *settings, *more, cwd=cwd))


@pytest.mark.full
def test_weights_are_exact_on_any_ranks_and_over_a_kill(settings, tokenizer, tmp_path):
    said = run(
        1, settings, "run.dir=one", "checkpoint.every_steps=0", "data.eval=null", cwd=tmp_path
    )
    record_of = {  # by its tokens, the appended end token among them
        len(tokenizer(" rank" * n)["input_ids"]) + 1: (name, n)
        for name, lengths in SOURCES.items()
        for n in lengths
    }
    steps = steps_of(tmp_path / "one")  # of one row each
    uses: Counter[tuple[str, int]] = Counter()
    for epoch in range(3):
        taken = [record_of[step["tokens"]] for step in steps if step["epoch"] == epoch]
        uses.update(taken)
        for name, lengths in SOURCES.items():
            before, after = USED_AFTER[name][epoch : epoch + 2]
            assert sum(source == name for source, _ in taken) == after - before
            counts = [uses[name, n] for n in lengths]
            assert max(counts) - min(counts) <= 1
    trained = sum(step["trained_tokens"] for step in steps if step["epoch"] == 0)
    plan = f"Steps per epoch: 9 | Total steps: 28 | Records: 9 | Trained tokens: {trained}"
    assert plan in said.splitlines() and "Rows per epoch: 9 of up to 256 tokens" in said
    counts = r"^Source (\w+): .* Records per epoch: (\d+) .* Trained tokens per epoch: (\d+) "
    first = [step for step in steps if step["epoch"] == 0]
    of_source = dict.fromkeys(SOURCES, 0)
    for step in first:
        of_source[record_of[step["tokens"]][0]] += step["trained_tokens"]
    assert re.findall(counts, said, re.MULTILINE) == [
        (name, f"{USED_AFTER[name][1]}", f"{of_source[name]}") for name in SOURCES
    ]

    # The line about packing counts the records of the epoch, too.
    packed = run(1, settings, "run.dir=packed", "data.packing=true", "train.epochs=1", cwd=tmp_path)
    n_steps = len(steps_of(tmp_path / "packed"))
    assert f"Rows per epoch: {n_steps} of" in packed
    assert f" | Packing: rows hold {9 / n_steps:.1f} records, " in packed
    assert f": {n_steps} steps an epoch instead of 9" in packed

    run(4, settings, "run.dir=four", cwd=tmp_path)
    together = steps_of(tmp_path / "four")
    for epoch in range(3):
        one_by_one = iter([step["tokens"] for step in steps if step["epoch"] == epoch])
        sums = [step["tokens"] for step in together if step["epoch"] == epoch]
        assert sums == [sum(islice(one_by_one, 4)) for _ in sums] and not list(one_by_one)
    train_until(5, 0.01, 4, *settings, cwd=tmp_path)  # amid the second epoch
    assert "Resumed from checkpoint_" in run(4, settings, cwd=tmp_path)
    assert steps_of(tmp_path / "run") == together
    assert read_metrics(tmp_path / "run", "eval") == read_metrics(tmp_path / "four", "eval")
    last = f"checkpoints/checkpoint_{len(together):07d}"
    assert_same_tensors(tmp_path / "run" / last, tmp_path / "four" / last)


def test_each_evaluation_set_has_a_perplexity(settings, tokenizer, tmp_path):
    said = run(2, settings, "train.max_steps=2", cwd=tmp_path)
    sets = {
        name: [encode(tokenizer, record) for record in chats(3, seed=seed)]
        for name, seed in (("new", 1), ("old", 2))
    }
    entries = read_metrics(tmp_path / "run", "eval")
    assert [(entry["step"], entry.get("set")) for entry in entries] == [
        (step, name) for step in (0, 2) for name in (None, "new", "old")
    ]
    expected = {None: sets["new"] + sets["old"]} | sets
    for entry in entries[:3]:
        records = expected[entry.get("set")]
        perplexity = plain_perplexity(tmp_path / "sharp", records)
        assert entry["perplexity"] == pytest.approx(perplexity, rel=1e-6)
        assert entry["loss"] == pytest.approx(math.log(perplexity), rel=1e-6)
        assert entry["tokens"] == sum(sum(trained) for _, trained in records)
    lines = [line for line in said.splitlines() if "Perplexity" in line]
    for line, entry in zip(lines, entries, strict=True):
        what = {None: "Eval Perplexity" if entry["step"] else "Baseline Perplexity"}
        at_step = f" | Step: {entry['step']}" if entry["step"] else ""
        assert line == (
            f"{what.get(entry.get('set'), 'Perplexity of ' + str(entry.get('set')))}: "
            f"{entry['perplexity']:.4f} | Loss: {entry['loss']:.4f} | Tokens: {entry['tokens']}"
            f"{at_step}"
        )
    assert len(re.findall("baseline perplexity", said, re.IGNORECASE)) == 1
    assert len(re.findall("Step.*Loss", said)) == 2


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        (
            ["data.eval={none: none.jsonl, lost: lost.jsonl}", "data.train=[{path: gone.jsonl}]"],
            ["data.train.gone=gone.jsonl: no such file", "data.eval.lost=lost.jsonl: no such file"],
        ),
        (
            ["data.eval={new: new.jsonl, silent: silent.jsonl}"],
            ["data.eval.silent: no token to train in 1 record"],
        ),
        (
            ["data.train=[{path: few.jsonl, weight: 0.1}]", "train.epochs=1"],
            ["an epoch has 0 rows and the run 1 data rank - add data or weight"],
        ),
    ],
)
def test_sources_that_give_nothing_are_refused(changes, problems, settings, tmp_path):
    write_jsonl(tmp_path / "silent.jsonl", [{"messages": [{"role": "user", "content": "rank"}]}])
    done = train(1, *settings, *changes, cwd=tmp_path)
    lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
    assert done.returncode == 2 and len(lines) == len(problems), done.stderr
    for line, problem in zip(lines, problems, strict=True):
        assert line.startswith(f"ERROR: {problem}") and " - " in line
