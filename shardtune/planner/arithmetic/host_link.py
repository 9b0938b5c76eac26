"""Bytes that a rank copies to and from host memory in a step with `optimizer.offload`."""

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
        """Return the least seconds if all ranks of the node copy the same bytes."""
        rank_s = max(self) / machine.host_bytes_per_s  # both directions at once
        node_s = sum(self) * machine.ranks_per_node / machine.host_memory_bytes_per_s
        return max(rank_s, node_s)


class HostLink(NamedTuple):
    """Bytes that a rank copies in a step: during its backwards, and during the update."""

    gradients: Copied = Copied()
    update: Copied = Copied()

    def seconds(self, machine: Machine) -> float:
        return sum(copied.seconds(machine) for copied in self)


def host_link(trained: float, policy: ReshardPolicy, layout: Layout) -> HostLink:
    """Return the bytes that a rank copies to update `trained` elements."""
    if not layout.offloads:
        return HostLink()
    gradient = trained * BYTES[layout.gradient_dtype]
    states = trained * layout.host_bytes - gradient
    replicas_meet_once = layout.replicate > 1 and policy.keep_sums
    is_once = policy.keep_gradients or replicas_meet_once
    times = 1 if is_once else layout.micro_batches
    # Each further micro-batch reads the sum so far back, to add to it.
    sums = Copied(times * gradient, (times - 1) * gradient)
    return HostLink(sums, Copied(states, gradient + states))


def host_states_bytes(trained: float, layout: Layout) -> float:
    """Return a rank's host memory for the states of `trained` elements."""
    # While it loads, a rank holds the masters of all replicas beside the part that it pins.
    read = (1 + layout.replicate) * layout.host_master_bytes
    return trained * max(layout.host_bytes, read)


def pieces_bytes(largest: int, layout: Layout) -> int:
    """Return the device's bytes for pieces of an update. `largest`: a weight's elements."""
    return round(PIECES * min(largest, PIECE) * layout.host_bytes)
