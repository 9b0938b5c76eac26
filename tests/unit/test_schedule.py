"""The steps of a run, which rank gets which rows, and how often an epoch uses each record."""

from collections import Counter
from decimal import Decimal
from fractions import Fraction
from itertools import islice, product
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from helpers.data_run import random_lengths, write_dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from shardtune.data.dataset import TokenDataset
from shardtune.data.order import Rows, sequences_of_epoch
from shardtune.data.schedule import Cost, Position, Schedule, assign_rows
from shardtune.model.flops import cost_of

ANY_COST = Cost(2, 1, 1)
RUN = {"max_length": 50, "packing": False, "seed": 5, "epochs": 3, "max_steps": None}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    """97 sequences of 1 to 40 tokens, of which the odd ones are trained."""
    return write_dataset(
        tmp_path_factory.mktemp("dataset"),
        [
            ([100 * i % 7 + 1] * length, [False] + [bool(at % 2) for at in range(1, length)])
            for i, length in enumerate(random_lengths(97, 40, 0).tolist())
        ],
    )


@given(st.integers(1, 16), st.integers(1, 61), st.integers(1, 5))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_each_row_goes_to_one_rank_and_all_ranks_have_as_many_micro_batches(
    ranks, count, rows_per_micro_batch
):
    rows = Rows(np.arange(2 * count), np.arange(0, 2 * count + 1, 2))  # of two sequences each
    lengths = random_lengths(2 * count, 40, count)
    costs = ANY_COST.per_row(rows, lengths, lengths // 3)
    assigned = [
        assign_rows(rows, costs, rank, ranks, rows_per_micro_batch) for rank in range(ranks)
    ]
    assert {len(batches) for batches in assigned} == {-(-count // (ranks * rows_per_micro_batch))}
    all_batches = [batch for batches in assigned for batch in batches]
    pairs = [batch[i : i + 2] for batch in all_batches for i in range(0, len(batch), 2)]
    assert sorted(pairs) == [[2 * row, 2 * row + 1] for row in range(count)]
    assert max(map(len, all_batches)) <= 2 * rows_per_micro_batch
    for same_time in zip(*assigned, strict=True):
        sizes = [len(batch) // 2 for batch in same_time]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("rows_per_micro_batch", [1, 2])
def test_ranks_get_rows_of_like_cost_at_once_and_as_much_in_all(rows_per_micro_batch):
    """Rows of 1 to 128 tokens, in any order."""
    lengths = np.random.default_rng(0).permutation(np.arange(1, 129))
    rows = Rows(np.arange(128), np.arange(129))
    assigned = [assign_rows(rows, lengths, rank, 16, rows_per_micro_batch) for rank in range(16)]
    tokens = np.array([[lengths[batch].sum() for batch in batches] for batches in assigned])
    assert (tokens.sum(1) == 129 * 4).all()
    assert (np.ptp(tokens, axis=0) == (15 if rows_per_micro_batch == 1 else 0)).all()


def test_the_cost_of_a_row_is_that_of_its_tokens_trained_ones_and_pairs():
    rows = Rows(np.array([2, 0, 1]), np.array([0, 2, 3]))
    lengths, trained = np.array([4, 1, 3], np.int32), np.array([2, 0, 3], np.int32)
    costs = Cost(100_000, 1000, 1).per_row(rows, lengths, trained)
    assert costs.tolist() == [502_011, 303_006]


def test_the_cost_of_a_model_counts_the_experts_that_a_token_meets(models):
    config = AutoConfig.from_pretrained(models["glm"])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    experts = sum(p.numel() for p in model.parameters() if p.dim() == 3)
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
        schedule = Schedule(dataset, rows_per_step=8, start=Position(), **RUN | {"packing": True})
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
    for ranks, rows_per_micro_batch in ((1, 8), (2, 2), (4, 1), (8, 1), (3, 1)):
        assert batches(ranks, rows_per_micro_batch) == expected


def test_an_epoch_ends_with_a_smaller_step_and_counts_its_tokens(dataset):
    schedule = Schedule(dataset, rows_per_step=10, start=Position(), **RUN)
    steps = list(schedule.steps())
    assert (schedule.rows_per_epoch, schedule.steps_per_epoch, schedule.total_steps) == (97, 10, 30)
    assert [step.number for step in steps] == list(range(1, 31))
    assert [len(step.rows) for step in steps] == ([10] * 9 + [7]) * 3
    ends = [Position(9, 0, 90), Position(10, 1, 0), Position(11, 1, 10)]
    assert [step.end for step in steps[8:11]] == ends
    for step in steps:
        sequences = [dataset[i] for i in step.rows.members.tolist()]
        assert step.lengths.tolist() == [len(tokens) for tokens, _ in sequences]
        assert step.tokens == sum(len(tokens) for tokens, _ in sequences)
        assert step.trained_tokens == sum(int(trained.sum()) for _, trained in sequences)


def test_a_schedule_knows_what_packing_changes(dataset):
    packed, unpacked = (
        Schedule(dataset, rows_per_step=10, start=Position(), **RUN | {"packing": packing})
        for packing in (True, False)
    )
    assert unpacked.steps_per_epoch == 10
    assert packed.steps_per_epoch < 10
    assert packed.records_per_row == 97 / packed.rows_per_epoch
    assert unpacked.records_per_row == 1


@given(st.integers(1, 29), st.integers(1, 120))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_resumed_with_other_rows_per_step_each_row_left_is_seen_once(
    dataset, before, rows_per_step
):
    whole = Schedule(dataset, rows_per_step=10, start=Position(), **RUN)
    first = list(islice(whole.steps(), before))
    resumed = Schedule(dataset, rows_per_step=rows_per_step, start=first[-1].end, **RUN)
    rest = list(resumed.steps())
    assert [step.number for step in rest] == list(range(before + 1, resumed.total_steps + 1))
    seen = Counter(
        (step.epoch, sequence) for step in first + rest for sequence in step.rows.members.tolist()
    )
    assert seen == Counter(product(range(3), range(97)))


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
    settings = RUN | {"max_steps": max_steps}
    schedule = Schedule(dataset, rows_per_step=10, start=start, **settings)
    assert schedule.total_steps == total
    assert [step.number for step in schedule.steps()] == list(range(start.step + 1, total + 1))


# Per source: its weight as it is written, and its number of records.
SOURCES = st.lists(
    st.tuples(st.sampled_from(["0", "0.1", "0.35", "1", "1.3", "2"]), st.integers(1, 25)),
    min_size=1,
    max_size=4,
)
MIXED = {"max_length": 50, "seed": 5, "rows_per_step": 16, "max_steps": None, "start": Position()}


def mixture(folder: Path, sources: list[tuple[str, int]]) -> TokenDataset:
    """Sources of so many records; every third record has two sequences, every seventh none."""
    record, source = [], []
    number = 0
    for index, (_, n_records) in enumerate(sources):
        for i in range(n_records):
            number += 1 + (number % 7 == 5)
            record += [number] * (1 + (i % 3 == 0))
        source += [index] * (len(record) - len(source))
    lengths = random_lengths(len(record), 40, 0).tolist()
    return write_dataset(folder, [([1] * n, [True] * n) for n in lengths], record, source)


def weights_of(sources: list[tuple[str, int]]) -> tuple[Fraction, ...]:
    return tuple(Fraction(str(float(weight))) for weight, _ in sources)


@given(SOURCES, st.integers(0, 2**63 - 1), st.integers(1, 12))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_counts_are_exact_and_uses_differ_by_at_most_one(tmp_path_factory, sources, seed, epochs):
    dataset = mixture(tmp_path_factory.mktemp("mixture"), sources)
    uses: Counter[int] = Counter()
    before = [0] * len(sources)
    for epoch in range(epochs):
        taken = sequences_of_epoch(
            dataset.begins_record, dataset.source, weights_of(sources), seed, epoch
        )
        assert (np.diff(taken) >= 0).all()
        per_sequence = np.bincount(taken, minlength=len(dataset))
        per_record = {}
        for sequence, record in enumerate(dataset.record.tolist()):  # whole records
            assert per_record.setdefault(record, per_sequence[sequence]) == per_sequence[sequence]
        uses.update(per_record)
        for index, (weight, n_records) in enumerate(sources):
            records = set(dataset.record[dataset.source == index].tolist())
            assert len(records) == n_records
            until_now = int(Decimal(weight) * (epoch + 1) * n_records)
            assert sum(per_record[record] for record in records) == until_now - before[index]
            before[index] = until_now
            used = [uses[record] for record in records]
            assert max(used) - min(used) <= 1


def test_a_source_does_not_depend_on_the_others_and_follows_the_seed(tmp_path):
    sources = [("0.5", 40), ("0.35", 30)]
    dataset = mixture(tmp_path, sources)
    n_first = int((dataset.source == 0).sum())

    def taken(weight: str, seed: int, epoch: int) -> list[int]:
        weights = weights_of([sources[0], (weight, 30)])
        sequences = sequences_of_epoch(dataset.begins_record, dataset.source, weights, seed, epoch)
        return sequences[sequences < n_first].tolist()

    assert taken("0.35", 1, 1) == taken("2", 1, 1)
    others = [taken("0.35", seed, epoch) for seed, epoch in ((1, 0), (1, 1), (1, 2), (2, 0))]
    assert len({str(other) for other in others}) == 4
    assert not set(others[0]) & set(others[1])  # the other half

    twins = mixture(tmp_path, [("0.5", 42), ("0.5", 42)])  # alike to the last sequence
    sequences = sequences_of_epoch(twins.begins_record, twins.source, (Fraction(1, 2),) * 2, 1, 0)
    first, second = (sequences[twins.source[sequences] == source] for source in (0, 1))
    assert first.tolist() != (second - (twins.source == 0).sum()).tolist()


@pytest.mark.parametrize(
    ("packing", "steps", "digest"),
    [
        (True, 81, "fa3d4d5748fa03688dcbf8fcbf103bf4"),
        (False, 189, "fa4b14d11deed2f74aec71cbe7f7c3bb"),
    ],
)
def test_a_single_source_has_the_order_that_runs_had_before_there_were_several(
    packing, steps, digest, tmp_path
):
    """The digests come from the version without sources."""
    lengths = random_lengths(997, 40, 0).tolist()
    dataset = write_dataset(tmp_path, [([1] * n, [False] + [True] * (n - 1)) for n in lengths])
    schedule = Schedule(dataset, packing=packing, epochs=3, **MIXED)
    total = xxhash.xxh3_128()
    for step in schedule.steps():
        members, starts = step.rows.members.tolist(), step.rows.starts.tolist()
        total.update(repr((members, starts, step.end)).encode())
    assert (schedule.total_steps, total.hexdigest()) == (steps, digest)


@pytest.mark.parametrize("weights", [("0.35", "1.3"), ("1", "0.5")])
@pytest.mark.parametrize("packing", [True, False])
def test_the_steps_of_a_mixture_are_those_of_its_epochs_together(packing, weights, tmp_path):
    sources = [*zip(weights, (60, 45), strict=True)]
    dataset = mixture(tmp_path, sources)
    given = MIXED | {"packing": packing, "epochs": 4, "weights": weights_of(sources)}
    whole = Schedule(dataset, **given)
    steps = list(whole.steps())
    assert len(steps) == whole.total_steps == steps[-1].number
    per_epoch = [sum(len(s.rows) for s in steps if s.epoch == epoch) for epoch in range(4)]
    assert len(set(per_epoch)) > 1 and whole.rows_per_epoch == per_epoch[0]
    assert whole.steps_per_epoch == -(-per_epoch[0] // 16)
    for epoch in range(4):
        members = [i for s in steps if s.epoch == epoch for i in s.rows.members.tolist()]
        taken = sequences_of_epoch(
            dataset.begins_record, dataset.source, weights_of(sources), 5, epoch
        )
        assert sorted(members) == taken.tolist()
    for step in steps:
        assert step.tokens == sum(len(dataset[i][0]) for i in step.rows.members)
        rest = Schedule(dataset, **given | {"start": step.end})
        assert rest.total_steps == whole.total_steps
        following = next(rest.steps(), None)
        assert (following is None) == (step is steps[-1])
        if following:
            assert following.rows.members.tolist() == steps[step.number].rows.members.tolist()


def test_an_epoch_without_a_record_is_skipped(tmp_path):
    dataset = mixture(tmp_path, [("0.3", 1)])
    given = MIXED | {"packing": True, "weights": (Fraction("0.3"),)}
    schedule = Schedule(dataset, epochs=8, **given)
    assert [(step.number, step.epoch) for step in schedule.steps()] == [(1, 3), (2, 6)]
    assert schedule.total_steps == 2
    assert Schedule(dataset, epochs=8, **given | {"start": Position(2, 7, 0)}).total_steps == 2
    assert Schedule(dataset, epochs=3, **given).rows_per_epoch == 0


def test_epochs_that_will_not_run_are_not_planned(tmp_path):
    dataset = mixture(tmp_path, [("0.5", 90)])
    given = MIXED | {"packing": False, "weights": (Fraction("0.5"),), "max_steps": 7}
    assert Schedule(dataset, epochs=10**12, **given).total_steps == 7
