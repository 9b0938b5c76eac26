"""What a step copies between a rank and its node's own memory with `optimizer.offload`."""

from __future__ import annotations

from typing import NamedTuple

from shardtune.distributed.layout import BYTES, Layout
from shardtune.planner.arithmetic.machine import Machine
from shardtune.training.states.host_states import PIECE, PIECES
from shardtune.training.states.reshard import ReshardPolicy


class Copied(NamedTuple):
    """Bytes that a rank copies at the same time."""

    to_host: float = 0
    from_host: float = 0

    def seconds(self, machine: Machine) -> float:
        """Return how long they take at least where all ranks of a node copy as many."""
        of_node = sum(self) * machine.ranks_per_node
        own = max(self) / machine.host_bytes_per_s
        return max(own, of_node / machine.host_memory_bytes_per_s)


class HostLink(NamedTuple):
    """What a rank copies in a step: beside its backwards, and while its weights are updated."""

    gradients: Copied = Copied()
    update: Copied = Copied()

    def seconds(self, machine: Machine) -> float:
        return sum(each.seconds(machine) for each in self)


def host_link(trained: float, policy: ReshardPolicy, layout: Layout) -> HostLink:
    """Return what a rank copies that updates so many elements."""
    if not layout.offloads:
        return HostLink()
    gradient = trained * BYTES[layout.gradient_dtype]
    states = trained * layout.host_bytes - gradient
    replicas_meet_once = layout.replicate > 1 and policy.keep_sums
    is_once = policy.keep_gradients or replicas_meet_once
    times = 1 if is_once else layout.micro_batches
    # A sum comes back for each further micro-batch.
    sums = Copied(times * gradient, (times - 1) * gradient)
    return HostLink(sums, Copied(states, gradient + states))


def host_states_bytes(trained: float, layout: Layout) -> float:
    """Return the host memory of a rank that updates so many elements."""
    # Until they are pinned, each replica has read all of its masters.
    read = (1 + layout.replicate) * layout.host_master_bytes
    return trained * max(layout.host_bytes, read)


def pieces_bytes(largest: int, layout: Layout) -> int:
    """Return the device's memory for pieces of an update. `largest`: a weight's elements."""
    return round(PIECES * min(largest, PIECE) * layout.host_bytes)
