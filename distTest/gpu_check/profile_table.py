"""List the kernels of a profiled step, and the time in which the GPU has none."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_ROWS = 10
_GAP_US = 10.0  # a shorter gap is that between two launches


def kernel_table(trace: Path, kinds: Sequence[str] = _ON_GPU) -> dict[str, Any]:
    """Return figures of the kernels in a Chrome trace of one step, in milliseconds.

    `kinds`: categories of events that are kernels.
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
    durations: defaultdict[str, list[float]] = defaultdict(list)
    gaps, busy_until = [], kernels[0][0]
    for begin, end, name in kernels:
        durations[name].append(end - begin)
        if begin > busy_until:
            gaps.append(begin - busy_until)
        busy_until = max(busy_until, end)  # kernels of several streams overlap
    span = busy_until - kernels[0][0]
    top = sorted(durations.items(), key=lambda item: -sum(item[1]))[:_ROWS]
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


def as_markdown(title: str, figures: dict[str, Any]) -> str:
    lines = [f"### {title}", ""]
    lines.append(
        f"{figures['kernels']} kernels in {figures['span_ms']:.1f} ms; the GPU has nothing to do "
        f"for {figures['idle_ms']:.1f} ms, at most {figures['longest_gap_ms']:.2f} ms at a time; "
        f"{figures['gaps_over_10_us']} gaps are longer than 10 us."
    )
    lines += ["", "| kernel | times | ms | share of the step |", "|---|---|---|---|"]
    for row in figures["top"]:
        name = row["name"].replace("|", "/")[:100]
        lines.append(f"| `{name}` | {row['count']} | {row['ms']:.2f} | {row['share']:.1%} |")
    return "\n".join(lines)
