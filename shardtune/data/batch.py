"""The tensors that one rank feeds to the model in one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch


class Sequences(Protocol):
    """Sequences by their number: token ids int64 [length], and their weights [length], 0 to 1."""

    lengths: np.ndarray  # tokens of each

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]: ...


# The documents a b c and d e, of which b, c and e are trained, as a flat batch:
#
#     input_ids       a b c d e       [1, tokens]
#     position_ids    0 1 2 0 1       [1, tokens], restart with each document
#     attention_mask  None
#     boundaries      0     3   5     begin of each document in the row, and the end
#     predicting      0 1   3         positions whose next token is trained
#     targets         b c   e         that token
#     weights         None            of these tokens in the loss, if not all count 1
#
# Attention keeps documents apart by `boundaries`, or by the positions, as transformers does.
# And as a padded batch, a row for each document:
#
#     input_ids       a b c           [documents, longest]
#                     d e 0
#     position_ids    None
#     attention_mask  1 1 1           [documents, longest]
#                     1 1 0
#     predicting      0 1   3         positions in the flattened rows
#     targets         b c   e
#
# Padding is on the right, where causal attention does not look.
@dataclass(frozen=True)
class Batch:
    """The sequences of one micro-batch of one rank, flat or padded."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor | None
    attention_mask: torch.Tensor | None
    predicting: torch.Tensor  # int64 [trained tokens]
    targets: torch.Tensor  # int64 [trained tokens]
    lengths: list[int]  # tokens of each document
    boundaries: torch.Tensor  # int32 [documents + 1]
    # If ranks share a flat row: the number of tokens of each rank. All fields but `lengths` and
    # `boundaries` then have this rank's slice alone.
    slices: list[int] | None = None
    weights: torch.Tensor | None = None  # float32 [trained tokens]; None: each counts 1

    def inputs(self) -> dict[str, torch.Tensor]:
        """Return the arguments of a model's forward."""
        names = ("input_ids", "position_ids", "attention_mask")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def slice_of(self, number: int, ranks: int) -> Batch:
        """Return one rank's slice of a flat row that ranks share. None is empty."""
        assert self.position_ids is not None
        slices = slice_lengths(self.input_ids.shape[1], ranks)
        begin = sum(slices[:number])
        end = begin + slices[number]
        is_own = (self.predicting >= begin) & (self.predicting < end)
        return replace(
            self,
            input_ids=self.input_ids[:, begin:end],
            position_ids=self.position_ids[:, begin:end],
            predicting=self.predicting[is_own] - begin,
            targets=self.targets[is_own],
            slices=slices,
            weights=None if self.weights is None else self.weights[is_own],
        )

    def to(self, device: torch.device) -> Batch:
        """Copy to a device; to a GPU from pinned memory, so that the host does not wait."""
        if device.type == "cpu":
            return self

        def move(value: Any) -> Any:
            is_tensor = isinstance(value, torch.Tensor)
            return value.pin_memory().to(device, non_blocking=True) if is_tensor else value

        return Batch(**{name: move(value) for name, value in vars(self).items()})


def slice_lengths(tokens: int, ranks: int) -> list[int]:
    """Return the lengths of a row's slices: they differ by one token, longer ones first."""
    ends = [-(-tokens * number // ranks) for number in range(ranks + 1)]
    return [end - begin for begin, end in pairwise(ends)]


def build_batch(
    dataset: Sequences,
    sequences: list[int],
    is_flat: bool,
    share: tuple[int, int] = (0, 1),
) -> Batch:
    """Build the batch of these sequences, or a rank's slice of a flat one. `share`: slice, slices.

    Without sequences it has the dataset's shortest one, untrained, since every rank must take part.
    """
    documents = [dataset[i] for i in sequences]
    if not documents:
        # It is a real sequence: padding has a zero embedding, whose gradients in gemma3n are not
        # finite.
        tokens, _ = dataset[int(dataset.lengths.argmin())]
        documents = [(tokens, np.zeros(len(tokens), np.bool_))]
    number, ranks = share
    if (missing := ranks - sum(len(tokens) for tokens, _ in documents)) > 0:
        # A document of real tokens, untrained, so that each rank that shares the row has one.
        documents.append((np.resize(documents[0][0], missing), np.zeros(missing, np.bool_)))
    lengths = [len(tokens) for tokens, _ in documents]
    boundaries = np.cumsum([0, *lengths])
    width = sum(lengths) if is_flat else max(lengths)
    n_rows = 1 if is_flat else len(documents)
    starts = boundaries[:-1] if is_flat else np.arange(n_rows) * width
    input_ids, mask, positions = np.zeros((3, n_rows * width), np.int64)
    predicting, targets, weights = [], [], []
    for (tokens, trained), start in zip(documents, starts.tolist(), strict=True):
        document = slice(start, start + len(tokens))
        input_ids[document] = tokens
        mask[document] = 1
        positions[document] = np.arange(len(tokens))
        before_trained = np.flatnonzero(trained[1:])
        predicting.append(before_trained + start)
        targets.append(tokens[before_trained + 1])
        weights.append(trained[before_trained + 1])
    of_targets = np.concatenate(weights).astype(np.float32)
    shape = (n_rows, width)
    batch = Batch(
        torch.from_numpy(input_ids).view(shape),
        torch.from_numpy(positions).view(shape) if is_flat else None,
        None if is_flat else torch.from_numpy(mask).view(shape),
        torch.from_numpy(np.concatenate(predicting)),
        torch.from_numpy(np.concatenate(targets)),
        lengths,
        torch.from_numpy(boundaries.astype(np.int32)),
        weights=None if (of_targets == 1).all() else torch.from_numpy(of_targets),
    )
    return batch if ranks == 1 else batch.slice_of(number, ranks)
