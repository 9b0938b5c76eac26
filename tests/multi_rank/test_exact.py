"""Real runs have the numbers of plain PyTorch in one process, which shares no code with the
product."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.chats import chats, write_jsonl
from helpers.commands import finish, read_metrics
from helpers.exact import APART, RATE, STEPS, TWO_ROWS, Mesh
from helpers.plain_training import (
    MAX_LENGTH,
    ROWS_PACKED,
    Encoded,
    assert_same_steps,
    assert_same_weights,
    encode,
    on_uneven_chats,
    plain_perplexity,
    plain_training,
    step_losses,
    summed_nll,
    uneven_chats,
    with_weights,
)
from helpers.ranks import train
from helpers.small_runs import checkpoint
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from shardtune.data.order import lay_out_rows
from shardtune.data.schedule import Cost, assign_rows
from shardtune.report.read_run import read_run
from shardtune.report.summary import figures

FULL = pytest.mark.full


def mean_of_means_errors(
    records: list[Encoded], sums: list[float], ranks: int, packed: bool
) -> list[float]:
    """How wrong the first step's loss would be as a mean over micro-batches, and as a mean over
    ranks."""
    counts = [sum(trained[1:]) for _, trained in records]
    lengths = torch.tensor([len(ids) for ids, _ in records]).numpy()
    trained_counts = torch.tensor(counts).numpy()
    rows = lay_out_rows(lengths, MAX_LENGTH, packed, 1234, 0)
    cost = Cost(per_token=6 * 16, per_trained_token=1, per_pair=1)
    costs = cost.per_row(rows, lengths[rows.members], trained_counts[rows.members])
    assigned = [assign_rows(rows, costs, rank, ranks, 1 if packed else 2) for rank in range(ranks)]

    def mean(group: list[int]) -> float:
        return sum(sums[i] for i in group) / sum(counts[i] for i in group)

    exact = mean(list(range(len(records))))
    by_micro_batch = [mean(group) for groups in assigned for group in groups]
    by_rank = [mean([i for group in groups for i in group]) for groups in assigned]
    return [abs(sum(means) / len(means) / exact - 1) for means in (by_micro_batch, by_rank)]


@pytest.mark.parametrize(
    ("family", "mesh", "more"),
    [
        ("llama", Mesh(1), []),
        ("qwen3", Mesh(2), [APART, TWO_ROWS]),
        ("glm", Mesh(4), []),
        pytest.param("llama", Mesh(8), [APART, TWO_ROWS], marks=FULL),
        pytest.param("qwen3", Mesh(8), [], marks=FULL),
        pytest.param("glm", Mesh(1), [APART, TWO_ROWS], marks=FULL),
    ],
)
def test_losses_norms_and_weights_equal_plain_pytorch(family, mesh, more, check_exact):
    (said,) = check_exact(family, [mesh], more)
    assert f"Rows per epoch: {ROWS_PACKED * (1 + bool(more))} of" in said
    assert f"Steps per epoch: 1 | Total steps: {STEPS}" in said


@pytest.mark.parametrize(
    ("family", "mesh", "more"),
    [
        ("qwen3", Mesh(2), []),
        pytest.param("glm", Mesh(1), [APART, TWO_ROWS], marks=FULL),
        pytest.param("llama", Mesh(4, stages=2, context=2), [], marks=FULL),
        pytest.param("tied_llama", Mesh(2, tensor=2), [], marks=FULL),
    ],
)
def test_turns_that_count_a_fraction_equal_plain_pytorch(
    family, mesh, more, sharp, tokenizer, tmp_path
):
    """Sums of weighted losses over sums of weights, in steps and in the evaluation."""
    records = uneven_chats()
    for record, weight in zip(records, [0.5, 1, 0.25, 0.75, 0.1, 0.0, 0.5, 0.9] * 2, strict=True):
        record["messages"][1]["weight"] = weight
    given = on_uneven_chats(sharp[family], tmp_path, *mesh.assignments(*more), records=records)
    given += [f"train.epochs={STEPS}", f"data.eval={tmp_path / 'train.jsonl'}"]
    said = finish(train(mesh.ranks, *given, cwd=tmp_path))
    encoded = [encode(tokenizer, record) for record in records]
    expected = plain_training(sharp[family], encoded, (RATE,) * STEPS)
    assert_same_steps(tmp_path / "run", expected)
    assert_same_weights(tmp_path / "run", expected)
    baseline = read_metrics(tmp_path / "run", "eval")[0]
    assert baseline["loss"] == pytest.approx(expected.losses[0], rel=1e-5)
    counts = Counter(weight for _, trained in encoded for weight in trained[1:] if weight)
    assert baseline["tokens"] == counts.total()
    shares = ", ".join(f"{weight:g}: {n}" for weight, n in sorted(counts.items()))
    assert f"data.train: trained tokens by weight | {shares}" in said


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_means_of_means_would_be_seen(ranks, packed, plain, tokenizer):
    """The data is such that each is 500 times the tolerance away from the loss, or more."""
    records = [encode(tokenizer, record) for record in uneven_chats()]
    sums = plain("llama").record_sums
    by_micro_batch, by_rank = mean_of_means_errors(records, sums, ranks, packed)
    assert by_micro_batch > 0.005
    assert by_rank > 0.005 or ranks == 1


def test_clipping_schedule_and_weight_decay_equal_plain_pytorch(sharp, plain, tmp_path):
    given = ["train.epochs=5", "train.max_grad_norm=0.5", "optimizer.weight_decay=0.1"]
    given += ["scheduler.name=cosine", "scheduler.warmup_ratio=0.2", *Mesh(2).assignments()]
    finish(train(2, *on_uneven_chats(sharp["qwen3"], tmp_path, *given), cwd=tmp_path))
    run_dir = tmp_path / "run"
    rates = tuple(step["lr"] for step in read_metrics(run_dir, "step"))
    assert len(set(rates)) == 5
    expected = plain("qwen3", rates, 0.5, 0.1)
    assert min(expected.norms) > 0.5
    assert_same_steps(run_dir, expected)
    assert_same_weights(run_dir, expected)


def test_steps_are_the_same_on_any_ranks_and_the_last_of_an_epoch_is_smaller(
    sharp, tokenizer, tmp_path
):
    records = chats(10, seed=3)
    encoded = [encode(tokenizer, record) for record in records]
    steps_on = {}
    for ranks in 1, 2, 4:
        given = [APART, "train.epochs=2", "export.final=false"]
        given += [f"train.gradient_accumulation_steps={4 // ranks}"]
        given = on_uneven_chats(sharp["llama"], tmp_path, *given, run=f"{ranks}", records=records)
        said = finish(train(ranks, *given, cwd=tmp_path))
        assert "Steps per epoch: 3 | Total steps: 6 | Records: 10" in said
        steps_on[ranks] = read_metrics(tmp_path / f"{ranks}", "step")
    for steps in steps_on.values():
        for key in "loss", "grad_norm":
            assert [step[key] for step in steps] == pytest.approx(
                [step[key] for step in steps_on[1]], rel=1e-5
            )
        assert [step["epoch"] for step in steps] == [0, 0, 0, 1, 1, 1]
        for epoch in steps[:3], steps[3:]:
            assert sum(step["trained_tokens"] for step in epoch) == sum(
                sum(trained) for _, trained in encoded
            )
            assert sum(step["tokens"] for step in epoch) == sum(len(ids) for ids, _ in encoded)


@torch.no_grad()
def test_an_epoch_holds_every_piece_once_where_long_records_are_split(sharp, tokenizer, tmp_path):
    records, length = [*chats(9, seed=4), *uneven_chats()[:2]], 60
    given = [f"data.max_length={length}", "data.overflow=split", "train.epochs=1", TWO_ROWS]
    given += ["optimizer.lr=0", "export.final=false"]
    given = on_uneven_chats(sharp["llama"], tmp_path, *given, records=records)
    finish(train(3, *given, cwd=tmp_path))
    model = AutoModelForCausalLM.from_pretrained(sharp["llama"], dtype=torch.float32)
    encoded = [encode(tokenizer, record) for record in records]
    pieces = [
        (ids[i : i + length], trained[i : i + length])
        for ids, trained in encoded
        for i in range(0, len(ids) - 1, length - 1)
    ]
    assert any(not any(trained[1:]) for _, trained in pieces)
    steps = read_metrics(tmp_path / "run", "step")
    assert len(steps) > 1
    assert sum(step["trained_tokens"] for step in steps) == sum(
        sum(trained) for _, trained in encoded
    )
    assert sum(step["loss"] * step["trained_tokens"] for step in steps) == pytest.approx(
        sum(summed_nll(model, *piece).item() for piece in pieces), rel=1e-6
    )


@pytest.mark.parametrize(
    ("ranks", "count"),
    [(2, 1), (4, 101), *(pytest.param(*case, marks=FULL) for case in ((1, 3), (3, 7)))],
)
def test_perplexity_equals_one_record_at_a_time(ranks, count, sharp, tokenizer, tmp_path):
    held_out = chats(count, seed=count)
    given = [f"data.eval={write_jsonl(tmp_path / 'eval.jsonl', held_out)}", TWO_ROWS]
    given += [f"data.packing={str(count != 7).lower()}", "data.max_length=200"]
    given += ["data.overflow=error", "train.max_steps=1", "optimizer.lr=0", "export.final=false"]
    given = on_uneven_chats(sharp["qwen3"], tmp_path, *given, records=chats(12))
    finish(train(ranks, *given, cwd=tmp_path))
    baseline, last = read_metrics(tmp_path / "run", "eval")
    encoded = [encode(tokenizer, record) for record in held_out]
    assert (baseline["step"], last["step"]) == (0, 1)
    assert baseline["tokens"] == last["tokens"] == sum(sum(trained) for _, trained in encoded)
    expected = plain_perplexity(sharp["qwen3"], encoded)
    assert baseline["perplexity"] == pytest.approx(expected, rel=1e-6)
    assert baseline["loss"] == pytest.approx(math.log(expected), rel=1e-6)
    assert last["perplexity"] == pytest.approx(expected, rel=1e-6)


def plant_infinity(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight[3, 4] = math.inf


def spoil_norm(model: Any) -> None:
    model.model.norm.weight[3] = math.nan


def hide_huge_head(model: Any) -> None:
    """Logits and losses are finite; the gradient of the last norm, where the end is predicted,
    overflows."""
    model.model.embed_tokens.weight[:, 0] = 1e6
    model.model.norm.weight[0] = 0
    model.lm_head.weight[model.config.eos_token_id, 0] = 3e38


def stopped(given: list[str], folder: Path) -> tuple[str, list[int]]:
    """The last line of a run that failed, and its steps, each of which is saved."""
    saving = ["checkpoint.every_steps=1", "checkpoint.mode=sync"]
    failed, run_dir = train(2, *given, *saving, cwd=folder), folder / "run"
    assert failed.returncode == 1, failed.stderr
    steps = [step["step"] for step in read_metrics(run_dir, "step")]
    saved = sorted(path.name for path in run_dir.glob("checkpoints/*"))
    assert saved == [checkpoint(run_dir, step).name for step in steps]
    assert all((checkpoint(run_dir, step) / "COMPLETE").is_file() for step in steps)
    assert not (run_dir / "model").exists()
    (error,) = [line for line in failed.stderr.splitlines() if line.startswith("ERROR: ")]
    return error, steps


def test_a_loss_that_is_not_finite_stops_the_run_before_the_update(sharp, tmp_path):
    given = on_uneven_chats(sharp["qwen3"], tmp_path, "optimizer.lr=1e30")
    error, steps = stopped(given, tmp_path)
    assert "step 2 was not taken" in error and "--step 2)" in error
    assert "in the gradient of model." in error or "in the gradient of lm_head." in error
    assert steps == [1]
    (refused,) = read_metrics(tmp_path / "run", "refused")
    assert refused["step"] == 2 and None in (refused["loss"], refused["grad_norm"])
    assert "; step 2 was not taken: its " in figures(read_run(tmp_path / "run"))["loss"]


@pytest.mark.parametrize(
    ("change", "stages", "cause"),
    [
        (plant_infinity, 1, "first in the weight model.layers.1.mlp.up_proj.weight"),
        (hide_huge_head, 1, "first in the gradient of model.norm.weight"),
        # All gradients of the first stage are NaN, too.
        (spoil_norm, 2, "first in the weight model.norm.weight"),
    ],
)
def test_weights_that_give_no_finite_loss_or_norm_stop_the_first_step(
    change, stages, cause, sharp, tmp_path
):
    model = with_weights(sharp["qwen3"], tmp_path / "model", change)
    records = [{"prompt": f"node {i} ", "completion": "rank"} for i in range(40)]
    more = [f"parallel.stages={stages}", "train.gradient_accumulation_steps=2"]
    error, steps = stopped(on_uneven_chats(model, tmp_path, *more, records=records), tmp_path)
    assert error.startswith("ERROR: step 1 was not taken: ") and cause in error
    assert steps == []


def test_bfloat16_compute_keeps_float32_masters(sharp, plain, tmp_path):
    given = ["model.compute_dtype=bfloat16", "train.epochs=4", *Mesh(2).assignments()]
    given = on_uneven_chats(sharp["llama"], tmp_path, *given)
    said, run_dir = finish(train(2, *given, cwd=tmp_path)), tmp_path / "run"
    assert "Precision: bfloat16 in forward and backward" in said
    expected = plain("llama").losses
    assert step_losses(run_dir) == pytest.approx(expected, rel=1e-2)
    assert step_losses(run_dir) != pytest.approx(expected, rel=1e-5)
    weights = load_file(run_dir / "model" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert not any(torch.equal(weight, weight.bfloat16().float()) for weight in weights.values())


def add_dropout(model: Any) -> None:
    model.config.attention_dropout = 0.5


def test_dropout_follows_the_seed_and_the_rank_and_spares_evaluation(sharp, tokenizer, tmp_path):
    model = with_weights(sharp["llama"], tmp_path / "model", add_dropout)
    record = uneven_chats()[4]
    once = write_jsonl(tmp_path / "once.jsonl", [record])
    without_dropout = math.log(plain_perplexity(model, [encode(tokenizer, record)]))
    losses = {}
    for name, ranks, seed in ("a", 1, 7), ("same", 1, 7), ("other", 1, 8), ("two", 2, 7):
        given = [f"run.seed={seed}", f"data.eval={once}", "train.epochs=3", "optimizer.lr=0"]
        given += [APART, "export.final=false"]
        given = on_uneven_chats(model, tmp_path, *given, run=name, records=[record] * ranks)
        finish(train(ranks, *given, cwd=tmp_path))
        losses[name] = step_losses(tmp_path / name)
        evaluated = [entry["loss"] for entry in read_metrics(tmp_path / name, "eval")]
        assert evaluated == pytest.approx([without_dropout] * 2, rel=1e-6)
    every = [*losses["a"], without_dropout, losses["other"][0], losses["two"][0]]
    assert losses["a"] == losses["same"]
    assert all(abs(one / other - 1) > 1e-4 for i, one in enumerate(every) for other in every[:i])
