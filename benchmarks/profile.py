"""The seconds of one step of shardtune by kind of operation."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.sides import Job, lines_behind
from benchmarks.tables import section
from distTest.workloads.chats import write_chats
from distTest.workloads.wrapped import PROFILE_LABEL


def variants(options: Namespace) -> Iterable[tuple[str, ...]]:
    return product(options.dtypes)


def measure(options: Namespace, dtype: str) -> dict[str, Any]:
    chats = write_chats(options.work / "chats.jsonl", options.tokens, options.max_length)
    job = Job(options.model, chats, options.max_length, options.steps, dtype)
    run_dir = options.work / f"profile-{dtype}"
    if not job.run_ours(run_dir, ways="profiled", cores=[max(os.sched_getaffinity(0))]):
        return {}
    log = Path(f"{run_dir}.log").read_text(encoding="utf-8").splitlines()
    *_, last = lines_behind(PROFILE_LABEL, log)
    return {"dtype": dtype, "seconds": json.loads(last)}


def lines(figures: dict[str, Any], _: dict[str, Any]) -> list[str]:
    total = sum(figures["seconds"].values())
    rows = [f"| {kind} | {seconds / total:.1%} |" for kind, seconds in figures["seconds"].items()]
    text = (
        "The last step of a run of shardtune on the chats above, under PyTorch's profiler: "
        f"{total:.1f} s."
    )
    title = f"Where the time of shardtune goes, {figures['dtype']}"
    return section(title, text, header="| | share of the step |", rows=rows)
