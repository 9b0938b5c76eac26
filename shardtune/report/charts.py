"""Choose the curves of runs, and the chart of each."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

import numpy as np

from shardtune.report.read_run import FloatArray, RunRecord

AXES = {"step": "steps", "tokens": "tokens", "time": "time"}
_UNITS = {
    "step": {"step": 1.0},
    "tokens": {"tokens": 1.0, "thousand tokens": 1e3, "million tokens": 1e6, "billion tokens": 1e9},
    "time": {"seconds of training": 1.0, "minutes of training": 60.0, "hours of training": 3600.0},
}
_UNITS["time"]["days of training"] = 86400.0
_SMOOTHED_FROM = 100  # steps
_MOST_SCORES = 20
PHASE_NAMES = {"waiting": "waiting in collectives"}  # other phases have the names of `Phase`


@dataclass(frozen=True)
class Curve:
    """A line: `y` over steps, tokens and seconds. `colour` and `dash` are numbers of styles."""

    label: str
    x: dict[str, FloatArray]
    y: FloatArray
    colour: int = 0
    dash: int = 0
    is_faint: bool = False
    has_markers: bool = False


class XAxis(NamedTuple):
    """An x axis of all charts: its unit, the size of the unit, and its end in units."""

    label: str
    size: float
    end: float


@dataclass(frozen=True)
class Chart:
    """One figure over several x axes. `levels`: horizontal lines by label."""

    name: str
    title: str
    unit: str
    note: str
    curves: list[Curve]
    is_log: bool = False
    levels: dict[str, float] = field(default_factory=dict)
    x_axes: dict[str, XAxis] = field(default_factory=dict)


def make_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """Return the charts for which any of the runs has numbers."""
    norm = "Of all gradients together, before clipping."
    speed = "All real tokens, over all ranks; evaluations and saves left out."
    arithmetic = "The model's arithmetic as a share of the devices' peak."
    charts = [
        _of_steps(runs, "loss", "Loss", "nats per token", "loss", "Mean over the trained tokens."),
        _perplexity(runs),
        _of_steps(runs, "gradient-norm", "Gradient norm", "norm", "grad_norm", norm, is_log=True),
        _learning_rate(runs),
        _of_steps(runs, "speed", "Tokens per second", "tok/s", "tokens_per_second", speed),
        _of_steps(runs, "mfu", "Model FLOPs utilisation", "%", "mfu", arithmetic, scale=100),
        _memory(runs),
        _waiting(runs),
        _phases(runs),
        _slowest(runs),
        _saves(runs),
        *_scores(runs),
        *_experts(runs),
    ]
    for chart in charts:
        chart.curves[:] = [curve for curve in chart.curves if np.isfinite(curve.y).any()]
    x_axes = _x_axes(runs)
    return [replace(chart, x_axes=x_axes) for chart in charts if chart.curves]


def _x_axes(runs: Sequence[RunRecord]) -> dict[str, XAxis]:
    """Choose for each axis the largest unit that fits twice into the longest run."""
    ends = [run.positions(np.array([float(run.last_step)])) for run in runs]
    x_axes = {}
    for name, sizes in _UNITS.items():
        end = max(float(positions[name][0]) for positions in ends)
        fitting = [unit for unit in sizes.items() if 2 * unit[1] <= end]
        label, size = fitting[-1] if fitting else next(iter(sizes.items()))
        x_axes[name] = XAxis(label, size, end / size)
    return x_axes


def thin(x: FloatArray, y: FloatArray, points: int) -> tuple[FloatArray, FloatArray]:
    """Keep about `points` finite points: the lowest and the highest of each stretch."""
    is_finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[is_finite], y[is_finite]
    if len(y) <= points:
        return x, y
    kept = [
        stretch[0] + extreme
        for stretch in np.array_split(np.arange(len(y)), points // 2)
        for extreme in sorted({int(y[stretch].argmin()), int(y[stretch].argmax())})
    ]
    return x[kept], y[kept]


def smooth(y: FloatArray, width: int) -> FloatArray:
    """Return running means of the finite values among the last `width`, NaN if none is finite."""
    sums, counts = np.nancumsum(y), np.cumsum(np.isfinite(y)).astype(float)
    for running in (sums, counts):
        running[width:] -= running[:-width].copy()
    return sums / np.where(counts > 0, counts, np.nan)


def mean_width(steps: int) -> int:
    """Return the number of steps in a shown running mean; 0 for a short run."""
    return max(10, steps // 50) if steps >= _SMOOTHED_FROM else 0


def _label(run: RunRecord, runs: Sequence[RunRecord], what: str) -> str:
    return ", ".join(part for part in (run.name if len(runs) > 1 else "", what) if part)


def _of_steps(
    runs: Sequence[RunRecord],
    name: str,
    title: str,
    unit: str,
    column: str,
    note: str,
    *,
    is_log: bool = False,
    is_smoothed: bool = True,
    scale: float = 1,
    kind: str = "step",
) -> Chart:
    """Chart a field of a kind; a long curve is faint, beside its running mean."""
    curves = []
    for number, run in enumerate(runs):
        x = run.positions(run.column(kind, "step"))
        y = run.column(kind, column) * scale
        width = mean_width(len(y))
        if is_smoothed and width:
            curves.append(Curve("" if len(runs) > 1 else "each step", x, y, number, is_faint=True))
            label = _label(run, runs, f"mean of {width} steps")
            curves.append(Curve(label, x, smooth(y, width), number))
        else:
            label = _label(run, runs, "")
            curves.append(Curve(label, x, y, number, has_markers=len(y) <= 40))
    return Chart(name, title, unit, note, curves, is_log)


def _learning_rate(runs: Sequence[RunRecord]) -> Chart:
    most = max(np.nanmax([0.0, *run.column("step", "lr")]) for run in runs)
    size = 10.0 ** math.floor(math.log10(most)) if most else 1.0
    unit = f"x {size:g}" if size != 1 else ""
    name, title = "learning-rate", "Learning rate"
    return _of_steps(runs, name, title, unit, "lr", "", is_smoothed=False, scale=1 / size)


def _perplexity(runs: Sequence[RunRecord]) -> Chart:
    curves = []
    for number, run in enumerate(runs):
        names = [None, *dict.fromkeys(e["set"] for e in run.of_kind("eval") if "set" in e)]
        for i, name in enumerate(names):
            chosen = np.array([entry.get("set") == name for entry in run.of_kind("eval")], bool)
            steps = run.column("eval", "step")[chosen]
            y = run.column("eval", "perplexity")[chosen]
            label = _label(run, runs, name or ("all sets" if len(names) > 1 else ""))
            colour, dash = (number, i) if len(runs) > 1 else (i, i)
            curves.append(
                Curve(label, run.positions(steps), y, colour, dash, has_markers=len(y) <= 40)
            )
    note = "exp of the mean loss over the evaluation data; step 0 is the baseline."
    shown = np.concatenate([curve.y[np.isfinite(curve.y)] for curve in curves])
    is_wide = len(shown) > 0 and shown.max() >= 100 * shown.min()
    return Chart("perplexity", "Evaluation perplexity", "perplexity", note, curves, is_wide)


def _scores(runs: Sequence[RunRecord]) -> Iterator[Chart]:
    """Yield a chart for each number that `export.command` has printed."""
    entries = [run.of_kind("score") for run in runs]
    names = dict.fromkeys(name for of_run in entries for e in of_run for name in e["scores"])
    note = "Printed by export.command for the models of steps, and for the final one."
    if len(names) > _MOST_SCORES:
        note += f" The first {_MOST_SCORES} of {len(names)} numbers are drawn."
    for i, name in enumerate(islice(names, _MOST_SCORES)):
        curves = []
        for number, (run, of_run) in enumerate(zip(runs, entries, strict=True)):
            scored = sorted((e for e in of_run if name in e["scores"]), key=lambda e: e["step"])
            y = np.array([e["scores"][name] for e in scored], float)
            x = run.positions(np.array([e["step"] for e in scored], float))
            curves.append(Curve(_label(run, runs, ""), x, y, number, has_markers=True))
        slug = f"{re.sub(r'[^a-z0-9]+', '-', name.lower())[:40]}-{i}"
        yield Chart(f"score-{slug}", f"Score: {name}", name, note, curves)


def _memory(runs: Sequence[RunRecord]) -> Chart:
    note = "The most that any rank has held so far."
    chart = _of_steps(
        runs, "memory", "Memory per rank", "GB", "memory_bytes", note, is_smoothed=False, scale=1e-9
    )
    for run in runs:
        for entry in run.of_kind("plan")[-1:]:
            if predicted := entry.get("predicted_peak_bytes"):
                chart.levels[_label(run, runs, "the plan")] = predicted / 1e9
    return chart


def _waiting(runs: Sequence[RunRecord]) -> Chart:
    curves = []
    for number, run in enumerate(runs):
        share = 100 * run.column("step", "data_seconds") / run.column("step", "seconds")
        x = run.positions(run.column("step", "step"))
        curves.append(Curve(_label(run, runs, ""), x, share, number))
    note = "Of each step's time, on the rank that waited longest for its batches."
    return Chart("waiting", "Waiting for data", "% of a step", note, curves)


def _phases(runs: Sequence[RunRecord]) -> Chart:
    curves = []
    for number, run in enumerate(runs):
        x = run.positions(run.column("ranks", "step"))
        rows = [entry.get("seconds", {}) for entry in run.of_kind("ranks")]
        names = dict.fromkeys(name for row in rows for name in row)
        for i, name in enumerate(names):
            y = np.array([100 * row.get(name, 0) / (sum(row.values()) or np.nan) for row in rows])
            label = _label(run, runs, PHASE_NAMES.get(name, name))
            colour, dash = (number, i) if len(runs) > 1 else (i, i)
            curves.append(Curve(label, x, y, colour, dash, has_markers=len(y) <= 40))
    note = (
        "Of the slowest rank, which waits for no other but for the communication. Above a third, "
        "the run is bound by it: by the network, between nodes."
    )
    return Chart("phases", "How a step divides", "% of a step", note, curves)


def network_share(run: RunRecord) -> float:
    """Return the part of a step that the slowest rank waits in collectives; NaN if not known."""
    rows = [entry.get("seconds", {}) for entry in run.of_kind("ranks")]
    total = sum(sum(row.values()) for row in rows)
    return sum(row.get("waiting", 0) for row in rows) / total if total else math.nan


def _slowest(runs: Sequence[RunRecord]) -> Chart:
    note = "Its own time, without waiting, as a multiple of the median rank's, over ten steps each."
    unit = "x the median"
    return _of_steps(
        runs, "ranks", "Slowest rank", unit, "ratio", note, is_smoothed=False, kind="ranks"
    )


def _saves(runs: Sequence[RunRecord]) -> Chart:
    curves, note = [], "How long each save took."
    for number, run in enumerate(runs):
        x, seconds = run.positions(run.column("save", "step")), run.column("save", "seconds")
        problems = [entry.get("problem") for entry in run.of_kind("save")]
        has_failed = np.array([problem is not None for problem in problems], bool)
        parts = {
            "until it was committed": np.where(has_failed, np.nan, seconds),
            "training waited": run.column("save", "stall_seconds"),
            "until it failed": np.where(has_failed, seconds, np.nan),
        }
        for i, (what, y) in enumerate(parts.items()):
            colour, dash = (number, i) if len(runs) > 1 else (i, i)
            curves.append(Curve(_label(run, runs, what), x, y, colour, dash, False, True))
        if has_failed.any():
            last = next(filter(None, reversed(problems)))
            note += f" {_label(run, runs, f'{has_failed.sum()} failed')}, the last one: {last}."
    return Chart("saves", "Checkpoints", "seconds", note, curves)


def _experts(runs: Sequence[RunRecord]) -> Iterator[Chart]:
    """Yield the balance of a mixture of experts, over its layers."""

    def over_layers(field_name: str, choose: Callable[[list[float]], float]) -> list[Curve]:
        curves = []
        for number, run in enumerate(runs):
            rows = [
                [layer[field_name] for layer in entry.get("layers", []) if field_name in layer]
                for entry in run.of_kind("experts")
            ]
            y = np.array([choose(row) if row else np.nan for row in rows])
            x = run.positions(run.column("experts", "step"))
            curves.append(Curve(_label(run, runs, ""), x, y, number))
        return curves

    entropy = "Of the router's choices in the least even layer; 1 is even."
    yield Chart("router", "Router entropy", "entropy", entropy, over_layers("entropy", min))
    idle = "Experts that no token chose in the step, over all layers."
    yield Chart("idle", "Idle experts", "experts", idle, over_layers("without_tokens", sum))
    full = "Tokens of the fullest rank as a multiple of the mean, in the least even layer."
    yield Chart("balance", "Fullest rank", "x the mean", full, over_layers("rank_imbalance", max))
