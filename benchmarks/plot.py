"""Draw the plot of the results."""

from __future__ import annotations

from statistics import median
from typing import Any

from matplotlib.figure import Figure

_OURS, _PEER = "#2a6f97", "#c8c8c8"
_NAMES = {
    "ours": "shardtune",
    "trl_packed": "TRL\npacked",
    "trl_padded": "TRL\npadded",
    "trl_single": "TRL\nsingle",
    "hf_trainer": "HF\nTrainer",
}


def draw_results(results: dict[str, Any]) -> Figure:
    """Return a panel for each mix of chats."""
    shown = {
        name: part for name, part in results.items() if part["figures"] and name.split()[0] == "one"
    }
    columns = min(len(shown), 3)
    lines = -(-len(shown) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.6 * lines), layout="constrained")
    panels = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axes in panels[len(shown) :]:
        axes.remove()
    for axes, part in zip(panels, shown.values(), strict=False):
        _bars(axes, part["figures"])
        axes.set_ylabel("trained tokens / s")
    machines = [part["measured_with"] for part in shown.values()]
    described = dict.fromkeys(f"{machine['CPU']}, {machine['date']}" for machine in machines)
    figure.suptitle("; ".join(described), fontsize=9)
    return figure


def _bars(axes: Any, figures: dict[str, Any]) -> None:
    """Draw trained tokens per second, from smallest to largest, under their share of matmuls."""
    axes.spines[["top", "right"]].set_visible(False)
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
