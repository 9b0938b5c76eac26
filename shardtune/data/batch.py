"""What one rank feeds the model in one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shardtune.data.dataset import TokenDataset


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
    ids, real, positions = (
        np.zeros(size, np.int64),
        np.zeros(size, np.int64),
        np.zeros(size, np.int64),
    )
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
