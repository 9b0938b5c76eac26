"""Which sequences share a row, and which rows a step, a rank and a micro-batch sees."""

from __future__ import annotations

import datetime
import math
import tracemalloc
from collections import Counter
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import chats, write_jsonl
from helpers.ranks import config_for
from transformers import AutoConfig, AutoModelForCausalLM, Glm4MoeConfig, LlamaConfig

from shardtune.data.batch import build_batch
from shardtune.data.dataset import TokenDataset, build_encoder, open_prepared, prepare_data
from shardtune.data.order import plan_rows
from shardtune.data.packing import Rows, count_rows
from shardtune.data.schedule import Cost, Position, assign_rows, make_schedule
from shardtune.model.flops import ModelFlops, cost_of, count_flops
from shardtune.model.loss import summed_loss


def random_lengths(count: int, longest: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, longest + 1, count).astype(np.int32)


def log_normal_lengths(count: int, mean: float, longest: int, seed: int) -> np.ndarray:
    drawn = np.random.default_rng(seed).lognormal(math.log(mean) - 0.5, 1, count)
    return np.clip(drawn, 1, longest).astype(np.int32)


def counts_of(lengths: np.ndarray, least: float = 0.25, most: float = 0.4) -> np.ndarray:
    """Trained tokens of sequences with these lengths, by shares drawn evenly from `least` to `most`."""
    return (np.random.default_rng(5).uniform(least, most, len(lengths)) * lengths).astype(np.int32)


def naive_best_fit(lengths: list[int], max_length: int) -> list[int]:
    """The tokens in each row, by trying every row for every sequence."""
    filled: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row, tokens in enumerate(filled) if tokens + length <= max_length]
        if fitting:
            filled[max(fitting, key=lambda row: filled[row])] += length
        else:
            filled.append(length)
    return filled


def write_dataset(folder: Path, sequences: list[tuple[list[int], list[bool]]]) -> TokenDataset:
    """The columns of a data cache, written by hand."""
    lengths = [len(ids) for ids, _ in sequences]
    columns = {
        "tokens": np.array([i for ids, _ in sequences for i in ids], np.uint32),
        "trained": np.array([flag for _, flags in sequences for flag in flags], np.bool_),
        "lengths": np.array(lengths, np.int32),
        "trained_counts": np.array([sum(flags) for _, flags in sequences], np.int32),
        "record": np.arange(len(sequences), dtype=np.int64),
        "starts": np.cumsum([0, *lengths[:-1]], dtype=np.int64),
    }
    for name, column in columns.items():
        (folder / f"train.{name}").write_bytes(column.tobytes())
    return TokenDataset(folder, "train")


@pytest.fixture
def dataset(tmp_path: Path) -> TokenDataset:
    """97 sequences of 1 to 40 tokens, of which the odd ones are trained."""
    return write_dataset(
        tmp_path,
        [
            ([100 * i % 7 + 1] * length, [False] + [bool(at % 2) for at in range(1, length)])
            for i, length in enumerate(random_lengths(97, 40, 0).tolist())
        ],
    )


@pytest.mark.parametrize(
    ("count", "longest", "max_length"),
    [(1, 5, 5), (400, 64, 64), (700, 30, 256), (300, 100, 101), (500, 3, 7), (200, 4096, 4096)],
)
def test_rows_are_those_of_a_naive_best_fit(count, longest, max_length):
    lengths = random_lengths(count, longest, count)
    rows = plan_rows(lengths, max_length, True, 1, 0)
    filled = [int(lengths[rows[row]].sum()) for row in range(len(rows))]
    assert sorted(filled) == sorted(naive_best_fit(lengths.tolist(), max_length))


@pytest.mark.parametrize(
    ("count", "mean", "max_length"), [(2000, 50, 400), (1500, 300, 256), (900, 2, 64)]
)
def test_rows_of_skewed_lengths_are_those_of_a_naive_best_fit(count, mean, max_length):
    """Many equal lengths, of which a row takes several at once, and, clipped, many that fill one."""
    lengths = log_normal_lengths(count, mean, max_length, count)
    rows = plan_rows(lengths, max_length, True, 1, 0)
    filled = [int(lengths[rows[row]].sum()) for row in range(len(rows))]
    assert sorted(filled) == sorted(naive_best_fit(lengths.tolist(), max_length))
    assert count_rows(lengths, max_length, True) == len(filled)


def test_a_plan_holds_no_python_object_per_record(tmp_path):
    lengths = log_normal_lengths(200_000, 500, 4096, 0)
    (tmp_path / "lengths").write_bytes(lengths.tobytes())
    mapped = np.memmap(tmp_path / "lengths", np.int32, mode="r")
    tracemalloc.start()
    rows = plan_rows(mapped, 4096, True, 1, 0)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 48 * len(lengths)
    in_memory = plan_rows(lengths, 4096, True, 1, 0)
    assert (rows.members == in_memory.members).all() and (rows.starts == in_memory.starts).all()


@pytest.mark.parametrize("packing", [True, False])
def test_every_sequence_is_in_one_row_that_is_not_too_long(packing):
    lengths = random_lengths(500, 90, 3)
    rows = plan_rows(lengths, 100, packing, 1, 0)
    members = [rows[row].tolist() for row in range(len(rows))]
    assert sorted(sequence for row in members for sequence in row) == list(range(500))
    assert all(row and lengths[row].sum() <= 100 for row in members)
    assert packing or len(rows) == 500


@pytest.mark.parametrize("packing", [True, False])
def test_rows_are_a_function_of_seed_and_epoch(packing):
    lengths = random_lengths(300, 90, 3)

    def planned(seed: int, epoch: int) -> list[list[int]]:
        rows = plan_rows(lengths, 100, packing, seed, epoch)
        return [rows[row].tolist() for row in range(len(rows))]

    first = planned(1, 0)
    assert planned(1, 0) == first
    others = [planned(seed, epoch) for seed, epoch in ((1, 1), (2, 0), (2, 1), (0, 1))]
    assert all(other != first and sorted(map(sorted, other)) != first for other in others)
    assert len({str(other) for other in others}) == len(others)
    assert {len(other) for other in others} == {len(first)}
    # Neither the longest sequences nor the first records come first.
    for of_row in (lambda row: lengths[row].max(), lambda row: row[0]):
        assert abs(np.corrcoef(range(len(first)), [of_row(row) for row in first])[0, 1]) < 0.3


CONFIGS = {
    "SmolLM2-135M": LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    ),
    "Llama-3-8B": LlamaConfig(vocab_size=128256, intermediate_size=14336, num_key_value_heads=8),
    "GLM-4.5-Air": Glm4MoeConfig(),
}
ANY_COST = Cost(2, 1, 1)


@cache
def estimate_and_formula(name: str) -> tuple[Cost, ModelFlops]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS[name])
    return cost_of(model), count_flops(model)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 16])
def test_each_row_is_dealt_to_one_rank_and_all_ranks_have_as_many_micro_batches(ranks):
    for count, rows_per_micro_batch in product((1, 2, 3, 7, 16, 61), (1, 2, 5)):
        rows = Rows(np.arange(2 * count), np.arange(0, 2 * count + 1, 2))
        lengths = random_lengths(2 * count, 40, count)
        costs = ANY_COST.of_rows(rows, lengths, counts_of(lengths))
        dealt = [
            assign_rows(rows, costs, rank, ranks, rows_per_micro_batch) for rank in range(ranks)
        ]
        assert len({len(micro_batches) for micro_batches in dealt}) == 1
        assert len(dealt[0]) == -(-count // (ranks * rows_per_micro_batch))
        pairs = [
            batch[i : i + 2]
            for micro_batches in dealt
            for batch in micro_batches
            for i in range(0, len(batch), 2)
        ]
        assert sorted(pairs) == [[2 * row, 2 * row + 1] for row in range(count)]
        assert all(
            len(batch) <= 2 * rows_per_micro_batch
            for micro_batches in dealt
            for batch in micro_batches
        )
        for micro_batch in zip(*dealt, strict=True):
            sizes = [len(batch) // 2 for batch in micro_batch]
            assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("rows_per_micro_batch", [1, 2])
def test_ranks_get_rows_of_like_cost_at_once_and_as_much_in_all(rows_per_micro_batch):
    """Rows of 1 to 128 tokens, in any order."""
    lengths = np.random.default_rng(0).permutation(np.arange(1, 129))
    rows = Rows(np.arange(128), np.arange(129))
    dealt = [assign_rows(rows, lengths, rank, 16, rows_per_micro_batch) for rank in range(16)]
    tokens = np.array(
        [[lengths[batch].sum() for batch in micro_batches] for micro_batches in dealt]
    )
    assert (tokens.sum(1) == 129 * 4).all()
    assert (np.ptp(tokens, axis=0) == (15 if rows_per_micro_batch == 1 else 0)).all()


def useful_shares(
    model: str,
    records: int,
    trained_shares: tuple[float, float],
    ranks: int,
    accumulation: int = 1,
    rows_per_micro_batch: int = 1,
) -> tuple[float, float]:
    """The mean of all ranks' time, by the formula of MFU, over that of the slowest, in an epoch's whole steps: where
    ranks wait for one another at the end of a step, and where they do so in each micro-batch."""
    cost, flops = estimate_and_formula(model)
    lengths = log_normal_lengths(records, 500, 4096, 0)
    trained_counts = counts_of(lengths, *trained_shares)
    per_step = ranks * accumulation * rows_per_micro_batch
    rows = plan_rows(lengths, 4096, True, 1, 0)
    worked = by_step = by_micro_batch = 0.0
    for begin in range(0, len(rows) - per_step + 1, per_step):
        step = rows.part(begin, begin + per_step)
        costs = cost.of_rows(step, lengths[step.members], trained_counts[step.members])
        of_ranks = np.array(
            [
                [
                    flops.of_step(lengths[batch], trained_counts[batch].sum())
                    for batch in micro_batches
                ]
                for micro_batches in (
                    assign_rows(step, costs, rank, ranks, rows_per_micro_batch)
                    for rank in range(ranks)
                )
            ]
        )
        worked += of_ranks.sum() / ranks
        by_step += of_ranks.sum(1).max()
        by_micro_batch += of_ranks.max(0).sum()
    return worked / by_step, worked / by_micro_batch


@pytest.mark.parametrize(
    ("accumulation", "rows_per_micro_batch"), [(1, 1), (1, 2), (2, 1), (4, 1), (8, 2)]
)
@pytest.mark.parametrize("model", CONFIGS)
@pytest.mark.parametrize("trained_shares", [(0.25, 0.4), (0.05, 0.95)])
def test_sixteen_ranks_wait_less_than_three_percent_for_the_slowest(
    model, accumulation, rows_per_micro_batch, trained_shares
):
    """Five percent where any share is trained, the head is large in a small model, and a rank has but one row."""
    is_worst = (model, accumulation * rows_per_micro_batch, trained_shares) == (
        "SmolLM2-135M",
        1,
        (0.05, 0.95),
    )
    shares = useful_shares(model, 16_000, trained_shares, 16, accumulation, rows_per_micro_batch)
    assert min(shares) > (0.95 if is_worst else 0.97)


@pytest.mark.parametrize(
    ("ranks", "share"), [(8, 0.98), (24, 0.95), (32, 0.975), (64, 0.91), (128, 0.845)]
)
def test_other_numbers_of_ranks_wait_as_little_as_is_said(ranks, share):
    assert useful_shares("SmolLM2-135M", 64_000, (0.25, 0.4), ranks)[0] > share


def test_rows_that_stand_together_are_random_among_those_that_cost_alike():
    """No group has the same rows in two epochs, and expensive ones are anywhere in them."""
    lengths = log_normal_lengths(16_000, 500, 4096, 0)
    places = []
    for epoch in range(2):
        rows = plan_rows(lengths, 4096, True, 1, epoch)
        places.append(
            {
                frozenset(rows.part(first, first + 32).members.tolist())
                for first in range(0, len(rows), 32)
            }
        )
        longest = np.maximum.reduceat(lengths[rows.members], rows.starts[:-1])
        assert abs(np.corrcoef(np.arange(len(rows)), longest)[0, 1]) < 0.3
    assert not places[0] & places[1]


def test_the_cost_of_a_model_counts_the_experts_that_a_token_meets(models):
    config = AutoConfig.from_pretrained(models["glm"])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    experts = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 3)
    everything = sum(p.numel() for p in model.parameters())
    share = config.num_experts_per_tok / config.n_routed_experts
    assert 0 < share < 1 and experts
    embedding = config.vocab_size * config.hidden_size
    assert not config.tie_word_embeddings
    assert cost_of(model) == Cost(
        2 * (everything - 2 * embedding - experts + int(experts * share)),
        2 * embedding,
        4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim,
    )


def test_a_step_sees_the_same_rows_on_any_ranks_and_shapes(dataset):
    def batches(ranks: int, rows_per_micro_batch: int) -> list[list[int]]:
        schedule = make_schedule(
            dataset,
            max_length=50,
            packing=True,
            seed=1,
            rows_per_step=8,
            epochs=2,
            max_steps=None,
            start=Position(),
        )
        return [
            sorted(
                sequence
                for rank in range(ranks)
                for batch in step.micro_batches(ANY_COST, rank, ranks, rows_per_micro_batch)
                for sequence in batch
            )
            for step in schedule.steps()
        ]

    expected = batches(1, 1)
    assert all(
        batches(ranks, rows) == expected for ranks, rows in ((1, 8), (2, 2), (4, 1), (8, 1), (3, 1))
    )


def test_an_epoch_ends_with_a_smaller_step_and_counts_its_tokens(dataset):
    schedule = make_schedule(
        dataset,
        max_length=50,
        packing=False,
        seed=1,
        rows_per_step=10,
        epochs=3,
        max_steps=None,
        start=Position(),
    )
    steps = list(schedule.steps())
    assert (schedule.rows_per_epoch, schedule.steps_per_epoch, schedule.total_steps) == (97, 10, 30)
    assert [step.number for step in steps] == list(range(1, 31))
    assert [len(step.rows) for step in steps] == ([10] * 9 + [7]) * 3
    assert [step.end for step in steps[8:11]] == [
        Position(9, 0, 90),
        Position(10, 1, 0),
        Position(11, 1, 10),
    ]
    for step in steps:
        members = step.rows.members.tolist()
        assert step.lengths.tolist() == [len(dataset[i][0]) for i in members]
        assert step.tokens == sum(len(dataset[i][0]) for i in members)
        assert step.trained_tokens == sum(int(dataset[i][1].sum()) for i in members)


@pytest.mark.parametrize("before", [1, 3, 9, 10, 14])
@pytest.mark.parametrize("rows_per_step", [1, 7, 10, 64, 1000])
def test_resumed_with_other_rows_per_step_each_row_left_is_seen_once(
    dataset, before, rows_per_step
):
    given = {"max_length": 50, "packing": False, "seed": 5, "epochs": 3, "max_steps": None}
    first = [
        step
        for step, _ in zip(
            make_schedule(dataset, rows_per_step=10, start=Position(), **given).steps(),
            range(before),
            strict=False,
        )
    ]
    resumed = make_schedule(dataset, rows_per_step=rows_per_step, start=first[-1].end, **given)
    rest = list(resumed.steps())
    seen = Counter(
        (step.epoch, sequence) for step in first + rest for sequence in step.rows.members.tolist()
    )
    assert seen == Counter(product(range(3), range(97)))
    assert [step.number for step in rest] == list(range(before + 1, resumed.total_steps + 1))


@pytest.mark.parametrize(
    ("start", "max_steps", "total"),
    [
        (Position(), 5, 5),
        (Position(), 500, 30),
        (Position(7, 0, 70), 5, 7),
        (Position(7, 0, 70), 9, 9),
        (Position(30, 3, 0), None, 30),
    ],
)
def test_max_steps_ends_the_run_first(dataset, start, max_steps, total):
    schedule = make_schedule(
        dataset,
        max_length=50,
        packing=False,
        seed=5,
        rows_per_step=10,
        epochs=3,
        max_steps=max_steps,
        start=start,
    )
    assert schedule.total_steps == total
    assert [step.number for step in schedule.steps()] == list(range(start.step + 1, total + 1))


def written_by_hand(folder: Path) -> TokenDataset:
    return write_dataset(
        folder,
        [
            ([11, 12, 13], [False, True, True]),
            ([21, 22], [False, True]),
            ([31, 32, 33, 34], [False, False, True, False]),
        ],
    )


def listed(batch) -> dict[str, object]:
    return {
        name: getattr(value, "tolist", lambda value=value: value)()
        for name, value in vars(batch).items()
    }


def test_a_packed_batch_is_one_row_whose_positions_restart(tmp_path):
    assert listed(build_batch(written_by_hand(tmp_path), [2, 0, 1], is_flat=True)) == {
        "input_ids": [[31, 32, 33, 34, 11, 12, 13, 21, 22]],
        "position_ids": [[0, 1, 2, 3, 0, 1, 2, 0, 1]],
        "attention_mask": None,
        "predicting": [1, 4, 5, 7],
        "targets": [33, 12, 13, 22],
        "lengths": [4, 3, 2],
        "boundaries": [0, 4, 7, 9],
    }


def test_a_padded_batch_has_a_row_for_each_sequence(tmp_path):
    assert listed(build_batch(written_by_hand(tmp_path), [2, 0, 1], is_flat=False)) == {
        "input_ids": [[31, 32, 33, 34], [11, 12, 13, 0], [21, 22, 0, 0]],
        "position_ids": None,
        "attention_mask": [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]],
        "predicting": [1, 4, 5, 8],
        "targets": [33, 12, 13, 22],
        "lengths": [4, 3, 2],
        "boundaries": [0, 4, 7, 9],
    }


@pytest.mark.parametrize("packing", [True, False])
def test_the_batch_of_a_rank_without_rows_trains_nothing(packing, tmp_path):
    batch = build_batch(written_by_hand(tmp_path), [], packing)
    assert batch.input_ids.tolist() == [[21, 22]]  # the shortest of the data
    assert batch.predicting.shape == batch.targets.shape == (0,)


@pytest.mark.parametrize("family", ["llama", "qwen3", "glm"])
def test_packed_and_padded_batches_have_the_same_loss_and_an_empty_one_none(
    family, models, tmp_path
):
    write_jsonl(tmp_path / "train.jsonl", chats(12))
    data = config_for(models[family], tmp_path, "data.max_length=250").data
    encoder = build_encoder(str(models[family]), data, datetime.date(2025, 1, 1))
    train = open_prepared(prepare_data(data, encoder)).train
    model = AutoModelForCausalLM.from_pretrained(models[family], dtype=torch.float32)
    model.config.use_cache = False
    alone = sum(
        summed_loss(model, build_batch(train, [i], is_flat=False)).item() for i in range(12)
    )
    for packing in True, False:
        assert summed_loss(
            model, build_batch(train, list(range(12)), packing)
        ).item() == pytest.approx(alone, rel=1e-6)
        nothing = summed_loss(model, build_batch(train, [], packing))
        assert nothing.item() == 0
        nothing.backward()
        assert all(
            not parameter.grad.any()
            for parameter in model.parameters()
            if parameter.grad is not None
        )
        assert any(parameter.grad is not None for parameter in model.parameters())
        model.zero_grad()
