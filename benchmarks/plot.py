"""The plots of the results, in the peers' environment, which has matplotlib:
python -m benchmarks.plot results|rounding RESULTS.json PLOT.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean, median
from typing import Any

SMOOTHED_OVER = 25  # steps
_OURS, _PEER = "#2a6f97", "#c8c8c8"
_NAMES = {
    "ours": "shardtune",
    "trl_packed": "TRL\npacked",
    "trl_padded": "TRL\npadded",
    "trl_single": "TRL\nsingle",
    "hf_trainer": "HF\nTrainer",
}
_ROUNDING_COLOURS = ("#222222", _OURS, "#52b788", "#c1121f")


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    kind, source, out = sys.argv[1:]
    draw = {"results": draw_results, "rounding": draw_rounding}[kind]
    figure = draw(json.loads(Path(source).read_text(encoding="utf-8")))
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=150)


def draw_results(results: dict[str, Any]) -> Any:
    """Return a panel for each mix of chats, and one for the numbers of ranks."""
    import matplotlib.pyplot as plt

    shown = {
        name: part
        for name, part in results.items()
        if part["figures"] and name.split()[0] in ("one", "scaling")
    }
    columns = min(len(shown), 3)
    lines = -(-len(shown) // columns)
    size = (4.6 * columns, 3.6 * lines)
    figure, grid = plt.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained")
    panels = list(grid.flat)
    for axes in panels[len(shown) :]:
        axes.remove()
    # The numbers of ranks come last.
    ordered = sorted(shown.items(), key=lambda item: item[0] == "scaling")
    for axes, (name, part) in zip(panels, ordered, strict=False):
        (_scaling if name == "scaling" else _bars)(axes, part["figures"])
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


def _scaling(axes: Any, figures: dict[str, Any]) -> None:
    counts = [int(count) for count in figures]
    speeds = [median(row["trained_tokens_per_s"]) for row in figures.values()]
    axes.plot(counts, speeds, marker="o", color=_OURS)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, list(figures))
    axes.set_ylim(0, max(speeds) * 1.15)
    axes.set_xlabel("ranks on this machine")
    axes.set_title("Small model, the same batches")


def smoothed(losses: list[float]) -> list[float]:
    """Return the mean of each loss and those before it, of SMOOTHED_OVER at most."""
    return [mean(losses[max(0, end - SMOOTHED_OVER) : end]) for end in range(1, len(losses) + 1)]


def draw_rounding(results: dict[str, Any]) -> Any:
    """Return the smoothed losses of each variant, and their distance from float32."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    exact = smoothed(results["float32"]["train"])
    steps = range(1, len(exact) + 1)
    right.axhspan(-0.2, 0.2, color="#eeeeee")
    for colour, (name, losses) in zip(_ROUNDING_COLOURS, results.items(), strict=True):
        curve = smoothed(losses["train"])
        percent = [100 * (loss / base - 1) for loss, base in zip(curve, exact, strict=True)]
        left.plot(steps, curve, label=name, color=colour, linewidth=1.3)
        right.plot(steps, percent, color=colour, linewidth=1.3)
    left.set(title=f"Training loss, mean of the last {SMOOTHED_OVER} steps", xlabel="step")
    left.legend(frameon=False, fontsize=9)
    right.set(title="Against float32, %  (grey: within 0.2%)", xlabel="step")
    return figure


if __name__ == "__main__":
    main()
