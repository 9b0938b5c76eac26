"""The loss head holds a fraction of the memory of plain PyTorch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.commands import REPOSITORY

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


def test_it_takes_a_fraction_of_the_memory() -> None:
    """The plain way holds at least the logits and their gradient, in float32."""
    tokens, vocabulary = 2048, 151_552
    assert int(printed(PEAK, tokens, 32, vocabulary)) < 0.4 * (2 * tokens * vocabulary * 4)


A_QUARTER = """
import sys
sys.path.insert(0, "../benchmarks")
import head_memory, torch
from shardtune.model import loss
torch.set_num_threads(1)
head_memory.WIDTH //= 2
loss._CHUNK_BYTES //= 4
loss._SOFTMAX_BYTES //= 4
loss._BLOCK_ROWS //= 2
sys.argv[0] = "head_memory.py"
head_memory.run(head_memory.main)
"""


@pytest.mark.full
def test_it_takes_a_tenth_of_the_memory_with_the_gradient_of_the_weight(tmp_path: Path) -> None:
    """8,192 tokens of width 1,024 and 151,552 words, in which each tensor takes four times as much
    as here."""
    peaks = {}
    for way in "naive", "ours":
        printed(A_QUARTER, way, tmp_path / "told.json", 4096, 75_776)
        peaks[way] = json.loads((tmp_path / "told.json").read_text(encoding="utf-8"))["peak_bytes"]
    assert peaks["ours"] < 0.1 * peaks["naive"]


def printed(script: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=REPOSITORY / "tests",
        # What is freed goes back at once, however small: the peak is then that of the tensors.
        env={
            "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/tests:{REPOSITORY}/tests/unit",
            "PATH": "",
            "MALLOC_MMAP_THRESHOLD_": "1000000",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
