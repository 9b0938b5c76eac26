"""A planned run: an estimate by arithmetic on shapes and rates, or a plan with a simulated step.

Memory is a rank's, by phase and cause.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from shardtune.config import Config
from shardtune.distributed.layout import Layout
from shardtune.planner.arithmetic.figures import Collective, Peak
from shardtune.planner.arithmetic.machine import Machine, link_bytes
from shardtune.planner.arithmetic.shapes import (
    Shapes,
    host_inputs_bytes,
    least_traffic,
    rough_memory,
    rows_bytes,
)
from shardtune.planner.arithmetic.storage import HostLink, Storage, host_link, host_states_bytes
from shardtune.training.states.reshard import ReshardPolicy
from shardtune.training.states.sharded_optimizer import StateBytes

TIGHT_BYTES = 3e9  # the plans of others' best described runs are up to 9% below their memory


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """An estimated run on a machine. Memory is the fullest rank's, and rows are full."""

    config: Config
    layout: Layout
    machine: Machine
    peak_bytes: int  # the memory that the device must have
    pinned_bytes: int  # host memory of a node that the run cannot do without
    traffic: Sequence[Counter[Collective]]  # bytes per step of the first rank of each stage
    host_link: HostLink
    step_flops: float | None  # without recomputation; None if not known
    forward_flops: float | None  # of these, without the head
    rows_bytes: int  # gathered and scattered by ranks of `tensor` in a step
    # Values of keys that differ from the configured run's, and their price in words.
    values: Mapping[str, Any] = field(default_factory=dict)
    price: str = ""

    @property
    def fits(self) -> bool:
        return self.device_fits and self.host_fits

    @property
    def device_fits(self) -> bool:
        return self.peak_bytes <= self.machine.memory_bytes

    @property
    def is_tight(self) -> bool:
        """Return whether a run that fits takes the last GBs of its GPUs."""
        return self.machine.is_gpu and self.machine.memory_bytes - self.peak_bytes < TIGHT_BYTES

    @property
    def host_fits(self) -> bool:
        """Return whether a node's host memory holds what the run pins there."""
        return self.pinned_bytes <= self.machine.host_bytes

    @property
    def step_tokens(self) -> int:
        return self.layout.rows_per_step * self.layout.max_length

    @property
    def received(self) -> tuple[dict[str, float], dict[str, float]]:
        """By kind of collective, the bytes of a step that enter a node, and a rank from its node.

        The node and the rank are the ones that receive the most.
        """
        machine = self.machine
        stage_ranks = machine.ranks // len(self.traffic)
        ranks = min(stage_ranks, machine.ranks_per_node)
        nodes: defaultdict[int, Counter[str]] = defaultdict(Counter)
        insides = []
        for stage, traffic in enumerate(self.traffic):
            between, inside = link_bytes(traffic, machine, ranks)
            nodes[stage * stage_ranks // machine.ranks_per_node].update(between)
            insides.append(inside)
        fullest = max(nodes.values(), key=lambda node: sum(node.values()))
        return dict(fullest), max(insides, key=lambda inside: sum(inside.values()))

    @cached_property
    def floors_s(self) -> dict[str, float]:
        """The least seconds of each part of a step, its bubble included."""
        machine = self.machine
        between, inside = self.received
        floors = {
            "between nodes": sum(between.values()) / machine.node_bytes_per_s,
            "inside a node": sum(inside.values()) / machine.rank_bytes_per_s,
        }
        if self.layout.offloads:
            floors["with host memory"] = self.host_link.seconds(machine)
        if self.step_flops is not None:
            # Full checkpointing runs each layer's forward once more.
            again = (self.forward_flops or 0.0) * self.layout.keeps_inputs_alone
            seconds = (self.step_flops + again) / (machine.ranks * machine.flops_per_s)
            floors["arithmetic"] = seconds / (1 - self.layout.bubble)
        if self.layout.tensor > 1:
            # A block waits for its row, and the row's sums wait for the block: nothing hides them.
            moved = self.rows_bytes * (self.layout.tensor - 1) / self.layout.tensor
            waits_s = moved / machine.rank_bytes_per_s / (1 - self.layout.bubble)
            floors["arithmetic and shared rows"] = floors.pop("arithmetic", 0.0) + waits_s
        return floors

    @property
    def floor_s(self) -> float:
        """The least seconds of a step."""
        return max(self.floors_s.values())

    @property
    def seconds_per_token(self) -> float:
        return self.floor_s / self.step_tokens

    @property
    def bound_by(self) -> str | None:
        """The part of a step that takes the longest, or None if no rate is known."""
        longest = max(self.floors_s, key=lambda part: self.floors_s[part])
        return longest if self.floors_s[longest] else None


def estimate(
    config: Config,
    shapes: Shapes,
    machine: Machine,
    step_flops: float | None,
    forward_flops: float | None,
) -> Estimate:
    """Estimate a run from the shapes of its model."""
    layout = machine.layout(config)
    free = machine.memory_bytes - machine.allowance_bytes(layout)
    traffic, peaks, links = [], [], []
    states, inputs = [], []  # in host memory
    for stage in range(layout.stages):
        memory, keeps = rough_memory(shapes, stage, layout, free)
        peaks.append(memory + machine.allowance_bytes(layout, memory))
        traffic.append(least_traffic(shapes, stage, keeps, layout))
        updated = shapes.trained(stage, layout)
        links.append(host_link(updated, keeps.policy, layout))
        states.append(host_states_bytes(updated, layout))
        inputs.append(machine.is_gpu * host_inputs_bytes(shapes, stage, layout))
    return Estimate(
        config=config,
        layout=layout,
        machine=machine,
        peak_bytes=round(max(peaks)),
        pinned_bytes=round(machine.ranks_per_node * (max(states) + max(inputs))),
        traffic=traffic,
        host_link=max(links),
        step_flops=step_flops,
        forward_flops=forward_flops,
        rows_bytes=max(sum(rows_bytes(shapes, stage, layout)) for stage in range(layout.stages)),
    )


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
