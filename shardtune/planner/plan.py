"""A plan of a run: memory of a rank by phase and cause, traffic and time."""

from __future__ import annotations

from dataclasses import dataclass

from shardtune.planner.arithmetic.estimate import Estimate
from shardtune.planner.arithmetic.figures import Peak
from shardtune.planner.arithmetic.shapes import Shapes
from shardtune.planner.arithmetic.storage import Storage
from shardtune.training.states.reshard import ReshardPolicy
from shardtune.training.states.state_bytes import StateBytes


@dataclass(frozen=True, kw_only=True)
class Plan(Estimate):
    """A run whose step was simulated, or whose memory is bounded by shapes, as `reason` says."""

    parameters: int  # the whole model's
    trained_parameters: int
    states: StateBytes
    policies: tuple[ReshardPolicy, ...]  # one per stage
    tiles: int  # tiles of experts and MLPs, see `tile_layers`
    pools_bytes: int  # what the allocator takes for tensors at the peak
    needed_bytes: int  # the peak if no group stayed gathered in memory that is left
    peaks: dict[str, Peak]  # by phase, with states, without the device's allowance
    attention: str  # the attention that the model takes; empty in a bound
    reason: str  # why no step was simulated; empty if one was
    shapes: Shapes
    storage: Storage
    kernels_s: float | None  # a step's kernels in sequence, without the bubble; None if not known

    @property
    def is_simulated(self) -> bool:
        return not self.reason

    @property
    def allocated_bytes(self) -> int:
        """The most bytes of tensors at once."""
        return max(peak.n_bytes for peak in self.peaks.values())

    @property
    def kept_groups(self) -> list[int]:
        """The number of groups that stay gathered in each stage, see `gathered_groups`."""
        return [policy.kept_groups for policy in self.policies]

    @property
    def host_holds_copies(self) -> bool:
        """Return whether host memory also holds the copies of an asynchronous save."""
        return self.pinned_bytes + self.storage.staging_bytes <= self.machine.host_bytes

    @property
    def cannot_fit(self) -> bool:
        """Return whether the run certainly does not fit, which a high bound does not prove."""
        # A bound has no allowance for the device here: it is an assumption, and would refuse
        # small models on small GPUs.
        least = self.peak_bytes if self.is_simulated else self.states.total
        return least > self.machine.memory_bytes or not self.host_fits

    @property
    def about_s(self) -> float | None:
        """Estimated seconds of a step: its kernels one after another, or its slowest link."""
        if self.kernels_s is None:
            return None
        return max(self.kernels_s / (1 - self.layout.bubble), self.floor_s)

    @property
    def has_experts(self) -> bool:
        return self.shapes.by_stage(1)[0].layers.experts > 0
