"""Batches without a dataset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardtune.data.batch import Batch, build_batch


def batch_of(
    documents: Sequence[torch.Tensor],
    trained: Sequence[torch.Tensor] | None = None,
    is_flat: bool = True,
) -> Batch:
    """Return a batch of documents, int64 [tokens] each. `trained`: bool [tokens] each, or all."""
    flags = trained or [torch.ones(len(ids), dtype=torch.bool) for ids in documents]
    dataset: Any = [(i.numpy(), f.numpy()) for i, f in zip(documents, flags, strict=True)]
    return build_batch(dataset, list(range(len(documents))), is_flat)
