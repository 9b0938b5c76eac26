"""How often an epoch uses each record of a source: exactly what the weights say."""

from __future__ import annotations

from collections import Counter
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import xxhash
from helpers.data_run import random_lengths, write_dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtune.data.dataset import TokenDataset
from shardtune.data.order import sequences_of_epoch
from shardtune.data.schedule import Position, Schedule

# Per source: its weight as it is written, and its number of records.
SOURCES = st.lists(
    st.tuples(st.sampled_from(["0", "0.1", "0.35", "1", "1.3", "2"]), st.integers(1, 25)),
    min_size=1,
    max_size=4,
)
RUN = {"max_length": 50, "seed": 5, "rows_per_step": 16, "max_steps": None, "start": Position()}


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
        taken = sequences_of_epoch(dataset, weights_of(sources), seed, epoch)
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
        sequences = sequences_of_epoch(dataset, weights, seed, epoch)
        return sequences[sequences < n_first].tolist()

    assert taken("0.35", 1, 1) == taken("2", 1, 1)
    others = [taken("0.35", seed, epoch) for seed, epoch in ((1, 0), (1, 1), (1, 2), (2, 0))]
    assert len({str(other) for other in others}) == 4
    assert not set(others[0]) & set(others[1])  # the other half

    twins = mixture(tmp_path, [("0.5", 42), ("0.5", 42)])  # alike to the last sequence
    sequences = sequences_of_epoch(twins, (Fraction(1, 2),) * 2, 1, 0)
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
    schedule = Schedule(dataset, packing=packing, epochs=3, **RUN)
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
    given = RUN | {"packing": packing, "epochs": 4, "weights": weights_of(sources)}
    whole = Schedule(dataset, **given)
    steps = list(whole.steps())
    assert len(steps) == whole.total_steps == steps[-1].number
    per_epoch = [sum(len(s.rows) for s in steps if s.epoch == epoch) for epoch in range(4)]
    assert len(set(per_epoch)) > 1 and whole.rows_per_epoch == per_epoch[0]
    assert whole.steps_per_epoch == -(-per_epoch[0] // 16)
    for epoch in range(4):
        members = [i for s in steps if s.epoch == epoch for i in s.rows.members.tolist()]
        taken = sequences_of_epoch(dataset, weights_of(sources), 5, epoch)
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
    given = RUN | {"packing": True, "weights": (Fraction("0.3"),)}
    schedule = Schedule(dataset, epochs=8, **given)
    assert [(step.number, step.epoch) for step in schedule.steps()] == [(1, 3), (2, 6)]
    assert schedule.total_steps == 2
    assert Schedule(dataset, epochs=8, **given | {"start": Position(2, 7, 0)}).total_steps == 2
    assert Schedule(dataset, epochs=3, **given).rows_per_epoch == 0


def test_epochs_that_will_not_run_are_not_planned(tmp_path):
    dataset = mixture(tmp_path, [("0.5", 90)])
    given = RUN | {"packing": False, "weights": (Fraction("0.5"),), "max_steps": 7}
    assert Schedule(dataset, epochs=10**12, **given).total_steps == 7
