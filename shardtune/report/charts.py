"""Choose the curves of runs over their steps, and draw each chart as SVG.

The colours of an SVG follow the page's theme.
"""

import html
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from shardtune.report.read_run import FloatArray, RunRecord
from shardtune.report.summary import PHASE_NAMES, mean_width, phase_seconds, smooth

_MOST_MARKERS = 40
_MOST_SCORES = 20
_SMOOTHED = ("loss", "gradient-norm", "speed", "mfu")  # long curves are faint, beside their means
_LOGARITHMIC = ("perplexity", "gradient-norm")
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
_DASHES: list[Any] = ["-", "--", ":", "-.", (0, (8, 2)), (0, (1, 3)), (0, (6, 1, 1, 1, 1, 1))]
_LONGEST_IN_TWO = 22  # characters of a label, for a legend in two columns
_LINE = 0.2  # the height of a line of the legend, in inches
# Stand for the colours of text and grid in the SVG; page.html.jinja gives both themes' values.
_TEXT, _GRID = "#1a1a1e", "#dcdce1"
_STYLE: Any = {  # matplotlib types its keys by name
    "svg.fonttype": "none",
    "text.color": _TEXT,
    "text.parse_math": False,  # `$` in a name stays a dollar
    "axes.labelcolor": _TEXT,
    "axes.edgecolor": _GRID,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": _GRID,
    "xtick.color": _TEXT,
    "ytick.color": _TEXT,
    "legend.frameon": False,
}
_Curves = dict[str, tuple[FloatArray, FloatArray]]  # steps and values by label
_CurvesOf = Callable[[RunRecord], _Curves]


@dataclass(frozen=True)
class Curve:
    """A line: `y` over the steps `x`. `colour` and `dash` are numbers of styles.

    `mean_of`: the line is faint, and its means over so many steps are drawn on it; 0: it is short.
    """

    label: str
    x: FloatArray
    y: FloatArray
    colour: int
    dash: int
    mean_of: int


@dataclass(frozen=True)
class Chart:
    """One figure. `levels`: horizontal lines by label. `last_step`: the end of every chart."""

    name: str
    title: str
    unit: str
    note: str
    curves: list[Curve]
    levels: dict[str, float]
    last_step: int


def make_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    last_step = max(run.last_step for run in runs)
    charts = [
        Chart(
            *(name, title, unit, note),
            curves=_curves(runs, curves_of, name in _SMOOTHED),
            levels=_planned(runs) if name == "memory" else {},
            last_step=last_step,
        )
        for name, title, unit, note, curves_of in [*_CHARTS, *_scores(runs)]
    ]
    return [chart for chart in charts if chart.curves]


def _curves(runs: Sequence[RunRecord], curves_of: _CurvesOf, is_smoothed: bool) -> list[Curve]:
    curves = []
    for number, run in enumerate(runs):
        for i, (what, (x, y)) in enumerate(curves_of(run).items()):
            if not np.isfinite(y).any():
                continue
            mean_of = mean_width(len(y)) if is_smoothed else 0
            label = _label(run, runs, f"mean of {mean_of} steps" if mean_of else what)
            curves.append(Curve(label, x, y, number if len(runs) > 1 else i, i, mean_of))
    return curves


def _label(run: RunRecord, runs: Sequence[RunRecord], what: str) -> str:
    return ", ".join(part for part in (run.name if len(runs) > 1 else "", what) if part)


def _field(name: str, scale: float = 1) -> _CurvesOf:
    return lambda run: {"": (run.column("step", "step"), run.column("step", name) * scale)}


def _perplexity(run: RunRecord) -> _Curves:
    steps, values = run.column("eval", "step"), run.column("eval", "perplexity")
    sets = np.array([entry.get("set", "") for entry in run.of_kind("eval")])
    names = [*dict.fromkeys(sets.tolist())]
    return {
        name or ("all sets" if len(names) > 1 else ""): (steps[sets == name], values[sets == name])
        for name in names
    }


def _planned(runs: Sequence[RunRecord]) -> dict[str, float]:
    return {
        _label(run, runs, "the plan"): predicted / 1e9
        for run in runs
        for entry in run.of_kind("plan")[-1:]
        if (predicted := entry.get("predicted_peak_bytes"))
    }


def _phases(run: RunRecord) -> _Curves:
    steps, rows = run.column("ranks", "step"), phase_seconds(run)
    totals = np.array([sum(row.values()) or np.nan for row in rows])
    return {
        PHASE_NAMES.get(name, name): (
            steps,
            100 * np.array([row.get(name, 0) for row in rows]) / totals,
        )
        for name in dict.fromkeys(name for row in rows for name in row)
    }


# Name, title, unit and note of each chart, and the curves of a run in it.
_CHARTS: list[tuple[str, str, str, str, _CurvesOf]] = [
    ("loss", "Loss of the trained tokens", "nats per token", "", _field("loss")),
    ("perplexity", "Evaluation perplexity", "", "Step 0 is the baseline.", _perplexity),
    ("gradient-norm", "Gradient norm", "", "Before clipping.", _field("grad_norm")),
    ("learning-rate", "Learning rate", "", "", _field("lr")),
    ("speed", "Tokens per second of all ranks", "tok/s", "", _field("tokens_per_second")),
    ("mfu", "Model FLOPs utilisation", "% of the devices' peak", "", _field("mfu", scale=100)),
    ("memory", "Most memory of a rank so far", "GB", "", _field("memory_bytes", scale=1e-9)),
    (
        *("phases", "How a step divides", "% of a step"),
        "Of the slowest rank, which waits for no other but for the communication. Above a third, "
        "the run is bound by it: by the network, between nodes.",
        _phases,
    ),
]


def _scores(runs: Sequence[RunRecord]) -> list[tuple[str, str, str, str, _CurvesOf]]:
    """Return a chart for each number that `export.command` has printed."""
    scores = [entry["scores"] for run in runs for entry in run.of_kind("score")]
    names = [*dict.fromkeys(name for of_entry in scores for name in of_entry)]
    note = f"Printed by export.command; the first {_MOST_SCORES} numbers are drawn."
    return [
        (f"score-{i}", f"Score: {name}", name, note, partial(_scores_of, name))
        for i, name in enumerate(names[:_MOST_SCORES])
    ]


def _scores_of(name: str, run: RunRecord) -> _Curves:
    values = [entry["scores"].get(name) for entry in run.of_kind("score")]
    return {"": (run.column("score", "step"), np.array(values, float))}


def chart_svg(chart: Chart) -> str:
    labels = [*(curve.label for curve in chart.curves if curve.label), *chart.levels]
    columns = 2 if max(map(len, labels), default=0) <= _LONGEST_IN_TWO else 1
    height = 2.6 + _LINE * -(-len(labels) // columns)

    def draw(axes: Axes) -> None:
        _draw(axes, chart)
        if labels:
            axes.figure.legend(loc="outside lower center", ncols=columns)

    return _svg(chart.title, (4.6, height), draw)


def histogram_svg(values: npt.ArrayLike, title: str, unit: str, limit: float) -> str:
    """Draw a histogram of `values`, [n], with twenty bars from 0 to `limit`."""

    def draw(axes: Axes) -> None:
        axes.hist(np.asarray(values), bins=20, range=(0, limit), color=COLOURS[0][0])
        axes.set_title(title, fontsize=9)
        axes.set_xlabel(unit)
        axes.grid(axis="x", visible=False)

    return _svg(title, (3.6, 2.2), draw)


def _svg(title: str, size: tuple[float, float], draw: Callable[[Axes], None]) -> str:
    """Return a figure, which `draw` fills, as SVG with the page's colours and width."""
    out = io.StringIO()
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": title}):
        figure = Figure(size, layout="constrained")
        draw(figure.add_subplot())
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    # The page labels and scales it. Its parts need no names.
    tag = f'<svg role="img" aria-label="{html.escape(title)}" '
    text = re.sub(r"^.*?<svg [^>]*?(?=viewBox)", lambda _: tag, out.getvalue(), flags=re.DOTALL)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*">', "<g>", text)
    names = {_TEXT: "text", _GRID: "grid"}
    names |= {light: f"colour-{i}" for i, (light, _) in enumerate(COLOURS)}
    return re.sub(
        "|".join(names), lambda match: f"var(--{names[match[0]]})", text, flags=re.IGNORECASE
    )


def _draw(axes: Axes, chart: Chart) -> None:
    for curve in chart.curves:
        y, colour = curve.y, COLOURS[curve.colour % len(COLOURS)][0]
        if curve.mean_of:
            axes.plot(curve.x, y, color=colour, linewidth=0.7, alpha=0.4)
            y = smooth(y, curve.mean_of)
        axes.plot(
            curve.x,
            y,
            color=colour,
            linestyle=_DASHES[(curve.dash + curve.colour // len(COLOURS)) % len(_DASHES)],
            linewidth=1.4,
            marker="o" if len(y) <= _MOST_MARKERS else None,
            markersize=3.5,
            # matplotlib would leave out a label that begins with `_`.
            label=f" {curve.label}" if curve.label else None,
        )
    for label, value in chart.levels.items():
        axes.axhline(value, color=_TEXT, linestyle="--", linewidth=1, label=label)
    axes.set_xlabel("step")
    if chart.last_step:
        axes.set_xlim(-0.03 * chart.last_step, 1.03 * chart.last_step)
    axes.set_title(chart.unit, loc="left", fontsize="medium")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(6))
    values = np.concatenate([curve.y[np.isfinite(curve.y)] for curve in chart.curves])
    # A narrower logarithmic axis has less than two ticks, at powers of ten.
    if chart.name in _LOGARITHMIC and values.min() > 0 and values.max() > 100 * values.min():
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter("{x:g}")
    if chart.name == "learning-rate":
        axes.set_ylim(bottom=0)
