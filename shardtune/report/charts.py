"""Choose the curves of runs, over their steps, and the chart of each."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from shardtune.report.read_run import FloatArray, RunRecord

_SMOOTHED_FROM = 100  # steps
_MOST_MARKERS = 40
_MOST_SCORES = 20
_SMOOTHED = ("loss", "gradient-norm", "speed", "mfu")  # long curves are faint, beside their means
_LOGARITHMIC = ("perplexity", "gradient-norm")
PHASE_NAMES = {"waiting": "waiting in collectives"}  # other phases have the names of `Phase`
_Curves = dict[str, tuple[FloatArray, FloatArray]]  # steps and values by label
_CurvesOf = Callable[[RunRecord], _Curves]


@dataclass(frozen=True)
class Curve:
    """A line: `y` over the steps `x`. `colour` and `dash` are numbers of styles."""

    label: str
    x: FloatArray
    y: FloatArray
    colour: int = 0
    dash: int = 0
    is_faint: bool = False
    has_markers: bool = False


@dataclass(frozen=True)
class Chart:
    """One figure. `levels`: horizontal lines by label. `last_step`: the end of every chart."""

    name: str
    title: str
    unit: str
    note: str
    curves: list[Curve]
    is_log: bool = False
    levels: dict[str, float] = field(default_factory=dict)
    last_step: int = 0


def make_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    chart = partial(_chart, runs)
    loss = "Mean over the trained tokens."
    perplexity = "exp of the mean loss over the evaluation data; step 0 is the baseline."
    norm = "Of all gradients together, before clipping."
    speed = "All real tokens, over all ranks; evaluations and saves left out."
    mfu = "The model's arithmetic as a share of the devices' peak."
    memory = "The most that any rank has held so far."
    phases = (
        "Of the slowest rank, which waits for no other but for the communication. Above a third, "
        "the run is bound by it: by the network, between nodes."
    )
    charts = [
        chart("loss", "Loss", "nats per token", loss, _field("loss")),
        chart("perplexity", "Evaluation perplexity", "perplexity", perplexity, _perplexity),
        chart("gradient-norm", "Gradient norm", "norm", norm, _field("grad_norm")),
        chart("learning-rate", "Learning rate", "", "", _field("lr")),
        chart("speed", "Tokens per second", "tok/s", speed, _field("tokens_per_second")),
        chart("mfu", "Model FLOPs utilisation", "%", mfu, _field("mfu", scale=100)),
        replace(
            chart("memory", "Memory per rank", "GB", memory, _field("memory_bytes", scale=1e-9)),
            levels=_planned(runs),
        ),
        chart("phases", "How a step divides", "% of a step", phases, _phases),
        *_scores(runs),
    ]
    last_step = max(run.last_step for run in runs)
    return [replace(chart, last_step=last_step) for chart in charts if chart.curves]


def _chart(
    runs: Sequence[RunRecord],
    name: str,
    title: str,
    unit: str,
    note: str,
    curves_of: _CurvesOf,
) -> Chart:
    curves = []
    for number, run in enumerate(runs):
        for i, (what, (x, y)) in enumerate(curves_of(run).items()):
            if not np.isfinite(y).any():
                continue
            colour, dash = (number, i) if len(runs) > 1 else (i, i)
            if width := mean_width(len(y)) if name in _SMOOTHED else 0:
                each = "" if len(runs) > 1 else "each step"
                curves.append(Curve(each, x, y, colour, is_faint=True))
                what, y = f"mean of {width} steps", smooth(y, width)
            label, has_markers = _label(run, runs, what), len(y) <= _MOST_MARKERS
            curves.append(Curve(label, x, y, colour, dash, has_markers=has_markers))
    return Chart(name, title, unit, note, curves, name in _LOGARITHMIC)


def _label(run: RunRecord, runs: Sequence[RunRecord], what: str) -> str:
    return ", ".join(part for part in (run.name if len(runs) > 1 else "", what) if part)


def smooth(y: FloatArray, width: int) -> FloatArray:
    """Return running means of the finite values among the last `width`, NaN if none is finite."""
    sums, counts = np.nancumsum(y), np.cumsum(np.isfinite(y)).astype(float)
    for running in (sums, counts):
        running[width:] -= running[:-width].copy()
    return sums / np.where(counts > 0, counts, np.nan)


def mean_width(steps: int) -> int:
    """Return the number of steps in a shown running mean; 0 for a short run."""
    return max(10, steps // 50) if steps >= _SMOOTHED_FROM else 0


def network_share(run: RunRecord) -> float:
    """Return the part of a step that the slowest rank waits in collectives; NaN if not known."""
    rows = [entry.get("seconds", {}) for entry in run.of_kind("ranks")]
    total = sum(sum(row.values()) for row in rows)
    return sum(row.get("waiting", 0) for row in rows) / total if total else math.nan


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
    steps, rows = run.column("ranks", "step"), [e.get("seconds", {}) for e in run.of_kind("ranks")]
    totals = np.array([sum(row.values()) or np.nan for row in rows])
    return {
        PHASE_NAMES.get(name, name): (
            steps,
            100 * np.array([row.get(name, 0) for row in rows]) / totals,
        )
        for name in dict.fromkeys(name for row in rows for name in row)
    }


def _scores(runs: Sequence[RunRecord]) -> list[Chart]:
    """Return a chart for each number that `export.command` has printed."""
    scores = [entry["scores"] for run in runs for entry in run.of_kind("score")]
    names = [*dict.fromkeys(name for of_entry in scores for name in of_entry)]
    note = "Printed by export.command for the models of steps, and for the final one."
    if len(names) > _MOST_SCORES:
        note += f" The first {_MOST_SCORES} of {len(names)} numbers are drawn."

    def curves_of(run: RunRecord, name: str) -> _Curves:
        values = [entry["scores"].get(name) for entry in run.of_kind("score")]
        return {"": (run.column("score", "step"), np.array(values, float))}

    charts = []
    for i, name in enumerate(names[:_MOST_SCORES]):
        slug = re.sub(r"[^a-z0-9]+", "-", name.lower())[:40]
        shown = f"score-{slug}-{i}", f"Score: {name}", name, note
        charts.append(_chart(runs, *shown, partial(curves_of, name=name)))
    return charts
