"""Packed chats on a model with experts, against TRL and HF Trainer: the benchmarks' `gpu`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch

from distTest.gpu_check.checks import Failed, Outcome, Skipped, is_tiny, require
from distTest.gpu_check.runs import save_tokenizer, work_folder
from distTest.workloads.script import REPOSITORY
from shardtune.distributed.compiling import can_compile

_REQUIREMENTS = REPOSITORY / "benchmarks/requirements-peers.txt"
# Of each side, what its Python must import.
_PEERS = {
    "trl_packed": ("TRL, packed", "import trl, accelerate, datasets"),
    "hf_trainer": ("HF Trainer", "import transformers, accelerate, datasets"),
}
_BUILD_S = 240
_SHAPE = "qwen3-30b-a3b"


def peers() -> Outcome:
    """Measure all sides in two rounds.

    The environment of TRL is built where it is missing and a registry answers. It gets the packages
    of this one first, so that both have one PyTorch, without a download.
    """
    python, absent = _peers_python()
    root = Path(os.environ["GPU_CHECK_PEERS"]).parents[1]
    if absent and root.exists():
        raise Skipped(f"{root} lacks {', '.join(absent.values())} - remove it, or name another")
    if absent:
        try:
            _build(root)
        except (OSError, subprocess.SubprocessError) as error:
            shutil.rmtree(root, ignore_errors=True)
            said = getattr(error, "stderr", None) or str(error)
            raise Skipped(f"{root} cannot be built: {said.strip().splitlines()[-1]}") from error
        python, absent = _peers_python()
    if absent:
        raise Failed(f"{root} was built, and lacks {', '.join(absent.values())}")
    return _speed(python)


def _build(root: Path) -> None:
    run = partial(subprocess.run, check=True, capture_output=True, text=True, timeout=_BUILD_S)
    run([sys.executable, "-m", "venv", str(root)])
    (packages,) = root.glob("lib/python*/site-packages")
    ours = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (packages / "gpu_check.pth").write_text("\n".join(ours) + "\n", encoding="utf-8")
    pip = ["-m", "pip", "install", "--quiet", "--retries", "1", "--timeout", "15"]
    run([str(root / "bin/python"), *pip, "-r", str(_REQUIREMENTS)])


def _peers_python() -> tuple[str, dict[str, str]]:
    """Return the Python that has most peers, the named one or this, and the peers that it lacks."""
    pythons = (os.environ["GPU_CHECK_PEERS"], sys.executable)
    lacks = {python: _lacks(python) for python in pythons}
    python = min(pythons, key=lambda each: len(lacks[each]))
    return python, lacks[python]


def _lacks(python: str) -> dict[str, str]:
    return {side: name for side, (name, test) in _PEERS.items() if not _runs(python, test)}


def _runs(python: str, code: str) -> bool:
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, check=False)
    except OSError:
        return False
    return done.returncode == 0


def _speed(python: str) -> Outcome:
    sides = ["ours", "ours_compiled", *_PEERS]
    texts = []
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
