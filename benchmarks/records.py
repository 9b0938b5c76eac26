"""A few steps on few and on many records, tokenizing first, then from the cache."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from typing import Any

from benchmarks.sides import run_script
from benchmarks.small_model import small_model
from benchmarks.tables import section, spread


def measure(options: Namespace) -> dict[str, Any]:
    """Return the seconds outside the steps, and the tokens per second within them."""
    settings = {
        "model.path": small_model(options.model, options.work / "small"),
        "model.init": "random",
        "model.compute_dtype": "float32",
        "data.max_length": 512,
        "train.gradient_accumulation_steps": 4,
        "train.max_steps": 5,
    }
    figures = {}
    for count in options.records:
        data = options.work / f"records-{count}.jsonl"
        with data.open("w", encoding="utf-8") as file:
            for number in range(count):
                file.write(json.dumps({"text": f"{number}" + " word" * (number % 24)}) + "\n")
        outside_s = {}
        for state in ("tokenised", "cached"):
            started = time.monotonic()
            run_dir = options.work / f"records-{count}-{state}"
            record = run_script(run_dir, settings | {"data.train": data})
            if not record:
                break
            steps = record.of_kind("step")
            outside_s[state] = time.monotonic() - started - sum(step["seconds"] for step in steps)
            speeds = [step["tokens_per_second"] for step in steps[1:]]
            figures[count] = {"outside_s": outside_s, "tokens_per_s": speeds}
    return figures


def lines(figures: dict[str, Any], _: dict[str, Any]) -> list[str]:
    def seconds(row: dict[str, Any], state: str) -> str:
        return f"{row['outside_s'][state]:.1f} s" if state in row["outside_s"] else "not measured"

    rows = [
        f"| {count} | {seconds(row, 'tokenised')} | {seconds(row, 'cached')} | "
        f"{spread(row['tokens_per_s'])} |"
        for count, row in figures.items()
    ]
    header = "| records | outside the steps, tokenizing | from the cache | tokens/s |"
    counts = ", ".join(str(len(row["tokens_per_s"])) for row in figures.values())
    text = f"Medians (smallest to largest) of the steps of one run each: {counts}."
    title = "Few records and many, a small model on one thread"
    return section(title, text, header=header, rows=rows)
