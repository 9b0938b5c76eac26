"""A plan: the memory that a run takes of a rank by cause and phase, its traffic and its time."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch.distributed as dist
from transformers import PreTrainedConfig, PreTrainedModel

from shardtune.config import Config
from shardtune.distributed.layout import Layout
from shardtune.distributed.tensors import to_local
from shardtune.distributed.world import World
from shardtune.errors import UserError, first_line
from shardtune.model.build import build_on_meta, require_trainable, whole_on_meta
from shardtune.model.experts import is_spread
from shardtune.model.flops import NotCounted, count_flops
from shardtune.model.fsdp_groups import gathered_groups
from shardtune.model.stages import layers_of_stages
from shardtune.planner.extrapolate import Simulations, layer_kinds
from shardtune.planner.host_link import HostLink, host_link, pieces_bytes
from shardtune.planner.machine import Machine, link_bytes
from shardtune.planner.peaks import bounded_memory, step_memory
from shardtune.planner.roofline import gpu_of, seconds
from shardtune.planner.shapes import Keeps, Shapes, least_traffic
from shardtune.planner.simulate import Measured, fake_world
from shardtune.planner.storage import Storage, join_storage, plan_storage
from shardtune.planner.tracker import Collective, Peak
from shardtune.training.optim import build_optimizer
from shardtune.training.replica_shards import OwnedParameters
from shardtune.training.reshard import (
    KeptBytes,
    ReshardPolicy,
    decide,
    fixed_policy,
    groups_in,
    kept_bytes,
    room_beside,
)
from shardtune.training.sharded_optimizer import ShardedOptimizer
from shardtune.training.stage import idle_share
from shardtune.training.states import StateBytes, state_bytes

TILE_TOKENS = 8192  # of a rank, in a tile: fewer save little and cost as much


@dataclass(frozen=True)
class Plan:
    """A run on a machine. Memory is that of rank 0, the fullest; a step has full rows."""

    config: Config
    layout: Layout
    machine: Machine
    parameters: int  # of the whole model
    trained_parameters: int
    states: StateBytes
    kept_groups: tuple[int, ...]  # of each stage, see `gathered_groups`
    policy: ReshardPolicy
    tiles: int  # in which experts and MLPs run, see `tile_layers`
    needed_bytes: int  # without groups that stay gathered although others have no room
    peaks: dict[str, Peak]  # by phase, the states included and the allowance not
    # Peak bytes of each stream, which a GPU's allocator keeps for it; none of a CPU.
    pools: list[int]
    attention: str  # how the model attends; empty if `reason` is not
    reason: str  # why memory is only bounded, by shapes alone; empty if a step was simulated
    traffic: tuple[Counter[Collective], ...]  # of a step, for the first rank of each stage
    step_tokens: int
    step_flops: float | None  # recomputation not counted; None where it is not known
    shapes: Shapes
    storage: Storage
    host_link: HostLink

    # Seconds of a step's kernels one after another, its bubble left out; None where none are known.
    kernels_s: float | None

    @property
    def allocated_bytes(self) -> int:
        """The most bytes of tensors at once."""
        return max(peak.n_bytes for peak in self.peaks.values())

    @property
    def peak_bytes(self) -> int:
        """The most memory that the device must have: the streams' pools, and the allowance."""
        return _peak_bytes(self.peaks, self.pools, self.machine)

    @property
    def fits(self) -> bool:
        return self.device_fits and self.host_fits

    @property
    def device_fits(self) -> bool:
        return self.peak_bytes <= self.machine.memory_bytes

    @property
    def host_fits(self) -> bool:
        """Whether a node has the memory, beside its GPUs', that the run holds."""
        return self.storage.pinned_bytes <= self.machine.host_bytes

    @property
    def host_holds_copies(self) -> bool:
        """Whether that memory also holds the copies of an asynchronous save."""
        storage = self.storage
        return storage.pinned_bytes + storage.staging_bytes <= self.machine.host_bytes

    @property
    def cannot_fit(self) -> bool:
        """Whether it certainly does not fit: a bound may be far above the peak.

        Beside a bound the device's allowance does not count: nobody has measured it, and a small
        model would be refused on a small GPU.
        """
        least = self.states.total if self.reason else self.peak_bytes
        return least > self.machine.memory_bytes or not self.host_fits

    @property
    def received(self) -> tuple[dict[str, float], dict[str, float]]:
        """The bytes that a node gets from the others in a step, and a rank in its node.

        They are by kind of collective, of the node and of the stage that get the most.
        """
        return received(self.traffic, self.machine)

    @property
    def bubble(self) -> float:
        """The share of a step in which a stage has no work."""
        return idle_share(self.layout.stages, self.layout.micro_batches)

    @property
    def floors_s(self) -> dict[str, float]:
        """The seconds that a step takes at least: of arithmetic, and of each kind of link."""
        return floors_s(self.traffic, self.host_link, self.step_flops, self.layout, self.machine)

    @property
    def eager_s(self) -> float | None:
        """About the seconds of a step on one kind of GPU, whose kernels move what they move."""
        return None if self.kernels_s is None else self.kernels_s / (1 - self.bubble)

    @property
    def floor_s(self) -> float:
        """The seconds that a step takes at least."""
        return max(self.floors_s.values())

    @property
    def seconds_per_token(self) -> float:
        return self.floor_s / self.step_tokens

    @property
    def bound_by(self) -> str | None:
        """The part of a step that takes the longest, or None where no rate is known."""
        floors = self.floors_s
        longest = max(floors, key=lambda part: floors[part])
        return longest if floors[longest] else None


def received(
    traffic: Sequence[Mapping[Collective, int]], machine: Machine
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the bytes that a node gets from the others in a step, and a rank in its node.

    `traffic`: for the first rank of each stage. The bytes are by kind of collective, of the node
    and of the stage that get the most.
    """
    stage_ranks = machine.ranks // len(traffic)
    ranks = min(stage_ranks, machine.ranks_per_node)
    nodes: defaultdict[int, Counter[str]] = defaultdict(Counter)
    insides = []
    for stage, of_stage in enumerate(traffic):
        between, inside = link_bytes(of_stage, machine, ranks)
        nodes[stage * stage_ranks // machine.ranks_per_node].update(between)
        insides.append(inside)
    fullest = max(nodes.values(), key=lambda node: sum(node.values()))
    return dict(fullest), max(insides, key=lambda inside: sum(inside.values()))


def floors_s(
    traffic: Sequence[Mapping[Collective, int]],
    host_link: HostLink,
    step_flops: float | None,
    layout: Layout,
    machine: Machine,
) -> dict[str, float]:
    """Return the seconds that each part of a step takes at least, its bubble included."""
    between, inside = received(traffic, machine)
    floors = {
        "between nodes": sum(between.values()) / machine.node_bytes_per_s,
        "inside a node": sum(inside.values()) / machine.rank_bytes_per_s,
    }
    if layout.offloads:
        floors["with host memory"] = host_link.seconds(machine)
    if step_flops is not None:
        # Full checkpointing runs each layer's forward, a third of the rest, once more.
        again = 4 / 3 if layout.keeps_inputs_alone else 1
        seconds = again * step_flops / (machine.ranks * machine.flops_per_s)
        floors["arithmetic"] = seconds / (1 - idle_share(layout.stages, layout.micro_batches))
    return floors


def make_plan(
    config: Config,
    model_config: PreTrainedConfig,
    machine: Machine,
    simulations: Simulations | None = None,
    reason: str = "",
) -> Plan:
    """Plan a run without a device, weights, tokenizer or data, as the first rank of each stage.

    Where it does not fit, experts and MLPs run in tiles, if it fits so.

    Raises:
        UserError: the run would be refused for its model, its mesh or its keys.
    """
    simulations = simulations or Simulations(model_config)
    stages = _plan_stages(config, model_config, machine, simulations, reason, tiles=1)
    plan = _join(stages)
    tiles = plan.layout.tokens_per_rank // TILE_TOKENS
    if plan.fits or plan.reason or tiles < 2:
        return plan
    tiled = _join(_plan_stages(config, model_config, machine, simulations, reason, tiles))
    return tiled if tiled.fits else plan


def _plan_stages(
    config: Config,
    model_config: PreTrainedConfig,
    machine: Machine,
    simulations: Simulations,
    reason: str,
    tiles: int,
) -> list[Plan]:
    """Return the plan of each stage; in tiles, up to the first that does not fit."""
    parts: list[Plan] = []
    alike: dict[tuple[Hashable, ...], int] = {}  # the first of the stages in the middle
    layout = machine.layout(config)
    for stage in range(layout.stages):
        with fake_world(layout, machine.ranks_per_node, stage) as world:
            if stage == 0:
                require_trainable(config, model_config, world)
                whole = whole_on_meta(config, model_config, world)
                kinds = layer_kinds(whole)
            own = layers_of_stages(whole, layout.stages)[stage]
            if 0 < stage < layout.stages - 1:
                first = alike.setdefault(tuple(kinds[own.start : own.stop]), stage)
                if first < stage:  # which has fewer micro-batches in flight
                    parts.append(_moved(parts[first], by=(stage - first) * layout.stage_ranks))
                    continue
            given = config, model_config, machine, simulations, reason, tiles
            parts.append(_plan_stage(world, *given))
            if tiles > 1 and not parts[-1].fits:
                break
    return parts


def _moved(plan: Plan, by: int) -> Plan:
    """Return the plan of a stage for another one that is alike, so many ranks behind it."""
    (own,) = plan.traffic
    moved = {Collective(kind, tuple(r + by for r in ranks)): n for (kind, ranks), n in own.items()}
    return replace(plan, traffic=(Counter(moved),))


def bound_in(
    world: World, config: Config, model_config: PreTrainedConfig, machine: Machine, reason: str
) -> Plan:
    """Plan a run in its own world, from shapes alone for this `reason`, without the other ranks.

    A simulated step has collectives, so that a real world gets none.
    """
    firsts = range(0, world.size, world.layout.stage_ranks)
    given = config, model_config, machine, Simulations(model_config), reason, 1
    return _join([_plan_stage(replace(world, rank=first), *given) for first in firsts])


def _join(stages: Sequence[Plan]) -> Plan:
    """Return the plan of a run from those of its stages.

    Peaks are those of the stage with the highest, and states those of the one with the largest.
    """
    fullest = max(stages, key=lambda stage: stage.peak_bytes)
    states = max((stage.states for stage in stages), key=lambda each: each.total)
    times = [stage.kernels_s for stage in stages if stage.kernels_s is not None]
    return replace(
        fullest,
        states=states,
        kept_groups=tuple(stage.policy.kept_groups for stage in stages),
        needed_bytes=max(stage.needed_bytes for stage in stages),
        traffic=tuple(stage.traffic[0] for stage in stages),
        storage=join_storage([stage.storage for stage in stages]),
        host_link=max((stage.host_link for stage in stages), key=lambda each: each.update),
        kernels_s=max(times, default=None),
    )


def _plan_stage(
    world: World,
    config: Config,
    model_config: PreTrainedConfig,
    machine: Machine,
    simulations: Simulations,
    reason: str,
    tiles: int,
) -> Plan:
    """Plan this rank's stage in a world, without other ranks.

    Plans of one model may share `simulations`. With a `reason` none is made, and memory is bounded
    by the shapes alone, as it is where a step of the model cannot be simulated.
    """
    layout = world.layout
    own = build_on_meta(config, model_config, world)
    whole = whole_on_meta(config, model_config, world)
    owned = OwnedParameters(own, world)
    optimizer = build_optimizer(owned, config)
    states, kept = state_bytes(own, optimizer, layout), kept_bytes(own, layout)
    policy = _policy(kept, states, machine, layout)
    shapes = Shapes(whole)
    updated = [to_local(p).numel() for p in owned.by_name.values()]
    pieces = pieces_bytes(max(updated), layout)
    given = whole, config, policy, world, tiles
    measured, reason = (None, reason) if reason else _measure(simulations, *given)
    if measured:
        traffic = measured.step_traffic(layout.micro_batches)
        peaks, pools = step_memory(measured, states, optimizer, pieces, machine.is_gpu)
    else:
        keeps = Keeps(policy, math.inf if policy.kept_groups else 0)
        traffic = least_traffic(shapes, world.stage, keeps, layout)
        peaks, pools = {"any phase": bounded_memory(own, config, states, world)}, []
    link = host_link(sum(updated), policy, layout)
    rows, length = layout.rows_per_step, layout.max_length
    plan = Plan(
        config=config,
        layout=layout,
        machine=machine,
        parameters=sum(p.numel() for p in whole.parameters()),
        trained_parameters=sum(p.numel() for p in whole.parameters() if p.requires_grad),
        states=states,
        kept_groups=(policy.kept_groups,),
        policy=policy,
        tiles=tiles,
        needed_bytes=_peak_bytes(peaks, pools, machine),
        peaks=peaks,
        pools=pools,
        attention=measured.attention.text if measured else "",
        reason=reason,
        traffic=(traffic,),
        step_tokens=rows * length,
        step_flops=_count_step_flops(whole, rows, length),
        shapes=shapes,
        storage=plan_storage(own, config, model_config, states, shapes, machine, world),
        host_link=link,
        kernels_s=_kernel_seconds(measured, states, link, layout, machine) if measured else None,
    )
    if measured and not policy.kept_groups:
        return _keep_groups(plan, measured, own, kept, optimizer, pieces, world)
    return plan


def _measure(
    simulations: Simulations,
    whole: PreTrainedModel,
    config: Config,
    policy: ReshardPolicy,
    world: World,
    tiles: int,
) -> tuple[Measured | None, str]:
    """Return what a simulated step shows, or None and the reason why there is none."""
    try:
        return simulations.measure(whole, config, policy, world, tiles), ""
    except UserError:
        raise
    except Exception as error:  # any architecture may ask for something else
        kind = whole.config.model_type
        return None, f"no step of {kind} can be simulated: {first_line(error)}"


def _keep_groups(
    plan: Plan,
    measured: Measured,
    model: PreTrainedModel,
    kept: KeptBytes,
    optimizer: ShardedOptimizer,
    pieces: int,
    world: World,
) -> Plan:
    """Return the plan in which as many groups stay gathered as its peak leaves room for."""
    layout, machine, states = plan.layout, plan.machine, plan.states
    groups = _gathering_ranks(model, world)
    # A group that one rank has whole is copied, which takes less time than its memory is worth.
    shared = sum(len(ranks) > 1 for ranks in groups)
    fitting = groups_in(kept, room_beside(plan.peak_bytes, machine.memory_bytes))
    policy = _policy(kept, states, machine, layout, min(fitting, shared))
    sizes = kept.parameters[: policy.kept_groups]
    # What stands around the layers is gathered at each peak.
    kept_measured = measured.keeping(sum(sizes[1:]))
    peaks, pools = step_memory(kept_measured, states, optimizer, pieces, machine.is_gpu)
    traffic, micro_batches = plan.traffic[0].copy(), layout.micro_batches
    for number, (ranks, size) in enumerate(zip(groups, sizes, strict=False)):
        # What stands around the layers stays from the forward to the backward in any case.
        gathers = 2 * micro_batches if number else micro_batches
        traffic[Collective("all-gather", ranks)] -= (gathers - 1) * size
    return replace(
        plan,
        kept_groups=(policy.kept_groups,),
        policy=policy,
        peaks=peaks,
        pools=pools,
        traffic=(traffic,),
    )


def _kernel_seconds(
    measured: Measured, states: StateBytes, link: HostLink, layout: Layout, machine: Machine
) -> float | None:
    """Return the seconds of a step's kernels, the update's with them; None on CPUs.

    An update of states in host memory takes as long as their copies.
    """
    if not machine.is_gpu:
        return None
    gpu = gpu_of(machine.memory_bytes)
    # Adapters, their gradients and moments are float32.
    weights = states.gradients if layout.is_lora else states.parameters
    kernels = measured.step_kernels(layout.micro_batches)
    if layout.offloads:
        return seconds(kernels, gpu) + link.update.seconds(machine)
    # The update is one kernel a piece, and the norm reads the gradients before it.
    update = 2 * (weights + states.optimizer + states.gradients) / gpu.bytes_per_s
    return seconds(kernels, gpu) + update


def _policy(
    kept: KeptBytes,
    states: StateBytes,
    machine: Machine,
    layout: Layout,
    planned_groups: int = 0,
) -> ReshardPolicy:
    """Decide as `choose_reshard_policy` does."""
    free = machine.memory_bytes - machine.allowance_bytes - states.total
    fixed = fixed_policy(layout)
    policy, *_ = decide(kept, free, layout.micro_batches, fixed, planned_groups)
    return policy


def _gathering_ranks(model: PreTrainedModel, world: World) -> list[tuple[int, ...]]:
    """Return the ranks that gather each of `gathered_groups` together."""
    ranks = []
    for parameters in gathered_groups(model).values():
        mesh = world.mesh["shard"]
        if world.expert_mesh and any(map(is_spread, parameters)):
            mesh = world.expert_mesh["expert_shard"]
        ranks.append(tuple(dist.get_process_group_ranks(mesh.get_group())))
    return ranks


def _peak_bytes(peaks: Mapping[str, Peak], pools: Sequence[int], machine: Machine) -> int:
    allocated = max(peak.n_bytes for peak in peaks.values())
    return max(sum(pools), allocated) + machine.allowance_bytes


def _count_step_flops(model: PreTrainedModel, rows: int, length: int) -> float | None:
    """Return the FLOPs of a step of full rows, recomputation left out; None if not known."""
    try:
        return count_flops(model).per_step(np.full(rows, length), rows * (length - 1))
    except NotCounted:
        return None
