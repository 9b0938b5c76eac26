"""The advice where memory does not suffice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.ranks import config_for

from shardtune.distributed.layout import Layout
from shardtune.errors import OutOfMemory
from shardtune.training.out_of_memory import step_fits, weights_fit


def test_memory_that_python_lacks_gets_advice_too(models, tmp_path):
    layout = Layout.of(config_for(models["llama"], tmp_path))
    said = r"^a micro-batch of 1 \(train.* does not fit the memory \(Unable to allocate .+\) - set"
    with pytest.raises(OutOfMemory, match=said), step_fits(layout):
        np.empty(1 << 60, np.uint8)


def test_an_optimizer_without_memory_is_not_told_to_shorten_rows(models, tmp_path):
    said = r"^the model with its gradients and its optimizer's state does not fit the memory "
    said += r"\((?!the|\d+ \().+\) - share it"
    layout = Layout.of(config_for(models["llama"], tmp_path))
    with pytest.raises(OutOfMemory, match=said), step_fits(layout), weights_fit(layout):
        torch.empty(1 << 60, dtype=torch.uint8)


def test_advice_on_memory_names_only_keys_that_are_not_set_yet(models, tmp_path):
    def advice(fits: Any, *overrides: str) -> str:
        with (
            pytest.raises(OutOfMemory) as raised,
            fits(Layout.of(config_for(models["llama"], tmp_path, *overrides))),
        ):
            torch.empty(1 << 60, dtype=torch.uint8)
        return str(raised.value)

    state = ("model.master_dtype=bfloat16", "optimizer.name=adamw8bit", "lora.rank=16")
    given = advice(weights_fit)
    assert all(setting in given for setting in state)
    given = advice(weights_fit, "lora.rank=4")
    assert not any(setting in given for setting in state)
    spread = ("parallel.expert=2", "model.activation_checkpointing=full")
    given = advice(step_fits, *spread)
    assert "parallel.expert" not in given and "activation_checkpointing" not in given
    assert "- use more GPUs, or start anew" in given
    assert "lower train.micro_batch_size" in advice(step_fits, "train.micro_batch_size=2")
