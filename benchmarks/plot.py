"""The plot of the results: python -m benchmarks.plot RESULTS.json PLOT.png."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

_OURS, _PEER = "#2a6f97", "#c8c8c8"
_NAMES = {
    "ours": "shardtune",
    "trl_packed": "TRL\npacked",
    "trl_padded": "TRL\npadded",
    "trl_single": "TRL\nsingle",
    "hf_trainer": "HF\nTrainer",
}


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    source, out = sys.argv[1:]
    figure = draw_results(json.loads(Path(source).read_text(encoding="utf-8")))
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=150)


def draw_results(results: dict[str, Any]) -> Any:
    """Return a panel for each mix of chats."""
    import matplotlib.pyplot as plt

    shown = {
        name: part for name, part in results.items() if part["figures"] and name.split()[0] == "one"
    }
    columns = min(len(shown), 3)
    lines = -(-len(shown) // columns)
    size = (4.6 * columns, 3.6 * lines)
    figure, grid = plt.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained")
    panels = list(grid.flat)
    for axes in panels[len(shown) :]:
        axes.remove()
    for axes, part in zip(panels, shown.values(), strict=False):
        _bars(axes, part["figures"])
        axes.set_ylabel("trained tokens / s")
    machines = [part["measured_with"] for part in shown.values()]
    described = dict.fromkeys(f"{each['CPU']}, {each['date']}" for each in machines)
    figure.suptitle("; ".join(described), fontsize=9)
    return figure


def _bars(axes: Any, figures: dict[str, Any]) -> None:
    """Trained tokens per second, with the smallest and the largest, and the share of the matmul
    rate above.
    """
    for place, (name, row) in enumerate(figures["rows"].items()):
        speeds = row["trained_tokens_per_s"]
        middle = median(speeds)
        ends = [[middle - min(speeds)], [max(speeds) - middle]]
        colour = _OURS if name == "ours" else _PEER
        axes.bar(place, middle, yerr=ends, color=colour, capsize=4, width=0.7)
        share = f"{median(row['share_of_matmul_rate']):.0%}"
        axes.text(place, max(speeds) * 1.02, share, ha="center", va="bottom")
    axes.set_xticks(range(len(figures["rows"])), [_NAMES[name] for name in figures["rows"]])
    axes.margins(y=0.15)
    counts = figures["counts"]
    title = f"One thread, {counts['dtype']}, {counts['mix']}\n(% of its matmul rate)"
    axes.set_title(title, fontsize=11)


if __name__ == "__main__":
    main()
