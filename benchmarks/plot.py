"""The plot of RESULTS.md, in the peers' environment: python -m benchmarks.plot RESULTS.json
RESULTS.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

NAMES = {
    "ours": "shardtune",
    "trl_packed": "TRL packed",
    "trl_padded": "TRL padded",
    "trl_single": "TRL single",
    "hf_trainer": "HF Trainer",
}
COLOURS = {
    "ours": "#2a6f97",
    "trl_packed": "#c8c8c8",
    "trl_padded": "#c8c8c8",
    "trl_single": "#c8c8c8",
    "hf_trainer": "#c8c8c8",
}


def main() -> None:
    results = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    shown = {
        name: part
        for name, part in results.items()
        if part["figures"] and name.split()[0] in ("one", "scaling")
    }
    ranks = shown.get("scaling", {}).get("figures", {})
    ones = [part["figures"] for name, part in shown.items() if name != "scaling"]
    columns = min(len(shown), 3)
    lines = -(-len(shown) // columns)
    figure, grid = plt.subplots(
        lines, columns, figsize=(4.6 * columns, 3.6 * lines), squeeze=False, layout="constrained"
    )
    panels = list(grid.flat)
    for axes in panels[len(shown) :]:
        axes.remove()
    for axes, figures in zip(panels, ones, strict=False):
        bars(axes, figures["rows"])
        axes.set_title(
            f"One thread, {figures['counts']['dtype']}, {figures['counts']['mix']}\n"
            "(% of its matmul rate)",
            fontsize=11,
        )
    if ranks:
        scaling(panels[len(ones)], ranks)
    machines = {
        f"{part['measured_with']['CPU']}, {part['measured_with']['date']}": None
        for part in shown.values()
    }
    figure.suptitle("; ".join(machines), fontsize=9)
    figure.savefig(sys.argv[2], dpi=150)


def bars(axes: plt.Axes, rows: dict[str, dict[str, list[float]]]) -> None:
    """Trained tokens per second, with the smallest and the largest, and the share of the matmul
    rate above.
    """
    for place, (name, row) in enumerate(rows.items()):
        speeds = row["trained_tokens_per_s"]
        middle = median(speeds)
        ends = [[middle - min(speeds)], [max(speeds) - middle]]
        axes.bar(place, middle, yerr=ends, color=COLOURS[name], capsize=4, width=0.7)
        axes.text(
            place,
            max(speeds) * 1.02,
            f"{median(row['share_of_matmul_rate']):.0%}",
            ha="center",
            va="bottom",
        )
    axes.set_xticks(range(len(rows)), [NAMES[name].replace(" ", "\n", 1) for name in rows])
    axes.set_ylabel("trained tokens / s")
    axes.margins(y=0.15)
    axes.spines[["top", "right"]].set_visible(False)


def scaling(axes: plt.Axes, ranks: dict[str, dict[str, list[float]]]) -> None:
    counts = [int(count) for count in ranks]
    speeds = [median(row["trained_tokens_per_s"]) for row in ranks.values()]
    axes.plot(counts, speeds, marker="o", color=COLOURS["ours"])
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_ylim(0, max(speeds) * 1.15)
    axes.set_xlabel("ranks on this machine")
    axes.set_ylabel("trained tokens / s")
    axes.set_title("Small model, the same batches")
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
