"""A plan's loss launches and moves what PyTorch's compiler would make of it for a GPU."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.commands import finish
from helpers.pretended import needs_compiler, on_gpus
from pretend_gpu.compiled import Compiler
from torch._dynamo.utils import counters

from shardtune.distributed import compiling
from shardtune.model import loss
from shardtune.model.loss import LossHead, compile_loss
from shardtune.planner.arithmetic.figures import Kernel
from shardtune.planner.arithmetic.roofline import launched
from shardtune.planner.simulation.tracker import Tracker

pytestmark = needs_compiler

ROWS, VOCABULARY = 64, 5000


def moved_bytes(kernels: Counter[Kernel]) -> int:
    return sum(n * kernel.n_bytes for kernel, n in kernels.items())


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


def test_a_plans_loss_is_that_of_the_compiler(tmp_path):
    finish(on_gpus(1, count, tmp_path / "counted", cwd=tmp_path))
    compiled = json.loads((tmp_path / "counted").read_text(encoding="utf-8"))
    for wants_gradients, (kernels, n_bytes) in zip((True, False), compiled, strict=True):
        tracker, logits = Tracker(), torch.zeros(ROWS, VOCABULARY, dtype=torch.bfloat16)
        with tracker.following():
            loss._planned_add_loss(None, logits, None, wants_gradients, None)
        assert launched(tracker.kernels) == kernels
        # The compiler's kernels hand a number a row to one another.
        assert moved_bytes(tracker.kernels) == pytest.approx(n_bytes, rel=0.01)


def count_graphs() -> None:
    """Compile the loss on few rows, and use it on chunks of any length."""
    compiling.can_compile = lambda _: True
    torch.compile = partial(torch.compile, backend="eager")
    width, device, dtype = 16, torch.device("cuda"), torch.bfloat16
    head: Any = LossHead(width, VOCABULARY, bias=False, device=device, dtype=dtype)
    head.batch, head.is_last = None, True
    model: Any = SimpleNamespace(get_output_embeddings=lambda: head)
    compile_loss(model, dtype, device, evaluates=True)
    graphs = counters["stats"]["unique_graphs"]
    loss._CHUNK_BYTES["cuda"] = 8 * VOCABULARY * dtype.itemsize
    for rows in (20, 8, 5):  # chunks of eight, and a last one of four or five
        for wants_gradients in (True, False):
            targets = torch.zeros(rows, dtype=torch.int64, device=device)
            given = torch.zeros(rows, width, dtype=dtype, device=device), head.weight, None, targets
            loss._SummedCrossEntropy.apply(*given, wants_gradients, "cuda")
    assert graphs == counters["stats"]["unique_graphs"] == 2


def test_a_loss_that_is_compiled_before_the_first_step_is_compiled_for_all(tmp_path):
    finish(on_gpus(1, count_graphs, cwd=tmp_path))
