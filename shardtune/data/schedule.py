"""The optimizer steps of a run, and which rank computes which rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shardtune.data.dataset import TokenDataset
from shardtune.data.packing import Rows, count_rows, plan_rows


@dataclass(frozen=True)
class Position:
    """How far a run is: the steps taken, and in which epoch (from 0) how many of its rows are done."""

    step: int = 0
    epoch: int = 0
    row: int = 0


@dataclass(frozen=True)
class Cost:
    """What a row costs, in any unit: so much for a token, for a trained one more, for a pair in causal attention."""

    per_token: int
    per_trained_token: int
    per_pair: int

    def of_rows(self, rows: Rows, lengths: np.ndarray, trained_counts: np.ndarray) -> np.ndarray:
        """int64 [rows]; `lengths` and `trained_counts` are those of `rows.members`."""
        lengths = lengths.astype(np.int64)
        costs = self.per_token * lengths + self.per_trained_token * trained_counts.astype(np.int64)
        costs += self.per_pair * (lengths * (lengths + 1) // 2)
        return np.add.reduceat(costs, rows.starts[:-1])


def assign_rows(
    rows: Rows, costs: np.ndarray, rank: int, ranks: int, rows_per_micro_batch: int
) -> list[list[int]]:
    """The sequences of each of this rank's micro-batches; the same number of them on every rank.

    Ranks wait for one another in each micro-batch, so rows that cost alike are in the same one, on different ranks, and
    the rank with the least so far gets the most. `costs`: int64 [rows]. Where rows do not suffice for all,
    micro-batches differ by at most one row, and a rank's last one may be empty.
    """
    order, at_once = np.argsort(-costs, kind="stable"), ranks * rows_per_micro_batch
    totals = np.zeros(ranks, np.int64)
    mine = []
    for begin in range(0, len(rows), at_once):
        shares: list[list[int]] = [[] for _ in range(ranks)]
        costs_of_shares = np.zeros(ranks, np.int64)
        for first in range(begin, min(begin + at_once, len(rows)), ranks):
            chosen = order[first : first + ranks]
            lightest = np.argsort(costs_of_shares, kind="stable")[: len(chosen)]
            costs_of_shares[lightest] += costs[chosen]
            for share, row in zip(lightest.tolist(), chosen.tolist(), strict=True):
                shares[share].append(row)
        heaviest, least = (
            np.argsort(-costs_of_shares, kind="stable"),
            np.argsort(totals, kind="stable"),
        )
        totals[least] += costs_of_shares[heaviest]
        mine.append(shares[heaviest[np.flatnonzero(least == rank)[0]]])
    return [[sequence for row in share for sequence in rows[row].tolist()] for share in mine]


@dataclass(frozen=True)
class Step:
    """One optimizer step: its rows over all ranks, what they hold, and where it leaves the run."""

    number: int  # from 1
    epoch: int  # from 0
    rows: Rows
    lengths: np.ndarray  # tokens of each of rows.members
    trained_counts: np.ndarray  # those of them that are trained
    tokens: int  # real tokens, no padding
    trained_tokens: int
    end: Position

    def micro_batches(
        self, cost: Cost, rank: int, ranks: int, rows_per_micro_batch: int
    ) -> list[list[int]]:
        """See `assign_rows`."""
        costs = cost.of_rows(self.rows, self.lengths, self.trained_counts)
        return assign_rows(self.rows, costs, rank, ranks, rows_per_micro_batch)


@dataclass(frozen=True)
class Schedule:
    """The steps of the run from `start` on, each of `rows_per_step` rows but the last of an epoch."""

    dataset: TokenDataset
    max_length: int
    packing: bool
    seed: int
    rows_per_step: int
    rows_per_epoch: int
    start: Position
    total_steps: int

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.rows_per_epoch // self.rows_per_step)

    @property
    def unpacked_steps_per_epoch(self) -> int:
        """Steps of an epoch with `data.packing=false`, where each sequence is a row."""
        return -(-len(self.dataset) // self.rows_per_step)

    @property
    def records_per_row(self) -> float:
        """Records in a row, on average."""
        n_records = 1 + np.count_nonzero(np.diff(self.dataset.record))
        return float(n_records / self.rows_per_epoch)

    def steps(self) -> Iterator[Step]:
        lengths, trained_counts = self.dataset.lengths, self.dataset.trained_counts
        number, epoch, first = self.start.step, self.start.epoch, self.start.row
        while number < self.total_steps:
            rows = plan_rows(lengths, self.max_length, self.packing, self.seed, epoch)
            for begin in range(first, len(rows), self.rows_per_step):
                if number == self.total_steps:
                    return
                number += 1
                end = min(begin + self.rows_per_step, len(rows))
                chosen = rows.part(begin, end)
                tokens, trained = lengths[chosen.members], trained_counts[chosen.members]
                after = (
                    Position(number, epoch, end)
                    if end < len(rows)
                    else Position(number, epoch + 1, 0)
                )
                yield Step(
                    number,
                    epoch,
                    chosen,
                    tokens,
                    trained,
                    int(tokens.sum()),
                    int(trained.sum()),
                    after,
                )
            epoch, first = epoch + 1, 0


def make_schedule(
    dataset: TokenDataset,
    *,
    max_length: int,
    packing: bool,
    seed: int,
    rows_per_step: int,
    epochs: int,
    max_steps: int | None,
    start: Position,
) -> Schedule:
    """The schedule from `start` to the end of `epochs` epochs or to step `max_steps`, whichever comes first.

    Where an earlier part of the run had other rows per step, it counts with the steps that it took.
    """
    rows = count_rows(dataset.lengths, max_length, packing)
    left = 0
    if start.epoch < epochs:
        left = -(-(rows - start.row) // rows_per_step) + (epochs - start.epoch - 1) * -(
            -rows // rows_per_step
        )
    total = start.step + left
    if max_steps is not None:
        total = max(start.step, min(total, max_steps))
    return Schedule(dataset, max_length, packing, seed, rows_per_step, rows, start, total)
