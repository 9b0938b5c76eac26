"""How the rounding of weights and moments changes what a run learns.

Trains the model four times on the same rows, at the same time, through train_fsdp.py, and writes
rounding.json, rounding.md and the plot. Rounding to the nearest value is what the product avoids.
Updates are compiled, which changes no bit of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from benchmarks.plot import SMOOTHED_OVER, smoothed
from benchmarks.sides import run_pinned
from benchmarks.tables import table
from distTest.workloads.script import REPOSITORY, absolute, environment, train_command
from shardtune.report.read_run import read_run

SHORT = {"steps": 4}
_BFLOAT16 = {"model.master_dtype": "bfloat16"}
VARIANTS: dict[str, dict[str, str]] = {
    "float32": {},
    "bfloat16, stochastic": _BFLOAT16,
    "bfloat16, stochastic, adamw8bit": _BFLOAT16 | {"optimizer.name": "adamw8bit"},
    "bfloat16, nearest": _BFLOAT16,
}
_HEADER = "| weights and moments | held-out loss | to float32 | training loss | to float32 |"
ROW = 64  # tokens; a step has one row


def add_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", type=absolute, required=True)
    add("--results", type=absolute, default=REPOSITORY / "benchmarks/rounding.md")
    add("--peers", type=absolute, help="a Python that has matplotlib; without it there is no plot")
    add("--steps", type=int, default=200)
    add("--lr", default="1e-5")


def main(options: Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_dirs = {name: Path(folder) / name.replace(", ", "-") for name in VARIANTS}
        started = [start(name, run_dir, options) for name, run_dir in run_dirs.items()]
        codes = [process.wait() for process in started]
        if any(codes):
            sys.exit(f"ERROR: the runs ended with {codes} - see their output above")
        results = {name: read_losses(run_dir) for name, run_dir in run_dirs.items()}
        file, plot = (options.results.with_suffix(suffix) for suffix in (".json", ".png"))
        file.write_text(json.dumps(results), encoding="utf-8")
        options.results.write_text(report(results, options), encoding="utf-8")
        if options.peers:
            command = [options.peers, "-m", "benchmarks.plot", "rounding", file, plot]
            log = Path(folder) / "plot.log"
            if not run_pinned(command, log):
                sys.exit(f"{log.read_text(encoding='utf-8')}\nERROR: no plot - see the lines above")


def start(name: str, run_dir: Path, options: Namespace) -> subprocess.Popen[bytes]:
    settings = {
        "model.path": options.model,
        # In bfloat16 the forward would round the float32 weights, too.
        "model.compute_dtype": "float32",
        "data.train": REPOSITORY / "examples/chats/train.jsonl",
        "data.eval": REPOSITORY / "examples/chats/eval.jsonl",
        "data.max_length": ROW,
        "data.overflow": "split",
        "train.max_steps": options.steps,
        "train.epochs": 99,
        "optimizer.lr": options.lr,
        "checkpoint.every_steps": 0,
        "export.final": False,
        "run.dir": run_dir,
        **VARIANTS[name],
    }
    ways = "compiled_updates" + ",rounded_to_nearest" * name.endswith("nearest")
    command = train_command(settings, ways=ways)
    return subprocess.Popen(command, env=environment(), cwd=REPOSITORY)


def read_losses(run_dir: Path) -> dict[str, Any]:
    record = read_run(run_dir)
    steps = record.of_kind("step")
    return {
        "train": [entry["loss"] for entry in steps],
        "eval": {entry["step"]: entry["loss"] for entry in record.of_kind("eval")},
        "memory_bytes": max(entry.get("memory_bytes", 0) for entry in steps),
    }


def report(results: dict[str, Any], options: Namespace) -> str:
    exact = results["float32"]
    first, last = exact["eval"]
    rows = []
    for name, losses in results.items():
        cells = [name]
        for value, reference in (
            (losses["eval"][last], exact["eval"][last]),
            (smoothed(losses["train"])[-1], smoothed(exact["train"])[-1]),
        ):
            cells += [f"{value:.4f}", f"{value / reference - 1:+.2%}"]
        rows.append(f"| {' | '.join(cells)} |")
    lines = [
        f"# Rounding: {options.model.name}, {options.steps} steps at a peak of {options.lr}",
        "",
        f"Written by `python -m benchmarks rounding`. Each step has one row of {ROW} tokens, the",
        "same in each run; forward and backward are float32. The held-out loss is over all of",
        f"examples/chats/eval.jsonl, {exact['eval'][first]:.4f} before training. The training loss",
        f"is the mean of the last {SMOOTHED_OVER} steps.",
        "",
        *table(_HEADER, rows),
    ]
    return "\n".join(lines)
