"""A plan's loss launches and moves what PyTorch's compiler would make of it for a GPU."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from helpers.pretended import needs_compiler, on_gpus
from pretend_gpu.compiled import Compiler

from shardtune.model import loss
from shardtune.planner.kernels import Kernel
from shardtune.planner.roofline import launched, moved_bytes
from shardtune.planner.tracker import Tracker

pytestmark = needs_compiler

ROWS, VOCABULARY = 64, 5000


def count(out: Path) -> None:
    """Write kernels and bytes of the compiled loss with gradients, and without."""
    counted = []
    for wants_gradients in (True, False):
        kernels: Counter[Kernel] = Counter()
        compiled = Compiler(kernels.update).compile(loss._add_loss_at_once, dynamic=True)
        with torch.device("cuda"):
            logits = torch.zeros(ROWS, VOCABULARY, dtype=torch.bfloat16)
            targets = torch.zeros(ROWS, 1, dtype=torch.int64)
            compiled(torch.zeros(()), logits, targets, wants_gradients, logits[:0])
        counted.append([launched(kernels), moved_bytes(kernels)])
    out.write_text(json.dumps(counted), encoding="utf-8")


def test_a_plans_loss_is_that_of_the_compiler(tmp_path: Path) -> None:
    done = on_gpus(1, count, tmp_path / "counted", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = json.loads((tmp_path / "counted").read_text(encoding="utf-8"))
    for wants_gradients, (kernels, n_bytes) in zip((True, False), compiled, strict=True):
        tracker, logits = Tracker(), torch.zeros(ROWS, VOCABULARY, dtype=torch.bfloat16)
        with tracker.following():
            loss._planned_add_loss(None, logits, None, wants_gradients, None)
        assert launched(tracker.kernels) == kernels
        # The compiler's kernels hand a number a row to one another.
        assert moved_bytes(tracker.kernels) == pytest.approx(n_bytes, rel=0.01)
