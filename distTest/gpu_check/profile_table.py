"""The kernels of a profiled step: which take the GPU's time, and for how long it has none."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_ROWS = 10
_GAP_US = 10.0  # shorter ones are those between two launches


def kernel_table(trace: Path, kinds: Sequence[str] = _ON_GPU) -> dict[str, Any]:
    """Return what a Chrome trace of one step says of its kernels, in milliseconds.

    Kernels of several streams that run at the same time keep the GPU busy once. `kinds` are the
    categories of the trace's events.
    """
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    kernels = sorted(
        (float(e["ts"]), float(e["ts"]) + float(e["dur"]), str(e["name"]))
        for e in events
        if e.get("cat") in kinds and "dur" in e
    )
    if not kernels:
        return {"kernels": 0}
    of_name: defaultdict[str, list[float]] = defaultdict(list)
    gaps, busy_until = [], kernels[0][0]
    for begin, end, name in kernels:
        of_name[name].append(end - begin)
        if begin > busy_until:
            gaps.append(begin - busy_until)
        busy_until = max(busy_until, end)
    span = busy_until - kernels[0][0]
    top = sorted(of_name.items(), key=lambda item: -sum(item[1]))[:_ROWS]
    return {
        "kernels": len(kernels),
        "span_ms": span / 1e3,
        "idle_ms": sum(gaps) / 1e3,
        "gaps_over_10_us": sum(gap > _GAP_US for gap in gaps),
        "longest_gap_ms": max(gaps, default=0.0) / 1e3,
        "top": [
            {"name": name, "count": len(took), "ms": sum(took) / 1e3, "share": sum(took) / span}
            for name, took in top
        ],
    }


def as_markdown(title: str, found: dict[str, Any]) -> str:
    lines = [f"### {title}", ""]
    lines.append(
        f"{found['kernels']} kernels in {found['span_ms']:.1f} ms; the GPU has nothing to do for "
        f"{found['idle_ms']:.1f} ms, at most {found['longest_gap_ms']:.2f} ms at a time; "
        f"{found['gaps_over_10_us']} gaps are longer than 10 us."
    )
    lines += ["", "| kernel | times | ms | share of the step |", "|---|---|---|---|"]
    for row in found["top"]:
        name = row["name"].replace("|", "/")[:100]
        lines.append(f"| `{name}` | {row['count']} | {row['ms']:.2f} | {row['share']:.1%} |")
    return "\n".join(lines)
