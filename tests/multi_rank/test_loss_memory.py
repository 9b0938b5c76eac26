"""The loss head holds a fraction of the memory of plain PyTorch."""

from __future__ import annotations

import sys

import pytest
from helpers.commands import REPOSITORY, completed, finish
from helpers.pinned import on_path

PEAK = """
import resource, sys, torch
from test_loss import a_head
torch.set_num_threads(1)
n, width, vocabulary = map(int, sys.argv[1:])
head, targets = a_head(width, vocabulary, False, torch.float32, torch.arange(n))
hidden = torch.randn(n, width, requires_grad=True)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
head(hidden).backward()
print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


@pytest.mark.full
def test_head_and_loss_take_a_fraction_of_the_memory_of_plain_logits():
    """The plain way holds at least the logits and their gradient, in float32."""
    tokens, width, vocabulary = 2048, 32, 151_552
    said = finish(
        completed(
            [sys.executable, "-c", PEAK, str(tokens), str(width), str(vocabulary)],
            env={"PATH": "", "MALLOC_MMAP_THRESHOLD_": "1000000"}
            | on_path(REPOSITORY, REPOSITORY / "tests", REPOSITORY / "tests/unit"),
            timeout_s=300,
        )
    )
    assert int(said) < 0.4 * (2 * tokens * vocabulary * 4)
