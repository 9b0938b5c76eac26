"""Measure packed chats on a model with experts, against TRL and HF Trainer, by `benchmarks gpu`."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from distTest.gpu_check.checks import Failed, Outcome, Skipped, is_tiny, require
from distTest.gpu_check.runs import save_tokenizer, work_folder
from shardtune.distributed.compiling import can_compile

_SHAPE, _PEERS = "qwen3-30b-a3b", ("trl_packed", "hf_trainer")
_NEEDS = "import trl, accelerate, datasets"


def peers() -> Outcome:
    """Measure all sides in two rounds."""
    pythons = (os.environ["GPU_CHECK_PEERS"], sys.executable)
    python = next((path for path in pythons if _runs(path, _NEEDS)), None)
    if python is None:
        raise Skipped(f"{' and '.join(pythons)} lack TRL - make .venv/peers/.installed")
    sides, texts = ["ours", "ours_compiled", *_PEERS], list[str]()
    if not can_compile(torch.device("cuda")):
        sides.remove("ours_compiled")
        texts.append("compiled: skipped, since nothing is compiled here")
    tokenizer, results = work_folder() / "tokenizer", work_folder() / "GPU.md"
    save_tokenizer(tokenizer)
    command = [
        *(sys.executable, "-m", "benchmarks", "gpu", "--tokenizer", str(tokenizer)),
        *("--peers", python, "--results", str(results), "--work", str(work_folder() / "runs")),
        *("--shapes", _SHAPE, "--sides", *sides, "--rounds", "2", "--steps", "3"),
        *(["--tiny", "--dtype", "float32"] if is_tiny() else []),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    if not results.is_file():
        lines = done.stderr.strip().splitlines()
        raise Failed(lines[-1] if lines else f"gpu.py ended with {done.returncode}")
    text = results.read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    figures = {f"{row[3]}, rows of {row[1]}": row[4:] for row in rows if row[0] == _SHAPE}
    measured = [
        f"{side} {values[0]} tokens/s, MFU {values[1]}" if len(values) > 1 else f"{side}: {values}"
        for side, values in figures.items()
    ]
    problems = [done.stderr.strip().splitlines()[-1]] if done.returncode else []
    return require(problems, "; ".join([*measured, *texts]), {"rows": figures})


def _runs(python: str, code: str) -> bool:
    try:
        return not subprocess.run([python, "-c", code], capture_output=True, check=False).returncode
    except OSError:
        return False
