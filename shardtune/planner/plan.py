"""A plan: the memory that a run takes of a rank by cause and phase, its traffic and its time."""

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
    """A run whose step is simulated. Where none is, memory is bounded by shapes alone."""

    parameters: int  # of the whole model
    trained_parameters: int
    states: StateBytes
    policies: tuple[ReshardPolicy, ...]  # of each stage
    tiles: int  # in which experts and MLPs run, see `tile_layers`
    needed_bytes: int  # without groups that stay gathered although others have no room
    peaks: dict[str, Peak]  # by phase, the states included and the allowance not
    attention: str  # how the model attends; empty if `reason` is not
    reason: str  # why no step was simulated; empty if one was
    shapes: Shapes
    storage: Storage

    # Seconds of a step's kernels one after another, its bubble left out; None where none are known.
    kernels_s: float | None

    @property
    def allocated_bytes(self) -> int:
        """The most bytes of tensors at once."""
        return max(peak.n_bytes for peak in self.peaks.values())

    @property
    def kept_groups(self) -> list[int]:
        """The groups that stay gathered in each stage, see `gathered_groups`."""
        return [policy.kept_groups for policy in self.policies]

    @property
    def host_holds_copies(self) -> bool:
        """Whether a node's own memory also holds the copies of an asynchronous save."""
        return self.pinned_bytes + self.storage.staging_bytes <= self.machine.host_bytes

    @property
    def cannot_fit(self) -> bool:
        """Whether it certainly does not fit: a bound may be far above the peak.

        Beside a bound the device's allowance does not count: nobody has measured it, and a small
        model would be refused on a small GPU.
        """
        least = self.states.total if self.reason else self.peak_bytes
        return least > self.machine.memory_bytes or not self.host_fits

    @property
    def eager_s(self) -> float | None:
        """About the seconds of a step on one kind of GPU, whose kernels move what they move."""
        return None if self.kernels_s is None else self.kernels_s / (1 - self.layout.bubble)
