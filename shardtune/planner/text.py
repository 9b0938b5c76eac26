"""A plan in words and tables, for a terminal and for the log of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardtune.planner.changes import Change
from shardtune.planner.plan import Plan, link_bytes
from shardtune.planner.tracker import Cause


def describe(plan: Plan) -> Iterator[str]:
    """Yield the lines of a plan."""
    machine, states = plan.machine, plan.states
    is_whole = plan.trained_parameters == plan.parameters
    trained = "all" if is_whole else f"{plan.trained_parameters:,}"
    yield f"Parameters: {plan.parameters:,} | Trained: {trained}"
    yield (
        f"States: {_gb(states.total)} GB = {_gb(states.parameters)} GB parameters + "
        f"{_gb(states.gradients)} GB gradients + {_gb(states.optimizer)} GB optimizer"
    )
    yield ""
    yield "Memory of a rank by phase, GB:"
    causes = [c for c in Cause if any(_gb(p.by_cause[c]) != "0.0" for p in plan.peaks.values())]
    rows = [
        [phase, _gb(peak.n_bytes), *(_gb(peak.by_cause[cause]) for cause in causes)]
        for phase, peak in plan.peaks.items()
    ]
    yield from _table(["", "total", *causes], rows)
    yield ""
    between, inside = link_bytes(plan.traffic, machine)
    yield "Received in a step, GB:"
    rows = [[kind, _gb(between[kind]), _gb(inside[kind])] for kind in between]
    yield from _table(["", "by a node from others", "by a rank in its node"], rows)
    yield ""
    yield "A step takes at least: " + ", ".join(
        f"{seconds:.3g} s {part}" for part, seconds in plan.floors_s.items()
    )
    slowest = max(plan.floors_s.values())
    hours = slowest * 1e9 / plan.step_tokens / 3600
    yield f"1e9 tokens take at least {hours:.3g} h, in steps of {plan.step_tokens:,} tokens"
    host = (plan.states.total - plan.states.gradients) * machine.ranks_per_node
    where = f", and {_gb(host)} GB of each node's memory while it is written"
    yield (
        f"A checkpoint takes {_gb(plan.checkpoint_bytes)} GB of disk"
        f"{where if plan.config.checkpoint.mode == 'async' else ''}"
    )
    if plan.fits:
        yield verdict(plan)


def verdict(plan: Plan) -> str:
    """Say whether the run fits, and what bounds its speed."""
    limit = f"{_gb(plan.machine.memory_bytes)} GB"
    phase = max(plan.peaks, key=lambda name: plan.peaks[name].n_bytes)
    peak = (
        f"{_gb(plan.peak_bytes)} GB in {phase}, {_gb(plan.machine.allowance_bytes)} GB allowed for "
        "the device's own among them"
    )
    bound = max(plan.floors_s, key=lambda part: plan.floors_s[part])
    if plan.fits:
        return f"The run fits, {limit} hold the peak of {peak}; bound by {bound}"
    return f"The run does not fit, {limit} do not hold the peak of {peak}"


def describe_changes(changes: Sequence[Change]) -> Iterator[str]:
    """Yield a table of changes that would help."""
    if not changes:
        return
    yield "What would help:"
    rows = [
        [
            " ".join(f"{key}={value}" for key, value in change.values.items()),
            _gb(change.plan.peak_bytes),
            "yes" if change.plan.fits else "no",
            f"{max(change.plan.floors_s.values()):.3g}",
            change.price,
        ]
        for change in changes
    ]
    yield from _table(["change", "peak, GB", "fits", "step, s at least", "price"], rows)


def _gb(n_bytes: float) -> str:
    return f"{n_bytes / 1e9:.1f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        first, *others = (f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True))
        yield "  ".join(["", first, *others]).rstrip()
