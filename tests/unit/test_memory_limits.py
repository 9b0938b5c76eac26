"""The advice where memory does not suffice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.ranks import config_for

from shardtune.errors import OutOfMemory
from shardtune.training.memory import step_fits, weights_fit


def test_memory_that_python_lacks_is_said_too(models: dict[str, Path], tmp_path: Path) -> None:
    config = config_for(models["llama"], tmp_path)
    said = r"^a micro-batch of 1 \(train.* does not fit the memory \(Unable to allocate .+\) - set"
    with pytest.raises(OutOfMemory, match=said), step_fits(config):
        np.empty(1 << 60, np.uint8)


def test_an_optimizer_without_memory_is_not_told_to_shorten_rows(
    models: dict[str, Path], tmp_path: Path
) -> None:
    said = r"^the model with its gradients and its optimizer's state does not fit the memory "
    said += r"\((?!the|\d+ \().+\) - share it"
    with (
        pytest.raises(OutOfMemory, match=said),
        step_fits(config_for(models["llama"], tmp_path)),
        weights_fit(),
    ):
        torch.empty(1 << 60, dtype=torch.uint8)
