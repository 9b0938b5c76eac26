"""Time the optimizer steps of every side in turn, on one pinned core."""

from __future__ import annotations

import json
import math
import os
import sys
from argparse import Namespace
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.sides import NAMES, Job, Side, counted, in_turns, run_pinned
from benchmarks.tables import describe_count, describe_losses, spread, table
from distTest.workloads.chats import write_chats
from shardtune.model.flops import ModelFlops, count_flops, measure_matmul_rate

_REFERENCE = "hf_trainer"
# If matmul rates before and after runs differ by more than this share, the core was not the same.
_STEADY = 0.1
_MEMORY = (
    "shardtune takes more memory than batches of single chats, because it keeps the activations of "
    "a whole row: data.packing=false or model.activation_checkpointing=full takes less."
)
_HEADER = (
    "| | CPU seconds of a step | trained tokens/s | share of the matmul rate | that rate, GFLOP/s "
    "| padding | rows through the head | peak memory | waited for data | shardtune is |"
)


def variants(options: Namespace) -> Iterable[tuple[str, ...]]:
    return product(options.dtypes, options.mixes)


def measure(options: Namespace, dtype: str, mix: str) -> dict[str, Any]:
    """Run every side in turn on one core, on chats of this mix."""
    chats = options.work / f"{mix.replace(' ', '-')}.jsonl"
    write_chats(chats, options.tokens, options.max_length, mix)
    core = [max(os.sched_getaffinity(0))]
    job = Job(options.model, chats, options.max_length, options.steps, dtype)
    runs: dict[str, list[Side]] = {name: [] for name in options.sides}
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in options.sides}
    for turn, name in in_turns(options.sides, options.rounds):
        # Other work of the machine changes the core's rate, so it is measured around each run.
        before = matmul_rate(core, dtype)
        run_dir = options.work / f"one-{dtype}-{chats.stem}-{name}-{turn}"
        if done := job.run(name, run_dir, options.peers, ways="cpu_seconds", cores=core):
            runs[name].append(done)
            rates[name].append((before, matmul_rate(core, dtype)))
    names = (_REFERENCE, *(name for name in runs if name != "ours"))
    reference = next(name for name in names if name in runs)
    equal, _ = counted(runs, reference, dtype)
    if not equal:
        return {}
    lengths = document_lengths(options.work, job)
    trained_tokens = runs[reference][0].trained_tokens
    flops = model_flops(options.model).per_step(lengths, trained_tokens)
    counts = {
        "dtype": dtype,
        "mix": mix,
        "model": options.model.name,
        "documents": len(lengths),
        "tokens": int(lengths.sum()),
        "trained_tokens": trained_tokens,
        "flops": flops,
        "max_length": options.max_length,
        "reference": reference,
        "rounds": options.rounds,
        "steps": options.steps,
    }
    rows = {name: row_of(sides, rates[name], flops) for name, sides in equal.items()}
    return {"rows": rows, "counts": counts}


def row_of(
    sides: list[Side], rates: list[tuple[float, float]], step_flops: float
) -> dict[str, Any]:
    """Return the figures of one way to train; `rates` were measured before and after each run."""
    return {
        "rates": rates,
        "cpu_seconds": [value for side in sides for value in side.cpu_seconds],
        "trained_tokens_per_s": trained_tokens_per_s(sides),
        "share_of_matmul_rate": [
            step_flops / value / mean(around)
            for side, around in zip(sides, rates, strict=True)
            for value in side.seconds
        ],
        "padding": 1 - sides[0].tokens / sides[0].computed_tokens,
        "head_rows": sides[0].head_rows,
        "memory_bytes": median(side.memory_bytes for side in sides),
        "losses": sides[0].losses,
        "data_share": sides[0].data_share and median(side.data_share or 0.0 for side in sides),
    }


def trained_tokens_per_s(sides: Iterable[Side]) -> list[float]:
    return [side.trained_tokens / value for side in sides for value in side.seconds]


def matmul_rate(cores: list[int], dtype: str) -> float:
    """Return the FLOP/s of one thread on these cores, measured as a run measures them."""
    allowed_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    measure_matmul_rate(getattr(torch, dtype), 0)
    rate = measure_matmul_rate(getattr(torch, dtype), 1)
    os.sched_setaffinity(0, allowed_cores)
    return rate


def model_flops(model: Path) -> ModelFlops:
    with torch.device("meta"):
        return count_flops(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)))


def document_lengths(work: Path, job: Job) -> np.ndarray:
    """Return the tokens of each chat, counted by `inspect-data`."""
    command = [sys.executable, "-m", "shardtune", "inspect-data", "--config", os.devnull, "--json"]
    command += ["--records", str(1 << 30), f"model.path={job.model}", f"data.train={job.chats}"]
    log = work / "inspect.log"
    done = run_pinned([*command, f"data.max_length={job.max_length}"], log)
    text = log.read_text(encoding="utf-8")
    assert done, text
    lines = [line for line in text.splitlines() if line.startswith("{")]
    return np.array([len(json.loads(line)["input_ids"]) for line in lines], np.int64)


def lines(figures: dict[str, Any]) -> list[str]:
    counts, rows = figures["counts"], figures["rows"]
    dtype, took = counts["dtype"], cpu_seconds_of_step(rows)
    tokens = f"{counts['tokens']} tokens, {counts['trained_tokens']} of them trained"
    shown = [
        f"## {counts['model']}, one pinned thread, {dtype}, {counts['mix']}",
        "",
        f"One step: {counts['documents']} chats, {tokens}, rows of {counts['max_length']} "
        f"(`{counts['mix']}` of distTest/workloads/chats.py). "
        f"{describe_losses(dtype, rows, counts['reference'])} "
        f"{describe_count(counts['rounds'], counts['steps'] - 1)} The last column compares "
        f"{'CPU seconds' if took else 'trained tokens per second'}.",
        "",
        *rate_lines(rows, counts),
        *table(_HEADER, [_row(name, rows, took) for name in rows]),
    ]
    memory = {name: row["memory_bytes"] for name, row in rows.items()}
    if memory.get("ours", 0) > memory.get("hf_trainer", math.inf):
        shown += [_MEMORY, ""]
    return shown


def _row(name: str, rows: dict[str, Any], took: dict[str, list[float]]) -> str:
    row, ratio = rows[name], ""
    if "ours" in rows and took:
        ratio = f"{median(took[name]) / median(took['ours']):.2f} x"
    elif "ours" in rows:
        ours, other = (median(rows[side]["trained_tokens_per_s"]) for side in ("ours", name))
        ratio, middle = f"{ours / other:.2f} x", median(gflops(rows.values()))
        if any(unsteady_runs(rows[side], middle) for side in ("ours", name)):
            ratio += " (unsteady core)"
    waited = "not measured" if row["data_share"] is None else f"{row['data_share']:.2%}"
    shares = [100 * share for share in row["share_of_matmul_rate"]]
    return (
        f"| {NAMES[name]} | {spread(took[name]) if took else 'not measured'} | "
        f"{spread(row['trained_tokens_per_s'])} | {spread(shares)} % | {spread(gflops([row]))} | "
        f"{row['padding']:.1%} | {row['head_rows'] or 'not counted'} | "
        f"{row['memory_bytes'] / 1e9:.2f} GB | {waited} | {ratio} |"
    )


def cpu_seconds_of_step(rows: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
    """Return CPU seconds by side, or nothing for older results, which lack them."""
    measured = {name: row["cpu_seconds"] for name, row in rows.items() if row.get("cpu_seconds")}
    return measured if len(measured) == len(rows) else {}


def gflops(rows: Iterable[dict[str, Any]]) -> list[float]:
    return [rate / 1e9 for row in rows for around in row["rates"] for rate in around]


def unsteady_runs(row: dict[str, Any], middle: float) -> list[tuple[int, list[float]]]:
    """Return runs whose rates, in GFLOP/s, differ from one another or from `middle`, the median."""
    around = enumerate([[rate / 1e9 for rate in rates] for rates in row["rates"]], start=1)
    return [
        (number, rates)
        for number, rates in around
        if max(middle, *rates) > (1 + _STEADY) * min(middle, *rates)
    ]


def rate_lines(rows: dict[str, Any], counts: dict[str, Any]) -> list[str]:
    """Describe the matmul rates around the runs, and name the runs with another core."""
    middle = median(gflops(rows.values()))
    limit = 1e9 * middle * counts["trained_tokens"] / counts["flops"]
    said = [
        f"This thread's matmuls: {spread(gflops(rows.values()))} GFLOP/s. Each run is divided by "
        "the mean of two rates measured right before and right after it. At the median of all "
        f"rates, matmuls alone would train {limit:.1f} tokens a second: the limit of any side."
    ]
    unsteady = [
        f"run {number} of {NAMES[name]} ({' and '.join(f'{rate:.3g}' for rate in rates)} GFLOP/s)"
        for name, row in rows.items()
        for number, rates in unsteady_runs(row, middle)
    ]
    if unsteady:
        said += [
            "**Not all runs had the same core.** The rate before, the rate after and the median of "
            f"all are more than {_STEADY:.0%} apart for: {', '.join(unsteady)}. Tokens per second "
            "of these runs and their shares of the rate depend on the other work of the machine; "
            "ratios of CPU seconds depend on it less."
        ]
    return [part for line in said for part in (line, "")]
