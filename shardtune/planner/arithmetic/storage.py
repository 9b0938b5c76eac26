"""Bytes of a checkpoint, and host memory of a node for loading and saving."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import NamedTuple

from transformers import PreTrainedConfig, PreTrainedModel

from shardtune.config import Config
from shardtune.distributed.layout import BYTES, Layout
from shardtune.distributed.tensors import to_local
from shardtune.distributed.world import World
from shardtune.model.source.files import model_folder
from shardtune.model.source.quantised import piece_bytes
from shardtune.planner.arithmetic.machine import Machine
from shardtune.planner.arithmetic.shapes import Shapes, host_inputs_bytes
from shardtune.training.states.host_states import PIECE, PIECES
from shardtune.training.states.reshard import ReshardPolicy
from shardtune.training.states.sharded_optimizer import StateBytes


@dataclass(frozen=True)
class Storage:
    """Bytes on the disks of all nodes, and in the memory of one node."""

    checkpoint_bytes: int
    staging_bytes: int  # host memory for copies that are being saved
    loading_bytes: int  # host memory for pieces of the largest parameter
    inputs_bytes: int  # host memory for inputs of layers
    states_bytes: int  # host memory for masters, moments and gradients

    @property
    def pinned_bytes(self) -> int:
        """Host memory that a run needs; without memory for copies it saves synchronously."""
        return self.inputs_bytes + self.states_bytes


def plan_storage(
    model: PreTrainedModel,
    config: Config,
    model_config: PreTrainedConfig,
    states: StateBytes,
    shapes: Shapes,
    machine: Machine,
    world: World,
) -> Storage:
    """Compute disk and host memory for a stage's model that `build_on_meta` has returned."""
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    itemsize = BYTES[world.layout.master_dtype]
    checkpoint = sum(p.numel() for p in trained) * itemsize
    checkpoint += states.saved_optimizer * world.layout.stage_ranks
    # Replicas hold the same slice, and one of them copies and writes it.
    held = sum(to_local(p).numel() for p in trained) * itemsize // world.layout.replicate
    staged = (held + states.saved_optimizer) * machine.ranks_per_node
    is_async = config.checkpoint.mode == "async"
    inputs = host_inputs_bytes(shapes, world.stage, world.layout) if machine.is_gpu else 0
    # Loading holds a slice in the file's dtype and in the master's; a random weight is drawn whole.
    source = getattr(model_config, "dtype", None) or parameters[0].dtype
    if config.model.init == "random":
        loading = max(p.numel() * p.itemsize for p in parameters)
    else:
        folder = model_folder(config.model.path)
        piece = piece_bytes(folder) if folder else 0
        # A quantised slice is dequantised into the master's dtype at once.
        loading = piece + max(
            to_local(p).numel() * ((p if piece else source).itemsize + p.itemsize)
            for p in parameters
        )
    return Storage(
        checkpoint_bytes=checkpoint,
        staging_bytes=staged if is_async else 0,
        loading_bytes=loading * machine.ranks_per_node,
        inputs_bytes=inputs * machine.ranks_per_node,
        # While it loads, a rank holds the masters of all replicas beside the part that it pins.
        states_bytes=max(states.host, (1 + world.layout.replicate) * states.host_masters)
        * machine.ranks_per_node,
    )


def join_storage(stages: Sequence[Storage]) -> Storage:
    """Add up the disk bytes of stages, and take the largest of their host bytes.

    Each stage counts host bytes as if it had all ranks of a node, so their sum would be too much.
    """
    most = Storage(*map(max, zip(*map(astuple, stages), strict=True)))
    return replace(most, checkpoint_bytes=sum(stage.checkpoint_bytes for stage in stages))


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
