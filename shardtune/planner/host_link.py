"""What a step copies between a rank and its node's own memory with `optimizer.offload`."""

from __future__ import annotations

from typing import NamedTuple

from shardtune.config import Config
from shardtune.distributed.tensors import DTYPES
from shardtune.planner.machine import Machine
from shardtune.training.host_states import PIECE, PIECES
from shardtune.training.reshard import ReshardPolicy

_EIGHT_BITS = 2 * (1 + 4 / 256)  # bytes of both moments, with the scales of their blocks


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


def host_link(
    trained: float, compute_bytes: int, policy: ReshardPolicy, config: Config
) -> HostLink:
    """Return what a rank copies that updates so many elements."""
    if not config.optimizer.offload:
        return HostLink()
    gradient, states = (trained * n for n in _bytes(compute_bytes, config))
    replicas_meet_once = config.parallel.replicate > 1 and policy.keep_sums
    is_once = policy.keep_gradients or replicas_meet_once
    times = 1 if is_once else config.train.gradient_accumulation_steps
    # A sum comes back for each further micro-batch.
    sums = Copied(times * gradient, (times - 1) * gradient)
    return HostLink(sums, Copied(states, gradient + states))


def host_states_bytes(trained: float, compute_bytes: int, config: Config) -> float:
    """Return the host memory of a rank that updates so many elements."""
    if not config.optimizer.offload:
        return 0.0
    # Until they are pinned, each replica has read all of its masters.
    read = (1 + config.parallel.replicate) * _master_bytes(compute_bytes, config)
    return trained * max(sum(_bytes(compute_bytes, config)), read)


def pieces_bytes(largest: int, compute_bytes: int, config: Config) -> int:
    """Return the device's memory for pieces of an update. `largest`: a weight's elements."""
    if not config.optimizer.offload:
        return 0
    return round(PIECES * min(largest, PIECE) * sum(_bytes(compute_bytes, config)))


def _bytes(compute_bytes: int, config: Config) -> tuple[int, float]:
    """Return the bytes of an element's gradient, and of its states in host memory."""
    master = DTYPES[config.model.master_dtype].itemsize
    gradient = max(master, DTYPES[config.model.reduce_dtype].itemsize)
    moments = _EIGHT_BITS if config.optimizer.name == "adamw8bit" else 2 * master
    return gradient, moments + _master_bytes(compute_bytes, config)


def _master_bytes(compute_bytes: int, config: Config) -> int:
    """Return the bytes of an element's master in host memory: the device may have it itself."""
    master = DTYPES[config.model.master_dtype].itemsize
    return master if compute_bytes < master else 0
