"""The numbers of real runs against plain PyTorch in one process, which shares no code with the product."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import chats, launch, read_metrics, write_jsonl
from helpers.plain_training import (
    FAMILIES,
    MAX_LENGTH,
    ROWS_PACKED,
    Encoded,
    Trained,
    assert_same_weights,
    encode,
    finish,
    plain_perplexity,
    plain_training,
    settings,
    sharpen,
    step_losses,
    summed_nll,
    uneven_chats,
    with_weights,
)
from helpers.ranks import train
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
)

from shardtune.data.order import plan_rows
from shardtune.data.schedule import Cost, assign_rows


@pytest.fixture(scope="session")
def sharp(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The models with matrices eight times as large: losses that differ from token to token, as after pretraining."""
    root = tmp_path_factory.mktemp("sharp")
    return {name: with_weights(path, root / name, sharpen) for name, path in models.items()}


def mean_of_means_errors(
    records: list[Encoded], sums: list[float], ranks: int, packed: bool
) -> list[float]:
    """How wrong the loss of the first step would be if averaged over micro-batches, and if averaged over ranks."""
    counts = [sum(trained[1:]) for _, trained in records]
    lengths = torch.tensor([len(ids) for ids, _ in records]).numpy()
    trained_counts = torch.tensor(counts).numpy()
    rows = plan_rows(lengths, MAX_LENGTH, packed, 1234, 0)
    cost = Cost(per_token=6 * 16, per_trained_token=1, per_pair=1)
    costs = cost.of_rows(rows, lengths[rows.members], trained_counts[rows.members])
    dealt = [assign_rows(rows, costs, rank, ranks, 1 if packed else 2) for rank in range(ranks)]

    def mean(group: list[int]) -> float:
        return sum(sums[i] for i in group) / sum(counts[i] for i in group)

    exact = mean(list(range(len(records))))
    by_micro_batch = [mean(group) for groups in dealt for group in groups]
    by_rank = [mean([i for group in groups for i in group]) for groups in dealt]
    return [abs(sum(means) / len(means) / exact - 1) for means in (by_micro_batch, by_rank)]


@pytest.fixture(scope="session")
def plain(sharp: dict[str, Path], tokenizer: PreTrainedTokenizerFast) -> Callable[..., Trained]:
    """The plain loop over `uneven_chats`, once for each family and setting."""
    records = [encode(tokenizer, record) for record in uneven_chats()]
    return cache(
        lambda family, *arguments: plain_training(
            sharp[family], records, list(arguments[0]), *arguments[1:]
        )
    )


def check_equality(
    family: str,
    ranks: int,
    accumulation: int,
    packed: bool,
    sharp: dict[str, Path],
    plain: Callable[..., Trained],
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
) -> None:
    """One optimizer step an epoch, so that the plain loop need not know the order of the data."""
    data, run_dir, rows = (
        write_jsonl(folder / "train.jsonl", uneven_chats()),
        folder / "run",
        1 if packed else 2,
    )
    said = finish(
        train(
            ranks,
            *settings(
                sharp[family],
                data,
                run_dir,
                f"data.packing={str(packed).lower()}",
                "train.epochs=4",
                f"train.micro_batch_size={rows}",
                f"train.gradient_accumulation_steps={accumulation}",
            ),
            cwd=folder,
        )
    )
    assert f"Rows per epoch: {ROWS_PACKED * rows} of" in said
    assert "Steps per epoch: 1 | Total steps: 4" in said
    expected, steps = plain(family, (3e-3,) * 4), read_metrics(run_dir, "step")
    assert [step["loss"] for step in steps] == pytest.approx(expected.losses, rel=1e-5)
    assert [step["grad_norm"] for step in steps] == pytest.approx(expected.norms, rel=1e-5)
    assert_same_weights(run_dir, expected)
    records = [encode(tokenizer, record) for record in uneven_chats()]
    by_micro_batch, by_rank = mean_of_means_errors(records, expected.record_sums, ranks, packed)
    assert by_micro_batch > 0.005
    assert by_rank > 0.005 or ranks == 1


@pytest.mark.parametrize(
    ("family", "ranks", "accumulation", "packed"),
    [("llama", 1, 8, True), ("qwen3", 2, 4, False), ("glm", 4, 2, True), ("llama", 8, 1, False)],
)
def test_losses_norms_and_weights_equal_plain_pytorch(
    family, ranks, accumulation, packed, sharp, plain, tokenizer, tmp_path
):
    check_equality(family, ranks, accumulation, packed, sharp, plain, tokenizer, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 8), (2, 4), (4, 2), (8, 1)])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_world_and_shape_equals_plain_pytorch(
    family, ranks, accumulation, packed, sharp, plain, tokenizer, tmp_path
):
    check_equality(family, ranks, accumulation, packed, sharp, plain, tokenizer, tmp_path)


def test_clipping_schedule_and_weight_decay_equal_plain_pytorch(sharp, plain, tmp_path):
    data, run_dir = write_jsonl(tmp_path / "train.jsonl", uneven_chats()), tmp_path / "run"
    finish(
        train(
            2,
            *settings(
                sharp["qwen3"],
                data,
                run_dir,
                "train.epochs=5",
                "train.gradient_accumulation_steps=4",
                "train.max_grad_norm=0.5",
                "optimizer.weight_decay=0.1",
                "scheduler.name=cosine",
                "scheduler.warmup_ratio=0.2",
            ),
            cwd=tmp_path,
        )
    )
    steps = read_metrics(run_dir, "step")
    rates = tuple(step["lr"] for step in steps)
    assert len(set(rates)) == 5
    expected = plain("qwen3", rates, 0.5, 0.1)
    assert min(expected.norms) > 0.5
    assert [step["loss"] for step in steps] == pytest.approx(expected.losses, rel=1e-5)
    assert [step["grad_norm"] for step in steps] == pytest.approx(expected.norms, rel=1e-5)
    assert_same_weights(run_dir, expected)


def test_steps_are_the_same_on_any_ranks_and_the_last_of_an_epoch_is_smaller(
    sharp, tokenizer, tmp_path
):
    records = chats(10, seed=3)
    data, encoded, seen = (
        write_jsonl(tmp_path / "train.jsonl", records),
        [encode(tokenizer, r) for r in records],
        {},
    )
    for ranks, accumulation in (1, 4), (2, 2), (4, 1):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        said = finish(
            train(
                ranks,
                *settings(
                    sharp["llama"],
                    data,
                    folder,
                    "data.packing=false",
                    "train.epochs=2",
                    "export.final=false",
                    f"train.gradient_accumulation_steps={accumulation}",
                ),
                cwd=folder,
            )
        )
        assert "Steps per epoch: 3 | Total steps: 6 | Records: 10" in said
        seen[ranks] = read_metrics(folder, "step")
    for steps in seen.values():
        for key in "loss", "grad_norm":
            assert [step[key] for step in steps] == pytest.approx(
                [step[key] for step in seen[1]], rel=1e-5
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
    data, run_dir = write_jsonl(tmp_path / "train.jsonl", records), tmp_path / "run"
    finish(
        train(
            3,
            *settings(
                sharp["llama"],
                data,
                run_dir,
                f"data.max_length={length}",
                "data.overflow=split",
                "train.epochs=1",
                "optimizer.lr=0",
                "export.final=false",
                "train.micro_batch_size=2",
            ),
            cwd=tmp_path,
        )
    )
    model = AutoModelForCausalLM.from_pretrained(sharp["llama"], dtype=torch.float32)
    encoded = [encode(tokenizer, record) for record in records]
    pieces = [
        (ids[i : i + length], trained[i : i + length])
        for ids, trained in encoded
        for i in range(0, len(ids) - 1, length - 1)
    ]
    assert any(not any(trained[1:]) for _, trained in pieces)
    steps = read_metrics(run_dir, "step")
    assert len(steps) > 1
    assert sum(step["trained_tokens"] for step in steps) == sum(
        sum(trained) for _, trained in encoded
    )
    assert sum(step["loss"] * step["trained_tokens"] for step in steps) == pytest.approx(
        sum(summed_nll(model, *piece).item() for piece in pieces), rel=1e-6
    )


def check_perplexity(
    ranks: int,
    count: int,
    sharp: dict[str, Path],
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
) -> None:
    held_out = chats(count, seed=count)
    finish(
        train(
            ranks,
            *settings(
                sharp["qwen3"],
                write_jsonl(folder / "train.jsonl", chats(12)),
                folder / "run",
                "train.max_steps=1",
                f"data.eval={write_jsonl(folder / 'eval.jsonl', held_out)}",
                f"data.packing={str(count != 7).lower()}",
                "data.max_length=200",
                "data.overflow=error",
                "train.micro_batch_size=2",
                "export.final=false",
                "optimizer.lr=0",
            ),
            cwd=folder,
        )
    )
    baseline, last = read_metrics(folder / "run", "eval")
    encoded = [encode(tokenizer, record) for record in held_out]
    assert (baseline["step"], last["step"]) == (0, 1)
    assert baseline["tokens"] == last["tokens"] == sum(sum(trained) for _, trained in encoded)
    expected = plain_perplexity(sharp["qwen3"], encoded)
    assert baseline["perplexity"] == pytest.approx(expected, rel=1e-6)
    assert baseline["loss"] == pytest.approx(math.log(expected), rel=1e-6)
    assert last["perplexity"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("ranks", "count"), [(2, 1), (3, 7), (4, 101)])
def test_perplexity_equals_one_record_at_a_time(ranks, count, sharp, tokenizer, tmp_path):
    check_perplexity(ranks, count, sharp, tokenizer, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [1, 3, 7, 101])
def test_perplexity_on_any_ranks_and_records(ranks, count, sharp, tokenizer, tmp_path):
    check_perplexity(ranks, count, sharp, tokenizer, tmp_path)


def test_a_loss_that_is_not_finite_stops_torchrun_before_the_update(sharp, tmp_path):
    data, run_dir = write_jsonl(tmp_path / "train.jsonl", uneven_chats()), tmp_path / "run"
    (tmp_path / "config.yaml").touch()
    stopped = launch(
        2,
        "--config",
        tmp_path / "config.yaml",
        *settings(sharp["qwen3"], data, run_dir, "optimizer.lr=1e30", "checkpoint.every_steps=1"),
        cwd=tmp_path,
    )
    assert stopped.returncode == 1
    (error,) = [line for line in stopped.stderr.splitlines() if line.startswith("ERROR: ")]
    assert "step 2 was not taken" in error
    assert "in the gradient of model." in error or "in the gradient of lm_head." in error
    assert [step["step"] for step in read_metrics(run_dir, "step")] == [1]
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["checkpoint_0000001"]
    assert (run_dir / "checkpoints" / "checkpoint_0000001" / "COMPLETE").is_file()
    assert not (run_dir / "model").exists()


def plant_infinity(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight[3, 4] = math.inf


def hide_huge_head(model: Any) -> None:
    """Finite logits and losses, and a gradient of the last norm beyond float32, where the end is predicted."""
    model.model.embed_tokens.weight[:, 0] = 1e6
    model.model.norm.weight[0] = 0
    model.lm_head.weight[model.config.eos_token_id, 0] = 3e38


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (plant_infinity, "the weight model.layers.1.mlp.up_proj.weight is not finite"),
        (hide_huge_head, "first in the gradient of model.norm.weight - lower"),
    ],
)
def test_weights_that_give_no_finite_loss_or_norm_stop_the_first_step(
    change, found, sharp, tmp_path
):
    model, run_dir = with_weights(sharp["qwen3"], tmp_path / "model", change), tmp_path / "run"
    records = [{"prompt": f"node {i} ", "completion": "rank"} for i in range(40)]
    data = write_jsonl(tmp_path / "train.jsonl", records)
    stopped = train(2, *settings(model, data, run_dir, "checkpoint.every_steps=1"), cwd=tmp_path)
    assert stopped.returncode == 1, stopped.stderr
    error = stopped.stderr.splitlines()[-1]
    assert error.startswith("ERROR: step 1 was not taken: ")
    assert found in error
    assert read_metrics(run_dir, "step") == []
    assert not (run_dir / "checkpoints").exists()
    assert not (run_dir / "model").exists()


def test_bfloat16_compute_keeps_float32_masters(sharp, plain, tmp_path):
    data, run_dir = write_jsonl(tmp_path / "train.jsonl", uneven_chats()), tmp_path / "run"
    said = finish(
        train(
            2,
            *settings(
                sharp["llama"],
                data,
                run_dir,
                "model.compute_dtype=bfloat16",
                "train.epochs=4",
                "train.gradient_accumulation_steps=4",
            ),
            cwd=tmp_path,
        )
    )
    assert "forward and backward in bfloat16" in said
    expected = plain("llama", (3e-3,) * 4).losses
    assert step_losses(run_dir) == pytest.approx(expected, rel=1e-2)
    assert step_losses(run_dir) != pytest.approx(expected, rel=1e-5)
    weights = load_file(run_dir / "model" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert not any(torch.equal(weight, weight.bfloat16().float()) for weight in weights.values())


def test_activation_checkpointing_changes_no_number(sharp, plain, tmp_path):
    data, run_dir = write_jsonl(tmp_path / "train.jsonl", uneven_chats()), tmp_path / "run"
    finish(
        train(
            2,
            *settings(
                sharp["glm"],
                data,
                run_dir,
                "model.activation_checkpointing=full",
                "train.epochs=4",
                "train.micro_batch_size=2",
                "train.gradient_accumulation_steps=2",
            ),
            cwd=tmp_path,
        )
    )
    expected, steps = plain("glm", (3e-3,) * 4), read_metrics(run_dir, "step")
    assert [step["loss"] for step in steps] == pytest.approx(expected.losses, rel=1e-5)
    assert [step["grad_norm"] for step in steps] == pytest.approx(expected.norms, rel=1e-5)


def add_dropout(model: Any) -> None:
    model.config.attention_dropout = 0.5


def test_dropout_follows_the_seed_and_the_rank_and_spares_evaluation(sharp, tokenizer, tmp_path):
    model = with_weights(sharp["llama"], tmp_path / "model", add_dropout)
    record = uneven_chats()[4]
    once = write_jsonl(tmp_path / "once.jsonl", [record])
    twice = write_jsonl(tmp_path / "twice.jsonl", [record, record])
    losses = {}
    for name, ranks, data, seed in (
        ("a", 1, once, 7),
        ("same", 1, once, 7),
        ("other", 1, once, 8),
        ("two", 2, twice, 7),
    ):
        folder = tmp_path / name
        folder.mkdir()
        finish(
            train(
                ranks,
                *settings(
                    model,
                    data,
                    folder,
                    f"run.seed={seed}",
                    f"data.eval={once}",
                    "train.epochs=3",
                    "optimizer.lr=0",
                    "data.packing=false",
                    "export.final=false",
                ),
                cwd=folder,
            )
        )
        losses[name] = step_losses(folder)
        undisturbed = math.log(plain_perplexity(model, [encode(tokenizer, record)]))
        assert [entry["loss"] for entry in read_metrics(folder, "eval")] == pytest.approx(
            [undisturbed] * 2, rel=1e-6
        )
    every = [*losses["a"], undisturbed, losses["other"][0], losses["two"][0]]
    assert losses["a"] == losses["same"]
    assert all(abs(one / other - 1) > 1e-4 for i, one in enumerate(every) for other in every[:i])
