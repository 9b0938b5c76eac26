"""The launch script, with its preflight, on pretended GPUs: what a user types on a node."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.chats import chats, write_jsonl
from helpers.commands import REPOSITORY, completed, read_metrics
from helpers.pinned import on_path
from helpers.pretended import needs_compiler
from helpers.small_runs import SETTINGS, write_inputs

pytestmark = [needs_compiler, pytest.mark.full]


def on_pretended(gpus: int, *command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command as `python -m tests.pretend_gpu` does, from another folder."""
    environ = os.environ | on_path(REPOSITORY) | {"NNODES": "1", "GPUS_PER_NODE": str(gpus)}
    pretended = [sys.executable, "-m", "tests.pretend_gpu", f"--gpus={gpus}", *command]
    return completed(pretended, cwd=cwd, env=environ, timeout_s=500)


def test_a_node_is_checked_and_trains_on_its_gpus(tmp_path, models):
    gpus = 2
    folder = write_inputs(tmp_path, models["glm"])
    write_jsonl(folder / "eval.jsonl", chats(5, seed=1))
    settings = [
        *(setting for setting in SETTINGS if "compute_dtype" not in setting),
        "data.eval=eval.jsonl",
        "train.max_steps=2",
        "eval.keep_best=true",
    ]
    script = str(REPOSITORY / "launch_node0.sh")
    done = on_pretended(gpus, script, "--config", "config.yaml", *settings, cwd=folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    table = f"Preflight: {gpus} x NVIDIA H100 80GB HBM3, all-reduce "
    assert table in done.stdout, done.stdout
    assert "bfloat16 in forward and backward" in done.stdout
    assert "(varlen attention by FlashAttention 2, as 3 is not there (" in done.stdout
    assert [step["step"] for step in read_metrics(folder / "run", "step")] == [1, 2]
    assert (folder / "run/model/model.safetensors").is_file()
    checked = on_pretended(
        gpus, sys.executable, "-m", "distTest.preflight", "--config", "config.yaml", *settings,
        cwd=folder,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout[-3000:] + checked.stderr[-3000:]
    assert "NVIDIA H100" in checked.stdout
