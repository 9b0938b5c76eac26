"""Tokens per second and MFU of real shapes, against TRL and HF Trainer: the benchmarks' `gpu`."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

from distTest.gpu_check.checks import Failed, Outcome, is_tiny, require
from distTest.gpu_check.runs import save_tokenizer, work_folder

# Of each side, what its Python must import.
_PEERS = {
    "trl_packed": ("TRL, packed", "import trl, accelerate, datasets"),
    "hf_trainer": ("HF Trainer", "import transformers, accelerate, datasets"),
}


def _measure(shape: str) -> Outcome:
    """Measure all sides that are there; those that are not are named."""
    peers = os.environ["GPU_CHECK_PEERS"]
    absent = {side: name for side, (name, test) in _PEERS.items() if not _runs(peers, test)}
    sides = ["ours", *(side for side in _PEERS if side not in absent)]
    tokenizer, results = work_folder() / "tokenizer", work_folder() / "GPU.md"
    save_tokenizer(tokenizer)
    command = [
        *(sys.executable, "-m", "benchmarks", "gpu", "--tokenizer", str(tokenizer)),
        *("--peers", peers, "--results", str(results), "--work", str(work_folder() / "runs")),
        *("--shapes", shape, "--sides", *sides, "--rounds", "1", "--steps", "3"),
        *(["--tiny", "--dtype", "float32"] if is_tiny() else ["--lengths", "4096"]),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    if not results.is_file():
        lines = done.stderr.strip().splitlines()
        raise Failed(lines[-1] if lines else f"gpu.py ended with {done.returncode}")
    text = results.read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    figures = {row[3]: row[4:] for row in rows if row[0] == shape}
    texts = [
        f"{side} {values[0]} tokens/s, MFU {values[1]}" if len(values) > 1 else f"{side}: {values}"
        for side, values in figures.items()
    ]
    if absent:
        texts.append(f"skipped, since {peers} lacks them: {', '.join(absent.values())}")
    problems = [done.stderr.strip().splitlines()[-1]] if done.returncode else []
    return require(problems, "; ".join(texts), {"rows": figures, "absent": list(absent)})


def _runs(python: str, code: str) -> bool:
    done = subprocess.run([python, "-c", code], capture_output=True, check=False)
    return done.returncode == 0


qwen3_1_7b = partial(_measure, "qwen3-1.7b")
qwen3_4b = partial(_measure, "qwen3-4b")
llama3_8b = partial(_measure, "llama3-8b")
glm_4_5_air = partial(_measure, "glm-4.5-air, real width")
