"""How the rounding of weights and moments changes what a run learns.

    python -m benchmarks.rounding --model models/SmolLM2-135M-Instruct --results benchmarks/rounding
    PEERS_PYTHON -m benchmarks.rounding --plot --results benchmarks/rounding

The first trains the model four times on the same rows, at the same time, through train_fsdp.py,
and writes rounding.json and rounding.md. The second draws rounding.png, in the peers' environment,
which has matplotlib.

Rounding to the nearest value is in this file alone: it is what the product avoids. Updates are
compiled, which changes no bit of them.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
VARIANTS = {
    "float32": [],
    "bfloat16, stochastic": ["model.master_dtype=bfloat16"],
    "bfloat16, stochastic, adamw8bit": ["model.master_dtype=bfloat16", "optimizer.name=adamw8bit"],
    "bfloat16, nearest": ["model.master_dtype=bfloat16"],
}
COLOURS = dict(zip(VARIANTS, ("#222222", "#2a6f97", "#52b788", "#c1121f"), strict=True))
ROW = 64  # tokens; a step has one row
SMOOTHED_OVER = 25  # steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--results", type=Path, required=True, help="path without suffix")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", default="1e-5")
    parser.add_argument("--plot", action="store_true")
    options = parser.parse_args()
    if options.plot:
        plot(json.loads(options.results.with_suffix(".json").read_text(encoding="utf-8")), options)
        return
    with tempfile.TemporaryDirectory() as folder:
        run_dirs = {name: Path(folder) / name.replace(", ", "-") for name in VARIANTS}
        started = [start(name, run_dir, options) for name, run_dir in run_dirs.items()]
        codes = [process.wait() for process in started]
        if any(codes):
            sys.exit(f"ERROR: the runs ended with {codes} - see their output above")
        results = {name: read_losses(run_dir) for name, run_dir in run_dirs.items()}
    options.results.with_suffix(".json").write_text(json.dumps(results), encoding="utf-8")
    options.results.with_suffix(".md").write_text(table(results, options), encoding="utf-8")


def start(name: str, run_dir: Path, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    given = [
        f"model.path={options.model.resolve()}",
        # In bfloat16 the forward would round the float32 weights, too.
        "model.compute_dtype=float32",
        f"data.train={REPOSITORY / 'examples/chats/train.jsonl'}",
        f"data.eval={REPOSITORY / 'examples/chats/eval.jsonl'}",
        f"data.max_length={ROW}",
        "data.overflow=split",
        f"train.max_steps={options.steps}",
        "train.epochs=99",
        f"optimizer.lr={options.lr}",
        "checkpoint.every_steps=0",
        "export.final=false",
        f"run.dir={run_dir}",
        *VARIANTS[name],
    ]
    command = [sys.executable, "-m", "benchmarks.rounding", "train", name, *given]
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})


def train(name: str, arguments: list[str]) -> None:
    """Run train_fsdp.py in this process with compiled updates, and the rounding of a variant."""
    import torch

    from shardtune.training import low_precision_optim, optim

    def store_nearest(target: torch.Tensor, value: torch.Tensor, noise: torch.Tensor) -> None:
        target.copy_(value)

    if name.endswith("nearest"):
        low_precision_optim._store = store_nearest
    build = optim.LowPrecisionAdamW

    def build_compiled(*given: Any, **options: Any) -> torch.optim.Optimizer:
        return build(*given, **options | {"compiled": True})

    optim.LowPrecisionAdamW = build_compiled
    sys.argv = [str(REPOSITORY / "train_fsdp.py"), "--config", os.devnull, *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")


def read_losses(run_dir: Path) -> dict[str, Any]:
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line) for line in lines]
    steps = [entry for entry in entries if entry["kind"] == "step"]
    return {
        "train": [entry["loss"] for entry in steps],
        "eval": {entry["step"]: entry["loss"] for entry in entries if entry["kind"] == "eval"},
        "memory_bytes": max(entry.get("memory_bytes", 0) for entry in steps),
    }


def smoothed(losses: list[float]) -> list[float]:
    """Return the mean of each loss and those before it, of SMOOTHED_OVER at most."""
    windows = (losses[max(0, i + 1 - SMOOTHED_OVER) : i + 1] for i in range(len(losses)))
    return [sum(window) / len(window) for window in windows]


def table(results: dict[str, Any], options: argparse.Namespace) -> str:
    exact = results["float32"]
    first, last = exact["eval"]
    lines = [
        f"# Rounding: {options.model.name}, {options.steps} steps at a peak of {options.lr}",
        "",
        f"Written by `benchmarks/rounding.py`. Each step has one row of {ROW} tokens, the same in",
        "each run; forward and backward are float32. The held-out loss is over all of",
        f"examples/chats/eval.jsonl, {exact['eval'][first]:.4f} before training. The training loss",
        f"is the mean of the last {SMOOTHED_OVER} steps.",
        "",
        "| weights and moments | held-out loss | to float32 | training loss | to float32 |",
        "|---|---|---|---|---|",
    ]
    for name, losses in results.items():
        cells = [name]
        for value, reference in (
            (losses["eval"][last], exact["eval"][last]),
            (smoothed(losses["train"])[-1], smoothed(exact["train"])[-1]),
        ):
            cells += [f"{value:.4f}", f"{value / reference - 1:+.2%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def plot(results: dict[str, Any], options: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    exact = smoothed(results["float32"]["train"])
    steps = range(1, len(exact) + 1)
    right.axhspan(-0.2, 0.2, color="#eeeeee")
    for name, losses in results.items():
        curve = smoothed(losses["train"])
        percent = [100 * (loss / base - 1) for loss, base in zip(curve, exact, strict=True)]
        left.plot(steps, curve, label=name, color=COLOURS[name], linewidth=1.3)
        right.plot(steps, percent, color=COLOURS[name], linewidth=1.3)
    left.set(title=f"Training loss, mean of the last {SMOOTHED_OVER} steps", xlabel="step")
    left.legend(frameon=False, fontsize=9)
    right.set(title="Against float32, %  (grey: within 0.2%)", xlabel="step")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(options.results.with_suffix(".png"), dpi=150)


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(sys.argv[2], sys.argv[3:])
    else:
        main()
