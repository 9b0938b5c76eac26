"""Draw a chart as SVG whose colours follow the page's theme."""

from __future__ import annotations

import html
import io
import math
import re
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from shardtune.report.charts import Chart

# Okabe and Ito, Color Universal Design (2008), without the black and the yellow: colours that
# colour-blind people tell apart. The second of each is for a dark page.
COLOURS = [
    ("#0072b2", "#56b4e9"),
    ("#d55e00", "#f0894a"),
    ("#009e73", "#2fc99e"),
    ("#b05a8c", "#e39cc6"),
    ("#a87400", "#e69f00"),
    ("#5b5b5b", "#bdbdbd"),
]
# A legend with more entries would cover the curves, so it stands below the chart.
_MOST_INSIDE = 4
_LONGEST_IN_TWO = 20  # characters of a label, for two columns below the chart
_BELOW: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2), "ncols": 2}
_DASHES: list[Any] = ["-", "--", ":", "-.", (0, (8, 2)), (0, (1, 3)), (0, (6, 1, 1, 1, 1, 1))]
# Stand for the colours of text and grid in the SVG; page.html.jinja gives both themes' values.
TEXT, GRID, PAGE = "#1a1a1e", "#dcdce1", "#fefefe"
_STYLE: Any = {  # matplotlib types its keys by name
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": GRID,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "legend.facecolor": PAGE,
    "legend.edgecolor": "none",
    "legend.framealpha": 0.75,
    "legend.handlelength": 3,
    "text.parse_math": False,  # `$` in a name stays a dollar
    "legend.fontsize": 9,
}


def svg(chart: Chart) -> str:
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": chart.name}):
        return _themed_svg(_figure(chart), chart.title)


def histogram_svg(values: npt.ArrayLike, title: str, unit: str, limit: float) -> str:
    """Draw a histogram of `values`, [n], with twenty bars from 0 to `limit`."""
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": title}):
        figure = Figure(figsize=(3.6, 2.2), layout="constrained")
        axes = figure.add_subplot()
        axes.hist(np.asarray(values), bins=20, range=(0, limit), color=COLOURS[0][0])
        axes.set_title(title, fontsize=9, color=TEXT)
        axes.set_xlabel(unit)
        axes.grid(axis="x", visible=False)
        return _themed_svg(figure, title)


def _themed_svg(figure: Figure, title: str) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*">', "<g>", text)
    text = re.sub(r'(<svg [^>]*?)width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg [^>]*?)height="[^"]*"', r"\1", text, count=1)
    text = text.replace("<svg ", f'<svg role="img" aria-label="{html.escape(title)}" ', 1)
    names = {TEXT: "text", GRID: "grid", PAGE: "page"}
    names |= {light: f"colour-{i}" for i, (light, _) in enumerate(COLOURS)}
    return re.sub(
        "|".join(names), lambda match: f"var(--{names[match[0]]})", text, flags=re.IGNORECASE
    )


def _figure(chart: Chart) -> Figure:
    labels = [*(curve.label for curve in chart.curves if curve.label), *chart.levels]
    columns = 2 if max(map(len, labels), default=0) <= _LONGEST_IN_TWO else 1
    rows_below = math.ceil(len(labels) / columns) if len(labels) > _MOST_INSIDE else 0
    legend = 0.2 * rows_below  # inches
    figure = Figure(figsize=(4.6, 2.6 + legend))
    bottom, height = 0.5 + legend, 1.85
    axes = figure.add_axes((0.17, bottom / (2.6 + legend), 0.8, height / (2.6 + legend)))
    _draw(axes, chart)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(**_BELOW | {"ncols": columns} if rows_below else {"loc": "best"})
    return figure


def _draw(axes: Axes, chart: Chart) -> None:
    for curve in chart.curves:
        axes.plot(
            curve.x,
            curve.y,
            color=COLOURS[curve.colour % len(COLOURS)][0],
            linestyle=_DASHES[(curve.dash + curve.colour // len(COLOURS)) % len(_DASHES)],
            linewidth=0.7 if curve.is_faint else 1.4,
            alpha=0.4 if curve.is_faint else 1,
            marker="o" if curve.has_markers else None,
            markersize=3.5,
            label=_shown(curve.label) if curve.label else None,
        )
    for label, value in chart.levels.items():
        axes.axhline(value, color=TEXT, linestyle="--", linewidth=1, label=_shown(label))


def _shown(label: str) -> str:
    """Put a space before a label that begins with `_`, which matplotlib would leave out."""
    return f" {label}" if label.startswith("_") else label


def _finish(axes: Axes, chart: Chart) -> None:
    axes.set_xlabel("step")
    if chart.last_step:
        axes.set_xlim(-0.03 * chart.last_step, 1.03 * chart.last_step)
    axes.set_title(chart.unit, loc="left", fontsize="medium", color=TEXT)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    values = np.concatenate([curve.y[np.isfinite(curve.y)] for curve in chart.curves])
    spread = values.max() / values.min() if values.min() > 0 else 1
    if chart.is_log and spread > 5:  # a narrower axis has less than two of the ticks 1, 2, 5, 10
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if spread < 100 else (1,)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.yaxis.set_major_formatter("{x:g}")
    if chart.name == "learning-rate":
        axes.set_ylim(bottom=0)
