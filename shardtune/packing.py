"""Which sequences share a row, and which rows a step, a rank and a micro-batch sees.

All of it is a function of (seed, epoch, lengths): every rank computes the same plan and picks its part, so that the
global batch of a step does not depend on how many ranks share it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .dataset import TokenDataset


@dataclass(frozen=True)
class Rows:
    """`len(rows)` rows; row i holds the sequences `members[starts[i]:starts[i + 1]]` (indices into the dataset)."""

    members: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.members[self.starts[row] : self.starts[row + 1]]


def plan_rows(lengths: np.ndarray, max_length: int, packing: bool, seed: int, epoch: int) -> Rows:
    """Every sequence in exactly one row of at most `max_length` tokens, rows in random order.

    With packing, sequences are placed longest first, each into the fullest row that still takes it (best-fit
    decreasing; equal lengths in random order), which makes the number of rows the same in every epoch.
    """
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(lengths))
    rows = [[sequence] for sequence in order.tolist()] if not packing else _best_fit(order, lengths, max_length)
    shuffled = [rows[i] for i in random.permutation(len(rows)).tolist()] if packing else rows
    starts = np.zeros(len(shuffled) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in shuffled], out=starts[1:])
    return Rows(np.fromiter((s for row in shuffled for s in row), np.int64, len(lengths)), starts)


def _best_fit(order: np.ndarray, lengths: np.ndarray, max_length: int) -> list[list[int]]:
    longest_first = order[np.argsort(-np.asarray(lengths, dtype=np.int64)[order], kind="stable")]
    rows: list[list[int]] = []
    open_rows: list[list[int]] = [[] for _ in range(max_length + 1)]  # row numbers by the space left in them
    has_rows = 0  # bit s: some row has s tokens of space left
    for sequence in longest_first.tolist():
        length = int(lengths[sequence])
        fitting = has_rows >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            row = open_rows[space].pop()
            if not open_rows[space]:
                has_rows &= ~(1 << space)
        else:
            space, row = max_length, len(rows)
            rows.append([])
        rows[row].append(sequence)
        open_rows[space - length].append(row)
        has_rows |= 1 << (space - length)
    return rows


@dataclass(frozen=True)
class Batch:
    """What one rank feeds the model in one micro-batch, and the positions whose next token the loss counts.

    Flat, its sequences stand in one row of T tokens, `input_ids` and `position_ids` of shape (1, T): positions restart
    with each sequence, which is how transformers tells documents apart. Else the shape is (sequences, longest), padded
    on the right, which causal attention never looks at.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor | None
    attention_mask: torch.Tensor | None
    predicting: torch.Tensor  # (n,) positions in the flattened logits
    targets: torch.Tensor  # (n,) the token that each of them is to predict
    lengths: list[int]  # of the sequences
    boundaries: torch.Tensor  # int32 (sequences + 1,): where each begins in a flat row, and the end

    def inputs(self) -> dict[str, torch.Tensor]:
        """What a model's forward gets."""
        names = ("input_ids", "position_ids", "attention_mask")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def to(self, device: torch.device) -> Batch:
        moved: dict[str, Any] = {
            name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
            for name, value in vars(self).items()
        }
        return Batch(**moved)


def build_batch(dataset: TokenDataset, sequences: list[int], is_flat: bool) -> Batch:
    """The batch of these sequences; without any, the shortest one, nothing of it trained (the rank must take part)."""
    pairs = [dataset[i] for i in sequences]
    if not pairs:
        # Not a token of our choice: in gemma3n a row of padding, whose embedding is zero, has no finite gradient.
        tokens, _ = dataset[int(dataset.lengths.argmin())]
        pairs = [(tokens, np.zeros(len(tokens), np.bool_))]
    lengths = [len(ids) for ids, _ in pairs]
    ends = np.cumsum([0, *lengths])
    width = sum(lengths) if is_flat else max(lengths)
    starts = ends[:-1] if is_flat else np.arange(len(pairs)) * width
    size = width if is_flat else len(pairs) * width
    ids, real, positions = np.zeros(size, np.int64), np.zeros(size, np.int64), np.zeros(size, np.int64)
    predicting, targets = [], []
    for (tokens, trained), start, length in zip(pairs, starts.tolist(), lengths, strict=True):
        ids[start : start + length] = tokens
        real[start : start + length] = 1
        positions[start : start + length] = np.arange(length)
        counted = np.flatnonzero(trained[1:])  # a token is predicted at the position before it
        predicting.append(counted + start)
        targets.append(np.asarray(tokens, np.int64)[counted + 1])
    shape = (-1, width)
    return Batch(
        torch.from_numpy(ids).view(shape),
        torch.from_numpy(positions).view(shape) if is_flat else None,
        None if is_flat else torch.from_numpy(real).view(shape),
        torch.from_numpy(np.concatenate(predicting)),
        torch.from_numpy(np.concatenate(targets)),
        lengths,
        torch.from_numpy(ends.astype(np.int32)),
    )


@dataclass(frozen=True)
class Position:
    """How far a run is: the steps taken, and in which epoch (from 0) how many of its rows are done."""

    step: int = 0
    epoch: int = 0
    row: int = 0


@dataclass(frozen=True)
class Step:
    """One optimizer step: its rows over all ranks, what they hold, and where it leaves the run."""

    number: int  # from 1
    epoch: int  # from 0
    sequences: list[list[int]]  # of each row
    tokens: int  # real tokens, no padding
    trained_tokens: int
    end: Position

    def micro_batches(self, rank: int, ranks: int, rows_per_micro_batch: int) -> list[list[int]]:
        """See `deal`."""
        return deal(self.sequences, rank, ranks, rows_per_micro_batch)


def deal(rows: list[list[int]], rank: int, ranks: int, rows_per_micro_batch: int) -> list[list[int]]:
    """The sequences of each of this rank's micro-batches; the same number of them on every rank.

    Rows are dealt in turn, so where they do not suffice for all, a rank's last micro-batch may be empty.
    """
    stride = ranks * rows_per_micro_batch
    mine = [rows[start + rank : start + stride : ranks] for start in range(0, len(rows), stride)]
    return [[sequence for row in micro_batch for sequence in row] for micro_batch in mine]


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
                chosen = [rows[row] for row in range(begin, end)]
                members = np.concatenate(chosen)
                after = Position(number, epoch, end) if end < len(rows) else Position(number, epoch + 1, 0)
                yield Step(
                    number,
                    epoch,
                    [row.tolist() for row in chosen],
                    int(lengths[members].sum()),
                    int(trained_counts[members].sum()),
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
    rows = len(plan_rows(dataset.lengths, max_length, packing, seed, 0))
    left = 0
    if start.epoch < epochs:
        left = -(-(rows - start.row) // rows_per_step) + (epochs - start.epoch - 1) * -(-rows // rows_per_step)
    total = start.step + left
    if max_steps is not None:
        total = max(start.step, min(total, max_steps))
    return Schedule(dataset, max_length, packing, seed, rows_per_step, rows, start, total)
