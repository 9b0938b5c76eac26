"""The tensors that one rank feeds to the model in one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shardtune.data.dataset import TokenDataset


@dataclass(frozen=True)
class Batch:
    """The sequences of one micro-batch of one rank, flat or padded.

    The documents a b c and d e, of which b, c and e are trained, as a flat batch:

        input_ids       a b c d e       [1, tokens]
        position_ids    0 1 2 0 1       [1, tokens], restart with each document
        attention_mask  None
        boundaries      0     3   5     begin of each document in the row, and the end
        predicting      0 1   3         positions whose next token is trained
        targets         b c   e         that token

    Attention keeps documents apart by `boundaries`, or by the positions, as transformers does.
    And as a padded batch, a row for each document:

        input_ids       a b c           [documents, longest]
                        d e 0
        position_ids    None
        attention_mask  1 1 1           [documents, longest]
                        1 1 0
        predicting      0 1   3         positions in the flattened rows
        targets         b c   e

    Padding is on the right, where causal attention does not look.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor | None
    attention_mask: torch.Tensor | None
    predicting: torch.Tensor  # int64 [trained tokens]
    targets: torch.Tensor  # int64 [trained tokens]
    lengths: list[int]  # tokens of each document
    boundaries: torch.Tensor  # int32 [documents + 1]

    def inputs(self) -> dict[str, torch.Tensor]:
        """Return the arguments of a model's forward."""
        names = ("input_ids", "position_ids", "attention_mask")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def to(self, device: torch.device) -> Batch:
        """Copy to a device; to a GPU from pinned memory, so that the host does not wait."""
        if device.type == "cpu":
            return self

        def move(value: Any) -> Any:
            is_tensor = isinstance(value, torch.Tensor)
            return value.pin_memory().to(device, non_blocking=True) if is_tensor else value

        return Batch(**{name: move(value) for name, value in vars(self).items()})


def build_batch(dataset: TokenDataset, sequences: list[int], is_flat: bool) -> Batch:
    """Build the batch of these sequences.

    Without any, it holds the shortest sequence of the dataset, untrained: the rank must take part.
    """
    documents = [dataset[i] for i in sequences]
    if not documents:
        # A real sequence: in gemma3n a row of padding, whose embedding is zero, has gradients
        # that are not finite.
        tokens, _ = dataset[int(dataset.lengths.argmin())]
        documents = [(tokens, np.zeros(len(tokens), np.bool_))]
    lengths = [len(tokens) for tokens, _ in documents]
    boundaries = np.cumsum([0, *lengths])
    width = sum(lengths) if is_flat else max(lengths)
    n_rows = 1 if is_flat else len(documents)
    starts = boundaries[:-1] if is_flat else np.arange(n_rows) * width
    input_ids, mask, positions = np.zeros((3, n_rows * width), np.int64)
    predicting, targets = [], []
    for (tokens, trained), start in zip(documents, starts.tolist(), strict=True):
        document = slice(start, start + len(tokens))
        input_ids[document] = tokens
        mask[document] = 1
        positions[document] = np.arange(len(tokens))
        before_trained = np.flatnonzero(trained[1:])
        predicting.append(before_trained + start)
        targets.append(tokens[before_trained + 1])
    shape = (n_rows, width)
    return Batch(
        torch.from_numpy(input_ids).view(shape),
        torch.from_numpy(positions).view(shape) if is_flat else None,
        None if is_flat else torch.from_numpy(mask).view(shape),
        torch.from_numpy(np.concatenate(predicting)),
        torch.from_numpy(np.concatenate(targets)),
        lengths,
        torch.from_numpy(boundaries.astype(np.int32)),
    )
