"""The peak of each phase: what a simulated step shows, with the optimizer's state and update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from transformers import PreTrainedModel

from shardtune.config import Config
from shardtune.distributed.world import World
from shardtune.planner.bound import bound_bytes
from shardtune.planner.simulate import Measured
from shardtune.planner.tracker import Cause, Peak
from shardtune.training.sharded_optimizer import ShardedOptimizer
from shardtune.training.states import StateBytes


def step_memory(
    measured: Measured,
    states: StateBytes,
    optimizer: ShardedOptimizer,
    pieces: int,
    is_gpu: bool,
) -> tuple[dict[str, Peak], list[int]]:
    """Return the peak of each phase, and a GPU's pools. `pieces`: bytes of an update's."""
    worked_in = max(map(optimizer.eager_bytes, optimizer.trained))
    peaks = _peaks(measured, states, worked_in + pieces)
    pools = _pools(measured.pools, states) + [pieces] * bool(pieces)
    return peaks, pools if is_gpu else []


def _peaks(measured: Measured, states: StateBytes, update_bytes: int) -> dict[str, Peak]:
    """Return the peak of each phase, with the optimizer's state, which the simulation lacks."""
    optimizer = Counter({Cause.OPTIMIZER: states.optimizer})
    weights = Counter({Cause.PARAMETERS: states.parameters})
    highest: dict[str, Peak] = {}
    for (phase, _), peak in measured.peaks.items():
        if phase not in highest or peak.n_bytes > highest[phase].n_bytes:
            highest[phase] = peak
    gradients = 0 if states.host else states.gradients
    updated = weights + optimizer + Counter({Cause.GRADIENTS: gradients})
    updated[Cause.UPDATE] = update_bytes
    by_cause = {"load": weights}
    for phase in ("evaluate", "forward", "backward", "optimizer"):
        if phase in highest:
            by_cause[phase] = highest[phase].by_cause + optimizer
    # New weights are gathered when the update has freed what it works in.
    by_cause["optimizer"] = max(updated, by_cause["optimizer"], key=Counter.total)
    by_cause["save"] = weights + optimizer  # gradients are dropped before
    return {phase: Peak(causes.total(), causes) for phase, causes in by_cause.items()}


def _pools(pools: Mapping[tuple[str, int, int], int], states: StateBytes) -> list[int]:
    """Return the most bytes of each stream; the default one holds the optimizer's state, too.

    `pools`: those of each phase, place and stream.
    """
    highest: Counter[int] = Counter()
    for (_, _, stream), size in pools.items():
        highest[stream] = max(highest[stream], size)
    highest[0] += states.optimizer
    return list(highest.values())


def bounded_memory(
    model: PreTrainedModel, config: Config, states: StateBytes, world: World
) -> Peak:
    """Return the peak of any phase, by shapes alone."""
    total = bound_bytes(model, config, states, world)
    by_cause = Counter(
        {
            Cause.PARAMETERS: states.parameters,
            Cause.GRADIENTS: states.gradients,
            Cause.OPTIMIZER: states.optimizer,
            Cause.BOUNDED: total - states.total,
        }
    )
    return Peak(total, by_cause)
