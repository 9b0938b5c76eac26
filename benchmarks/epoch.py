"""Time whole runs on one pinned core, the first step included.

No other section uses the seed of these chats, so nothing was tuned on them.
"""

from __future__ import annotations

import os
from argparse import Namespace
from statistics import median
from typing import Any

from benchmarks.one import document_lengths, matmul_rate
from benchmarks.sides import NAMES, Job, Side, counted, in_turns
from benchmarks.tables import describe_losses, spread, table
from distTest.workloads.chats import MIXES, write_chats

_SIDES = ("ours", "trl_packed", "hf_trainer")
_REFERENCE = "hf_trainer"
_MIX, _SEED, _DTYPE = "prompts", 11, "bfloat16"
_HEADER = "| | s of the run | s of its first step | trained tokens/s | peak memory | shardtune is |"


def measure(options: Namespace) -> dict[str, Any]:
    """Run each side in turn for a few epochs, each of them one optimizer step."""
    chats = options.work / "epoch.jsonl"
    write_chats(chats, options.epoch_tokens, options.max_length, _MIX, _SEED)
    core = [max(os.sched_getaffinity(0))]
    job = Job(options.model, chats, options.max_length, options.epochs, _DTYPE)
    runs: dict[str, list[Side]] = {name: [] for name in _SIDES}
    rates: list[float] = []
    for turn, name in in_turns(_SIDES, options.rounds):
        rates.append(matmul_rate(core, _DTYPE))
        done = job.run(name, options.work / f"epoch-{name}-{turn}", options.peers, cores=core)
        runs[name] += [done] if done else []
    equal, _ = counted(runs, _REFERENCE, _DTYPE)
    if not equal:
        return {}
    lengths, reference = document_lengths(options.work, job), equal[_REFERENCE][0]
    counts = {
        "model": options.model.name,
        "documents": len(lengths),
        "tokens": int(lengths.sum()),
        "trained_tokens": reference.trained_tokens,
        "max_length": options.max_length,
        "epochs": options.epochs,
        "rounds": options.rounds,
        "rates": rates,
    }
    return {"rows": {name: _row(sides) for name, sides in equal.items()}, "counts": counts}


def _row(sides: list[Side]) -> dict[str, Any]:
    return {
        "seconds": [side.first_s + sum(side.seconds) for side in sides],
        "first_s": [side.first_s for side in sides],
        "trained_tokens": sides[0].trained_tokens * len(sides[0].losses),
        "memory_bytes": median(side.memory_bytes for side in sides),
        "losses": sides[0].losses,
    }


def lines(figures: dict[str, Any]) -> list[str]:
    counts, rows = figures["counts"], figures["rows"]
    mix = MIXES[_MIX]
    shares = " to ".join(f"{share:.0%}" for share in mix.answers)
    took = {name: median(row["seconds"]) for name, row in rows.items()}
    return [
        f"## {counts['model']}, whole runs on one pinned thread, {_DTYPE}",
        "",
        f"{counts['epochs']} epochs of {counts['documents']} chats, {counts['tokens']} tokens, "
        f"{counts['trained_tokens']} of them trained, rows of {counts['max_length']}; log-normal "
        f"lengths, a median of {mix.median_tokens:g} tokens, {shares} of each trained. An epoch is "
        "one optimizer step. Seconds of the clock from the beginning of the training loop, the "
        f"first step included; medians (smallest to largest) of {counts['rounds']} runs a side. "
        f"{describe_losses(_DTYPE, rows, _REFERENCE)}",
        "",
        "This thread's matmuls before each run: "
        f"{spread([rate / 1e9 for rate in counts['rates']])} GFLOP/s.",
        "",
        *table(
            _HEADER,
            [
                f"| {NAMES[name]} | {spread(row['seconds'])} | {spread(row['first_s'])} | "
                f"{spread([row['trained_tokens'] / s for s in row['seconds']])} | "
                f"{row['memory_bytes'] / 1e9:.2f} GB | "
                + (f"{took[name] / took['ours']:.2f} x |" if "ours" in took else "|")
                for name, row in rows.items()
            ],
        ),
    ]
