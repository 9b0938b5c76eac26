"""shardtune and transformers' FSDP over two processes, one core each."""

from __future__ import annotations

import os
from argparse import Namespace
from statistics import median
from typing import Any

from benchmarks.one import trained_tokens_per_s
from benchmarks.sides import NAMES, Job, Side, counted, in_turns
from benchmarks.tables import describe_losses, section, spread
from distTest.workloads.chats import write_chats

_REFERENCE = "transformers_fsdp"


def measure(options: Namespace) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))[:2]
    # A row for each rank at least.
    chats = write_chats(options.work / "even.jsonl", 2 * options.tokens, options.max_length)
    # Where the ranks do not divide the chats, a Trainer repeats one.
    written = chats.read_text(encoding="utf-8").splitlines(keepends=True)
    chats.write_text("".join(written[: len(written) // 2 * 2]), encoding="utf-8")
    job = Job(options.model, chats, options.max_length, options.steps, "float32")
    runs: dict[str, list[Side]] = {_REFERENCE: [], "ours": []}
    for turn, name in in_turns(list(runs), options.rounds):
        run_dir = options.work / f"two-{name}-{turn}"
        done = job.run(name, run_dir, options.peers, ranks=2, cores=cores)
        runs[name] += [done] if done else []
    rows = {
        name: {
            "trained_tokens_per_s": trained_tokens_per_s(sides),
            "memory_bytes": median(side.memory_bytes for side in sides),
            "losses": sides[0].losses,
        }
        for name, sides in counted(runs, _REFERENCE, "float32")[0].items()
    }
    return {"rows": rows} if rows else {}


def lines(figures: dict[str, Any], _: dict[str, Any]) -> list[str]:
    by_side = figures["rows"]
    speeds = {name: median(row["trained_tokens_per_s"]) for name, row in by_side.items()}
    rows = [
        f"| {NAMES[name]} | {spread(row['trained_tokens_per_s'])} | "
        f"{row['memory_bytes'] / 1e9:.2f} GB | "
        + (f"{speeds['ours'] / speeds[name]:.2f} x |" if "ours" in speeds else "|")
        for name, row in by_side.items()
    ]
    header = "| | trained tokens/s | peak memory of a rank | shardtune is |"
    counts = ", ".join(str(len(row["trained_tokens_per_s"])) for row in by_side.values())
    text = describe_losses("float32", by_side, _REFERENCE)
    text += f" Medians (smallest to largest) of {counts} figures."
    title = "FSDP over two processes, one core each, float32"
    return section(title, text, header=header, rows=rows)
