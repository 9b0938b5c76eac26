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
from torch import nn
from transformers import PreTrainedModel

from .dataset import TokenDataset

_GROUP_ROWS = 32
# Whole numbers: another machine's last bit must not send a row to another place.
_LEVEL_EDGES = np.rint(8192 * (1.03 ** np.arange(200) - 1))


@dataclass(frozen=True)
class Rows:
    """`len(rows)` rows; row i holds the sequences `members[starts[i]:starts[i + 1]]` (indices into the dataset)."""

    members: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.members[self.starts[row] : self.starts[row + 1]]

    def part(self, begin: int, end: int) -> Rows:
        """The rows from `begin` up to `end`."""
        starts = self.starts[begin : end + 1]
        return Rows(self.members[starts[0] : starts[-1]], starts - starts[0])


def plan_rows(lengths: np.ndarray, max_length: int, packing: bool, seed: int, epoch: int) -> Rows:
    """Every sequence in exactly one row of at most `max_length` tokens, rows in random order.

    With packing, sequences are placed longest first, each into the fullest row that still takes it (best-fit
    decreasing; equal lengths in random order), which makes the number of rows the same in every epoch. Rows whose
    attention costs alike then stand together, see `_places`. Without packing they do not: a step of short records would
    weigh as much as one of long ones.
    """
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(lengths))
    if not packing:
        return Rows(order, np.arange(len(order) + 1))
    shorter_by = max_length - np.asarray(lengths)[order]
    if max_length < 1 << 16:
        shorter_by = shorter_by.astype(np.uint16)  # sorted by radix, in a fifth of the time
    longest_first = order[np.argsort(shorter_by, kind="stable")]
    del order, shorter_by
    row_of, n_rows = _best_fit(lengths, max_length)
    row_of = _places(np.asarray(lengths)[longest_first], row_of, n_rows, random)[row_of]
    starts = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=n_rows))])
    return Rows(longest_first[np.argsort(row_of, kind="stable")], starts)


def _places(lengths: np.ndarray, row_of: np.ndarray, n_rows: int, random: np.random.Generator) -> np.ndarray:
    """The place in the epoch of each row; `row_of` is that of each sequence.

    Ranks wait for the one whose row costs most, and a row that is one long document costs up to half as much again as
    one of short ones. So rows that cost alike stand together in groups of 32; which of them do so, the order in a group
    and that of the groups are random. The last rows of the epoch, fewer than 32, are any.

    With c FLOPs for a token and a for a pair of tokens, the cost of a row of T tokens in documents of L is
    c T + a sum(L^2) / 2, and per token c (1 + A / B) with A = sum(L^2) / T and B = 2 c / a, from 7,000 (SmolLM2-135M)
    to 60,000 (Llama-3-8B). The order of data must not depend on the model: alike is what differs by less than 3% at
    B = 8,192, and at a larger B by less than that. How much of a row is trained counts when rows are dealt, and not
    here: steps of rows that are alike in that would weigh their tokens differently.

    What remains, with one row a step for each rank of a SmolLM2-135M, log-normal lengths and 25 to 40% trained, by the
    formula of `flops.py`: ranks work for 98% of the slowest one's time where their number divides 32, 95% at 24, 92% at
    64 and 85% at 128, and 3% less where any share is trained. With several rows for each of 16 it is 98.8% and more.
    """
    order = random.permutation(n_rows)
    n_grouped = n_rows - n_rows % _GROUP_ROWS
    attended = np.bincount(row_of, lengths.astype(np.float64) ** 2) / np.bincount(row_of, lengths)
    level = np.searchsorted(_LEVEL_EDGES, attended)[order[:n_grouped]]
    groups = order[:n_grouped][np.argsort(level, kind="stable")].reshape(-1, _GROUP_ROWS)
    places = np.empty(n_rows, np.int64)
    places[np.concatenate([random.permutation(groups).ravel(), order[n_grouped:]])] = np.arange(n_rows)
    return places


def count_rows(lengths: np.ndarray, max_length: int, packing: bool) -> int:
    """How many rows `plan_rows` makes, in any epoch and with any seed."""
    return _best_fit(lengths, max_length)[1] if packing else len(lengths)


def _best_fit(lengths: np.ndarray, max_length: int) -> tuple[np.ndarray, int]:
    """The row of each sequence, these in descending order of their lengths, and the number of rows.

    The row that was just given a sequence is the fullest of those that can take another one of its length. So each
    row takes as many of a length as it has space for, before the next row takes any, and all rows with the same space
    can be filled at once.
    """
    counts = np.bincount(lengths, minlength=max_length + 1)
    row_of = np.empty(len(lengths), np.int32)
    open_rows: list[list[np.ndarray]] = [[] for _ in range(max_length + 1)]  # row numbers by the space left in them
    has_rows = 0  # bit s: some row has s tokens of space left
    begin = n_rows = 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        end = begin + int(counts[length])
        while begin < end:
            fitting = has_rows >> length
            if fitting:
                space = length + (fitting & -fitting).bit_length() - 1
                rows = open_rows[space].pop()
            else:
                space = max_length
                needed = -(-(end - begin) // (max_length // length))
                rows = np.arange(n_rows, n_rows + needed, dtype=np.int32)
                n_rows += needed
            each = space // length
            n_full, rest = divmod(min(end - begin, len(rows) * each), each)
            n_given = n_full + (rest > 0)
            taken = n_full * each + rest
            row_of[begin : begin + taken] = np.repeat(rows[:n_given], each)[:taken]
            begin += taken
            for left, changed in (
                (space, rows[n_given:]),
                (space - each * length, rows[:n_full]),
                (space - rest * length, rows[n_full:n_given]),
            ):
                if len(changed):
                    open_rows[left].append(changed)
                    has_rows |= 1 << left
            if not open_rows[space]:
                has_rows &= ~(1 << space)
    return row_of, n_rows


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
        """Its copy there. To a GPU from pinned memory, on the current stream: the host does not wait for it."""

        def moved(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or device.type == "cpu":
                return value
            return value.pin_memory().to(device, non_blocking=True)

        return Batch(**{name: moved(value) for name, value in vars(self).items()})


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


def cost_of(model: PreTrainedModel) -> Cost:
    """Two FLOPs for each parameter that a token is multiplied by, and four for each dimension of a head and pair.

    An estimate, from which nothing but the balance between ranks follows: of stacked experts as many count as a token
    meets, the head is for trained tokens alone, and an architecture that does not say how many heads it has has no
    attention.
    """
    config: Any = model.config
    text = config.get_text_config()

    def number(name: str) -> int:
        value = getattr(text, name, None)
        return value if isinstance(value, int) else 0

    met, heads = number("num_experts_per_tok") or 1, number("num_attention_heads")
    head: Any = model.get_output_embeddings()
    of_head = {} if head is None else {id(p): p.numel() for p in head.parameters()}
    looked_up = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    of_others = sum(
        p.numel() * met // p.shape[0] if p.dim() == 3 else p.numel()
        for p in model.parameters()
        if id(p) not in of_head.keys() | looked_up
    )
    width = (heads * number("head_dim") or number("hidden_size")) if heads else 0
    return Cost(2 * of_others, 2 * sum(of_head.values()), 4 * number("num_hidden_layers") * width)


def deal(rows: Rows, costs: np.ndarray, rank: int, ranks: int, rows_per_micro_batch: int) -> list[list[int]]:
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
        heaviest, least = np.argsort(-costs_of_shares, kind="stable"), np.argsort(totals, kind="stable")
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

    def micro_batches(self, cost: Cost, rank: int, ranks: int, rows_per_micro_batch: int) -> list[list[int]]:
        """See `deal`."""
        costs = cost.of_rows(self.rows, self.lengths, self.trained_counts)
        return deal(self.rows, costs, rank, ranks, rows_per_micro_batch)


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
                chosen = rows.part(begin, end)
                tokens, trained = lengths[chosen.members], trained_counts[chosen.members]
                after = Position(number, epoch, end) if end < len(rows) else Position(number, epoch + 1, 0)
                yield Step(number, epoch, chosen, tokens, trained, int(tokens.sum()), int(trained.sum()), after)
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
        left = -(-(rows - start.row) // rows_per_step) + (epochs - start.epoch - 1) * -(-rows // rows_per_step)
    total = start.step + left
    if max_steps is not None:
        total = max(start.step, min(total, max_steps))
    return Schedule(dataset, max_length, packing, seed, rows_per_step, rows, start, total)
