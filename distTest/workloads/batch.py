"""Batches without a dataset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from shardtune.data.batch import Batch, build_batch


def flat_batch(documents: Sequence[torch.Tensor]) -> Batch:
    """Return one row of these documents, int64 [tokens] each, every token of which is trained."""
    dataset: Any = [(ids.numpy(), np.ones(len(ids), np.bool_)) for ids in documents]
    return build_batch(dataset, list(range(len(documents))), is_flat=True)
