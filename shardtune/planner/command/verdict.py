"""Say whether a plan fits the memory, for `shardtune plan` and for a run's log."""

from __future__ import annotations

from shardtune.planner.command.text import TIGHT, pinned
from shardtune.planner.plan import Plan
from shardtune.units import gb


def verdict(plan: Plan) -> str:
    """Say whether the run fits, and what bounds its speed.

    A bound below the memory proves that a run fits. A bound above it proves nothing, unless the
    states alone exceed the memory.
    """
    limit, peak = f"{gb(plan.machine.memory_bytes)} GB", _peak(plan)
    if not plan.host_fits:
        both = not plan.device_fits and plan.is_simulated  # a bound may be far above the peak
        beside = f", and {limit} not the peak of {peak}" if both else ""
        return (
            f"The run does not fit, {gb(plan.machine.host_bytes)} GB of a node's own memory do not "
            f"hold {' and '.join(pinned(plan.storage))}{beside}"
        )
    if plan.fits:
        part = plan.bound_by
        bound_by = part if not part or part.startswith("arithmetic") else f"traffic {part}"
        speed = f"; bound by {bound_by}" if bound_by else ""
        tight = f", but it is tight ({TIGHT})" * plan.is_tight
        return f"The run fits{tight}, {limit} hold the peak of {peak}{speed}"
    if plan.is_simulated:
        is_less = plan.config.model.compile and plan.layout.checkpointing == "none"
        compiled = "; compiled layers keep a quarter to a third less than these" * is_less
        return f"The run does not fit, {limit} do not hold the peak of {peak}{compiled}"
    states = f"its {gb(plan.states.total)} GB of parameters, gradients and optimizer"
    if plan.cannot_fit:
        return f"The run does not fit, {limit} do not hold {states}; a bound is the peak of {peak}"
    return f"The run may not fit, {limit} hold {states}, but not a bound, the peak of {peak}"


def lacking(plan: Plan) -> str:
    """Name the hardware that would make a run fit."""
    devices = f"more or larger {'GPUs' if plan.machine.is_gpu else 'devices'}"
    if plan.host_fits:
        return devices
    # More nodes divide states further, but not the inputs of a rank's layers.
    are_divided = plan.storage.inputs_bytes <= plan.machine.host_bytes
    host = f"more host memory{' or nodes' if are_divided else ''}"
    return host if plan.device_fits else f"{host}, and {devices}"


def _peak(plan: Plan) -> str:
    """Return the peak that the device must hold, and its parts."""
    phase = max(plan.peaks, key=lambda name: plan.peaks[name].n_bytes)
    parts = [f"{gb(plan.allocated_bytes)} GB allocated in {phase}"]
    if streams := plan.pools_bytes - plan.allocated_bytes:
        parts.append(f"{gb(streams)} GB kept for streams")
    parts.append(f"{gb(plan.peak_bytes - plan.pools_bytes)} GB allowed for the device's own")
    return f"{gb(plan.peak_bytes)} GB ({' + '.join(parts)})"
