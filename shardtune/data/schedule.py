"""The optimizer steps of a run, and which rank gets which rows of a step."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from shardtune.config import DataConfig
from shardtune.data.dataset import TokenDataset
from shardtune.data.order import Rows, best_fit, lay_out_rows, sequences_of_epoch


@dataclass(frozen=True)
class Position:
    """How far a run is: the steps taken, the epoch (from 0), and how many of its rows are done."""

    step: int = 0
    epoch: int = 0
    row: int = 0


@dataclass(frozen=True)
class Cost:
    """The cost of a row in any unit: per token, more per trained token, per pair in attention."""

    per_token: int
    per_trained_token: int
    per_pair: int

    def per_row(self, rows: Rows, lengths: np.ndarray, trained_counts: np.ndarray) -> np.ndarray:
        """Return int64 [rows], from the lengths and trained counts of `rows.members`."""
        lengths = lengths.astype(np.int64)
        costs = self.per_token * lengths + self.per_trained_token * trained_counts.astype(np.int64)
        costs += self.per_pair * (lengths * (lengths + 1) // 2)
        return np.add.reduceat(costs, rows.starts[:-1])


def source_weights(data: DataConfig) -> tuple[Fraction, ...]:
    """Return the passes per epoch of each source, exactly: 0.1 is 1/10, which no float is."""
    return tuple(Fraction(str(source.weight)) for source in data.train_sources.values())


def assign_rows(
    rows: Rows, costs: np.ndarray, rank: int, ranks: int, rows_per_micro_batch: int
) -> list[list[int]]:
    """Return the sequences of each of this rank's micro-batches, as `rows_of_rank` divides them."""
    shares = rows_of_rank(costs, rank, ranks, rows_per_micro_batch)
    return [[i for row in share for i in rows[row].tolist()] for share in shares]


def rows_of_rank(
    costs: np.ndarray, rank: int, ranks: int, rows_per_micro_batch: int
) -> list[list[int]]:
    """Return the rows of each of this rank's micro-batches; `costs`: int64 [rows].

    Every rank has the same number of them. Where rows do not suffice for all ranks, shares differ
    by at most one row and may be empty.
    """
    # Ranks wait for one another in each micro-batch. So rows of like cost are in the same
    # micro-batch on different ranks, and the rank with the least so far gets the most. Every rank
    # computes the shares of all ranks, so none has to be sent.
    order, rows_at_once = np.argsort(-costs, kind="stable"), ranks * rows_per_micro_batch
    totals = np.zeros(ranks, np.int64)
    micro_batches = []
    for begin in range(0, len(costs), rows_at_once):
        # Rows of one micro-batch, dearest first: in each round every share gets one row, the
        # cheapest share first.
        shares: list[list[int]] = [[] for _ in range(ranks)]
        share_costs = np.zeros(ranks, np.int64)
        for first in range(begin, min(begin + rows_at_once, len(costs)), ranks):
            chosen = order[first : first + ranks]
            lightest = np.argsort(share_costs, kind="stable")[: len(chosen)]
            share_costs[lightest] += costs[chosen]
            for share, row in zip(lightest.tolist(), chosen.tolist(), strict=True):
                shares[share].append(row)
        # Then the rank with the least cost in this step gets the dearest share.
        heaviest_shares = np.argsort(-share_costs, kind="stable")
        idlest_ranks = np.argsort(totals, kind="stable")
        totals[idlest_ranks] += share_costs[heaviest_shares]
        micro_batches.append(shares[heaviest_shares[np.flatnonzero(idlest_ranks == rank)[0]]])
    return micro_batches


@dataclass(frozen=True)
class Step:
    """One optimizer step: its rows over all ranks, and the position of the run after it."""

    epoch: int  # from 0
    rows: Rows
    lengths: np.ndarray  # tokens of each of rows.members
    trained_counts: np.ndarray  # trained tokens of each
    trained_weights: np.ndarray  # the sum of their weights
    end: Position

    @property
    def number(self) -> int:
        """Its number, from 1."""
        return self.end.step

    @property
    def tokens(self) -> int:
        """Real tokens, no padding."""
        return int(self.lengths.sum())

    @property
    def trained_tokens(self) -> int:
        return int(self.trained_counts.sum())

    @property
    def trained_weight(self) -> float:
        """The sum of the weights of its trained tokens, by which its loss is divided."""
        return float(self.trained_weights.sum())

    def micro_batches(
        self, cost: Cost, rank: int, ranks: int, rows_per_micro_batch: int
    ) -> list[list[int]]:
        """Return the sequences of this rank's micro-batches (`assign_rows`)."""
        return assign_rows(self.rows, self.costs(cost), rank, ranks, rows_per_micro_batch)

    def costs(self, cost: Cost) -> np.ndarray:
        """Return the cost of each row, int64 [rows]."""
        return cost.per_row(self.rows, self.lengths, self.trained_counts)


@dataclass(frozen=True)
class Schedule:
    """The steps after `start`, to the end of `epochs` epochs or to step `max_steps`."""

    dataset: TokenDataset
    max_length: int
    packing: bool
    seed: int
    rows_per_step: int  # the last step of an epoch may have fewer
    epochs: int  # one in which no source gives a record is skipped
    max_steps: int | None
    start: Position  # steps before it count as they were taken, even with other rows_per_step
    weights: tuple[Fraction, ...] = (Fraction(1),)  # the passes per epoch of each source

    @cached_property
    def first_epoch(self) -> np.ndarray:
        """The sequences of the first epoch that has any, int64, in the order of the dataset."""
        epochs = (self._sequences(epoch) for epoch in range(self.epochs))
        return next((sequences for sequences in epochs if len(sequences)), np.empty(0, np.int64))

    @cached_property
    def rows_per_epoch(self) -> int:
        """Rows of the first epoch that has any."""
        return self._count_rows(self.first_epoch)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.rows_per_epoch // self.rows_per_step)

    @cached_property
    def total_steps(self) -> int:
        total, row = self.start.step, self.start.row
        last = sys.maxsize if self.max_steps is None else max(self.max_steps, total)
        # With integer weights each epoch uses every record equally often: count one epoch's rows.
        are_alike = all(weight.denominator == 1 for weight in self.weights)
        for epoch in range(self.start.epoch, self.epochs):
            if total >= last:
                break
            rows = self.rows_per_epoch if are_alike else self._count_rows(self._sequences(epoch))
            total += -(-(rows - row) // self.rows_per_step)
            row = 0
        return min(total, last)

    def _sequences(self, epoch: int) -> np.ndarray:
        columns = self.dataset.begins_record, self.dataset.source
        return sequences_of_epoch(*columns, self.weights, self.seed, epoch)

    def _count_rows(self, sequences: np.ndarray) -> int:
        """Return the number of rows of these sequences, which does not depend on the seed."""
        if not self.packing:
            return len(sequences)
        return best_fit(self.dataset.lengths[sequences], self.max_length)[1]

    def is_due(self, step: int, every_steps: int) -> bool:
        """Return whether `step` is a multiple of `every_steps` (0: never), or the last one."""
        return step == self.total_steps or (every_steps > 0 and step % every_steps == 0)

    @property
    def records_per_row(self) -> float:
        """Records in a row of the first epoch, on average."""
        return float(self.sum_by_source(self.dataset.begins_record).sum() / self.rows_per_epoch)

    def sum_by_source(self, values: np.ndarray) -> np.ndarray:
        """Sum `values`, one per sequence, over the first epoch by source, int64 [sources]."""
        sources = self.dataset.source[self.first_epoch]
        return np.bincount(sources, values[self.first_epoch], len(self.weights)).astype(np.int64)

    def steps(self) -> Iterator[Step]:
        dataset, total_steps = self.dataset, self.total_steps
        number, epoch, first = self.start.step, self.start.epoch, self.start.row
        settings = self.max_length, self.packing, self.seed
        while number < total_steps:
            sequences = self._sequences(epoch)
            rows = lay_out_rows(dataset.lengths[sequences], *settings, epoch)
            rows = Rows(sequences[rows.members], rows.starts)
            for begin in range(first, len(rows), self.rows_per_step)[: total_steps - number]:
                number += 1
                end = min(begin + self.rows_per_step, len(rows))
                is_epoch_end = end == len(rows)
                after = Position(number, epoch + is_epoch_end, 0 if is_epoch_end else end)
                part = rows.part(begin, end)
                columns = dataset.lengths, dataset.trained_counts, dataset.trained_weights
                lengths, counts, weights = (column[part.members] for column in columns)
                yield Step(epoch, part, lengths, counts, weights, after)
            epoch, first = epoch + 1, 0
