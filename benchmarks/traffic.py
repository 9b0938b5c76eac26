"""The bytes that one step of two ranks moves, and the rows through its head.

It is a run of three steps less a run of two.
"""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from benchmarks.sides import run_script
from benchmarks.tables import section
from distTest.workloads.chats import write_chats


def measure(options: Namespace) -> dict[str, Any]:
    chats = write_chats(options.work / "chats.jsonl", options.tokens, options.max_length)
    settings = {
        "model.path": options.model,
        "model.compute_dtype": "float32",
        "data.train": chats,
        "data.max_length": 256,
        "data.overflow": "truncate",
        "train.epochs": 99,
        "train.gradient_accumulation_steps": 2,
        "checkpoint.every_steps": 0,
    }
    vocabulary = AutoConfig.from_pretrained(options.model).vocab_size
    counts: list[list[dict[str, dict[str, int]]]] = []
    for steps in (2, 3):
        run_dir = options.work / f"traffic-{steps}"
        way, more = f"counted={run_dir}:{vocabulary}", {"train.max_steps": steps}
        record = run_script(run_dir, settings | more, ways=way, ranks=2)
        if not record:
            return {}
        counts.append([json.loads(Path(f"{run_dir}.{rank}.json").read_text()) for rank in (0, 1)])
    before, after = counts

    def more_of(rank: int, name: str, key: str) -> int:
        return after[rank][name][key] - before[rank].get(name, {}).get(key, 0)

    collectives = {
        name: {key: more_of(0, name, key) for key in ("count", "bytes")}
        for name in sorted(after[0])
        if name != "head" and more_of(0, name, "count")
    }
    last = record.of_kind("step")[-1]
    head = {"rows": sum(more_of(rank, "head", "count") for rank in (0, 1))}
    head |= {key: last[key] for key in ("tokens", "trained_tokens")}
    return {"collectives": collectives, "head": head}


def lines(figures: dict[str, Any], _: dict[str, Any]) -> list[str]:
    head = figures["head"]
    rows = [
        f"| {name} | {each['count']} | {each['bytes']} |"
        for name, each in figures["collectives"].items()
    ]
    title = "What one step moves (two ranks, two micro-batches each), float32"
    header = "| | calls | bytes gathered or reduced |"
    text = (
        f"Rows through the head: {head['rows']}, of {head['tokens']} tokens, "
        f"{head['trained_tokens']} of them trained."
    )
    return [*section(title, header=header, rows=rows), text, ""]
