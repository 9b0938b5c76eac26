"""The lines of the steps: which are logged, and over which steps their speed is a mean."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from helpers.ranks import world_of
from torch import distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from shardtune.log import setup_logging
from shardtune.model.flops import DevicePeak
from shardtune.training.observers.metrics import Metrics, StepEnded, StepStats
from shardtune.training.observers.step_log import StepLog


def test_a_line_has_the_mean_speed_since_the_line_before_it(tmp_path, capsys):
    setup_logging(True, True)
    metrics = Metrics(tmp_path / "metrics.jsonl", world_of(0, 1, dist.HashStore()), None)
    small = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "vocab_size": 9}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **small))
    saver: Any = SimpleNamespace(not_saved="")
    log = StepLog(metrics, model, 20, DevicePeak(None, "known"), 1, saver)
    stats = StepStats(1.5, 0.5, False, 10**9, 0, 0.0, np.empty(0))
    for number, seconds in enumerate([8.0, 2.0, 1.0, 1.0], 1):
        step: Any = SimpleNamespace(
            number=number, epoch=0, tokens=100, trained_tokens=9, lengths=np.array([100])
        )
        ended = StepEnded(step, stats, 1e-3, seconds, {}, is_due=number % 2 == 0)
        saver.not_saved = "checkpoint_0000002 was not saved: why" * (number == 4)
        log.step_ended(cast(StepEnded, ended))
    first, second = re.findall(r"^Step .*", capsys.readouterr().out, re.MULTILINE)
    assert first.startswith("Step 2/20 | Loss: 1.5000 | Grad Norm: 0.500 | LR: 1.00e-03 | ")
    assert " | 0.200 it/s | 20 tok/s | 1.0 GB | ETA 1m30s | " in first
    assert " | 1.00 it/s | 100 tok/s | 1.0 GB | ETA 0m16s | " in second
    assert second.endswith(" | checkpoint_0000002 was not saved: why") and "not saved" not in first
