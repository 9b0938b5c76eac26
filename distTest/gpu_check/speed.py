"""Compare whole models of 8e9 parameters with transformers' Trainer: speed, first loss, memory.

Both sides have the same random weights, drawn on the device, and the same full rows of one
document, in bfloat16 with full activation checkpointing. So neither lacks an attention kernel, and
neither needs a file of weights.
"""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from functools import partial
from statistics import median
from typing import Any

from distTest.gpu_check.checks import Outcome, is_tiny, require
from distTest.gpu_check.memory import SMALL, compare, plan_job
from distTest.gpu_check.runs import Run, work_folder
from distTest.workloads.script import REPOSITORY, offline
from distTest.workloads.shapes import slice_of
from shardtune.config import RunConfig

_ROWS, _STEPS, _LR, _LORA_RANK = 4, 6, 1e-4, 16
_TIMED = slice(2, None)  # steps: the first ones compile
# A relative difference of first losses, in bfloat16. Other weights or rows change a first loss by
# only 1e-3: with random weights it is near the logarithm of the vocabulary.
_TOLERANCE = 3e-4
_ALL_WEIGHTS = (
    "model.master_dtype=bfloat16",
    "model.reduce_dtype=bfloat16",
    "optimizer.name=adamw8bit",
)
# One H100, LoRA of rank 16, rows of 4,096 mock tokens, micro-batches of 2 rows:
# https://docs.nvidia.com/nemo/automodel/performance/performance-summary
_PUBLISHED = {("llama3-8b", True): "NeMo Automodel publishes 12,473 tokens/s for one H100"}


def _measure(shape: str, is_lora: bool) -> Outcome:
    length, layers, small = (128, 2, SMALL) if is_tiny() else (4096, None, None)
    part = slice_of(shape, length, math.inf, layers, small)
    micro_batch_size = 2 if is_lora else 1  # the Trainer has no room to train all weights with 2
    job = plan_job(
        part,
        *([f"lora.rank={_LORA_RANK}"] if is_lora else _ALL_WEIGHTS),
        "model.activation_checkpointing=full",
        f"train.micro_batch_size={micro_batch_size}",
        f"train.gradient_accumulation_steps={_ROWS // micro_batch_size}",
        f"train.max_steps={_STEPS}",
        f"optimizer.lr={_LR}",
        "scheduler.name=constant",
        "scheduler.warmup_ratio=0",
    )
    rows = work_folder() / "rows.json"
    run = job.run("ours", "model.compile=auto", ways=[f"noted_rows={rows}"])
    problems, memory, figures = compare(job, run)
    if any(step["trained_tokens"] != _ROWS * (length - 1) for step in run.steps):
        problems.append("rows are not full")
    ours = _figures_of(run)
    said = [_speed("shardtune", ours), memory]
    figures = {"parameters": job.plan.parameters, "memory": figures, "shardtune": ours}
    request = {
        "model": str(work_folder() / "model"),
        "seed": RunConfig.model_fields["seed"].default,
        "rows": str(rows),
        "micro_batch_size": micro_batch_size,
        "accumulation_steps": _ROWS // micro_batch_size,
        "lr": _LR,
        "lora_rank": _LORA_RANK if is_lora else None,
    }
    if is_lora and not importlib.util.find_spec("peft"):
        return require(problems, "; ".join([*said, "no Trainer: peft is not installed"]), figures)
    if isinstance(peer := _run_trainer(request), str):
        return require([*problems, f"the Trainer failed: {peer}"], "; ".join(said), figures)
    speed = _ROWS * length / median(peer["step_s"][_TIMED.start - 1 :])
    peer |= {"tokens_per_second": speed}
    peer["mfu"] = ours["mfu"] and ours["mfu"] * speed / ours["tokens_per_second"]
    apart = abs(ours["losses"][0] / peer["losses"][0] - 1)
    if not apart <= _TOLERANCE:
        problems.append(f"the first loss is {apart:.1e} from the Trainer's")
    both = zip(ours["losses"], peer["losses"], strict=True)
    said += [
        _speed("Trainer", peer),
        f"{ours['tokens_per_second'] / speed:.2f} of its speed",
        f"losses {', '.join(f'{a:.4f} ({b:.4f})' for a, b in both)}",
        *filter(None, [_PUBLISHED.get((shape, is_lora))]),
    ]
    return require(problems, "; ".join(said), figures | {"trainer": peer})


def _figures_of(run: Run) -> dict[str, Any]:
    timed = run.steps[_TIMED]
    mfu = [step["mfu"] for step in timed]
    return {
        "losses": [step["loss"] for step in run.steps],
        "step_s": [step["seconds"] for step in timed],
        "first_step_s": run.steps[0]["seconds"],
        "tokens_per_second": median(step["tokens_per_second"] for step in timed),
        "mfu": None if None in mfu else median(mfu),
        "peak_bytes": run.steps[-1]["memory_bytes"],
        "compile": [line for _, line in run.lines if "Compile: " in line],
    }


def _speed(side: str, figures: dict[str, Any]) -> str:
    mfu = "unknown" if figures["mfu"] is None else f"{figures['mfu']:.1%}"
    return (
        f"{side} {figures['tokens_per_second']:.0f} tokens/s, MFU {mfu}, "
        f"{figures['peak_bytes'] / 1e9:.1f} GB"
    )


def _run_trainer(request: dict[str, Any]) -> Any:
    """Return the Trainer's figures, or a line why it failed."""
    result = work_folder() / "trainer.json"
    command = [sys.executable, "-m", "distTest.gpu_check.trainer", json.dumps(request)]
    given: Any = {"env": offline(), "cwd": REPOSITORY, "text": True, "capture_output": True}
    done = subprocess.run([*command, str(result)], **given, check=False)
    print(done.stdout, done.stderr, flush=True)
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1][:300]
    return json.loads(result.read_text(encoding="utf-8"))


llama3_8b_lora = partial(_measure, "llama3-8b", True)
llama3_8b = partial(_measure, "llama3-8b", False)
qwen3_8b_lora = partial(_measure, "qwen3-8b", True)
