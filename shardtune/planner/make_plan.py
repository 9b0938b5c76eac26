"""Plan a run: simulate a step of each stage, or bound its memory by shapes alone."""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch.distributed as dist
from transformers import PreTrainedConfig, PreTrainedModel

from shardtune.config import Config
from shardtune.distributed.layout import Layout
from shardtune.distributed.tensors import DTYPES, gathered_numel, is_cut, is_spread, to_local
from shardtune.distributed.world import World
from shardtune.errors import UserError, first_line
from shardtune.model.build import build_on_meta, require_trainable
from shardtune.model.facts.facts import ModelFacts
from shardtune.model.fsdp_groups import gathered_groups
from shardtune.model.stages import divided
from shardtune.planner.arithmetic.figures import Cause, Collective, Peak
from shardtune.planner.arithmetic.machine import Machine, gpu_of, seconds, with_gathers
from shardtune.planner.arithmetic.shapes import Keeps, Shapes, least_traffic, rows_bytes
from shardtune.planner.arithmetic.storage import host_link, join_storage, pieces_bytes, plan_storage
from shardtune.planner.plan import Plan
from shardtune.planner.simulation.extrapolate import Simulations
from shardtune.planner.simulation.simulate import Measured, Step, fake_world
from shardtune.training.optim import build_optimizer
from shardtune.training.states.replica_shards import OwnedParameters
from shardtune.training.states.reshard import (
    KeptBytes,
    ReshardPolicy,
    decide,
    fixed_policy,
    groups_in,
    kept_bytes,
    room_beside,
)
from shardtune.training.states.sharded_optimizer import ShardedOptimizer, StateBytes, state_bytes

TILE_TOKENS = 8192  # per rank: smaller tiles save little memory and cost as much time


def make_plan(
    config: Config,
    model_config: PreTrainedConfig,
    machine: Machine,
    simulations: Simulations | None = None,
) -> Plan:
    """Plan a run as the first rank of each stage, without a device, weights, tokenizer or data.

    If a run does not fit whole but fits in tiles, plan it in tiles. Plans of one model may share
    `simulations`.

    Raises:
        UserError: the run would be refused for its model, its mesh or its keys.
    """
    planner = _Planner(config, machine, simulations or Simulations(model_config))
    plan = _join(planner.stages())
    tiles = plan.layout.tokens_per_rank // TILE_TOKENS
    if plan.fits or not plan.is_simulated or tiles < 2:
        return plan
    tiled = _join(planner.stages(tiles))
    return tiled if tiled.fits else plan


def bound_plan(
    config: Config,
    model_config: PreTrainedConfig,
    machine: Machine,
    world: World | None = None,
    simulations: Simulations | None = None,
) -> Plan:
    """Plan a run from shapes alone, in milliseconds.

    `world`: that of a real run. No collective runs in it, since other ranks do not call this.
    `simulations`: what has read the model already.

    Raises:
        UserError: the run would be refused for its model, its mesh or its keys.
    """
    known = simulations or Simulations(model_config)
    planner = _Planner(config, machine, known, is_bound=True)
    if not world:
        return _join(planner.stages())
    firsts = range(0, world.size, world.layout.stage_ranks)
    return _join([planner.stage(replace(world, rank=first)) for first in firsts])


class _Planner:
    """Plans the stages of a run by simulated steps, or if `is_bound`, by shapes alone."""

    def __init__(
        self, config: Config, machine: Machine, simulations: Simulations, is_bound: bool = False
    ) -> None:
        self._config, self._machine, self._simulations = config, machine, simulations
        self._model_config, self._is_bound = simulations.model_config, is_bound

    def stages(self, tiles: int = 1) -> list[Plan]:
        """Return the plan of each stage; in tiles, stop at the first stage that does not fit."""
        config, machine = self._config, self._machine
        parts: list[Plan] = []
        first_alike: dict[tuple[Hashable, ...], int] = {}  # middle stage, by kinds of its layers
        layout = machine.layout(config)
        for stage in range(layout.stages):
            with fake_world(layout, machine.ranks_per_node, stage) as world:
                facts = self._simulations.facts(config, layout)
                if stage == 0:
                    require_trainable(config, self._model_config, facts, world)
                layers = divided(facts.costs, layout.stages)[stage]
                if 0 < stage < layout.stages - 1:
                    kinds = facts.layers[layers.start : layers.stop]
                    first = first_alike.setdefault(kinds, stage)
                    # A later stage has fewer micro-batches in flight, so it needs no more memory.
                    if first < stage:
                        parts.append(_moved(parts[first], by=(stage - first) * layout.stage_ranks))
                        continue
                parts.append(self.stage(world, tiles))
                if tiles > 1 and not parts[-1].fits:
                    break
        return parts

    def stage(self, world: World, tiles: int = 1, keeps_groups: bool = True) -> Plan:
        """Plan the stage of `world`'s rank; with `keeps_groups` groups may stay gathered."""
        config, machine, layout = self._config, self._machine, world.layout
        facts = self._simulations.facts(config, layout)
        model = build_on_meta(config, self._model_config, facts, world)
        owned = OwnedParameters(model, world)
        optimizer = build_optimizer(owned, config)
        states, kept = state_bytes(model, optimizer, layout), kept_bytes(model, layout)
        policy = self._policy(kept, states, layout)
        if not keeps_groups:
            policy = replace(policy, kept_groups=0)
        shapes = Shapes(facts)
        updated = [to_local(p).numel() for p in owned.by_name.values()]
        link = host_link(sum(updated), policy, layout)
        storage = plan_storage(model, config, self._model_config, states, shapes, machine, world)
        step = Step(config, policy, world, tiles=tiles)
        measured, reason = self._measure(step, facts)
        if measured:
            pieces = pieces_bytes(max(updated), layout)
            memory = partial(step_memory, measured, states, optimizer, pieces, machine)
            traffic = measured.step_traffic(layout.micro_batches)
            peaks, pools = memory()
            needed_bytes = pools + machine.allowance_bytes(layout, pools)
            if policy.kept_groups and needed_bytes > machine.memory_bytes:
                return self.stage(world, tiles, keeps_groups=False)
            if not policy.kept_groups:
                policy, gathered = self._keep(model, kept, states, world, needed_bytes, traffic)
                peaks, pools = memory(gathered)
        else:
            keeps = Keeps(policy, math.inf if policy.kept_groups else 0)
            traffic = least_traffic(shapes, world.stage, keeps, layout)
            peak = bounded_memory(model, shapes, config, states, world)
            peaks, pools = {"any phase": peak}, peak.n_bytes
            needed_bytes = pools + machine.allowance_bytes(layout, pools)
        step_flops, forward_flops = _count_flops(facts, layout.rows_per_step, layout.max_length)
        plan = Plan(
            config=config,
            layout=layout,
            machine=machine,
            peak_bytes=pools + machine.allowance_bytes(layout, pools),
            pools_bytes=pools,
            pinned_bytes=storage.pinned_bytes,
            traffic=(traffic,),
            host_link=link,
            step_flops=step_flops,
            forward_flops=forward_flops,
            rows_bytes=sum(rows_bytes(shapes, world.stage, layout)),
            parameters=facts.numel(),
            trained_parameters=facts.numel(trained=True),
            states=states,
            policies=(policy,),
            tiles=tiles,
            needed_bytes=needed_bytes,
            peaks=peaks,
            attention=measured.attention.text if measured else "",
            reason=reason,
            shapes=shapes,
            storage=storage,
            kernels_s=None,
        )
        return replace(plan, kernels_s=_kernel_seconds(measured, plan))

    def _measure(self, step: Step, facts: ModelFacts) -> tuple[Measured | None, str]:
        """Return the measures of a simulated step, or None and why no step could be simulated."""
        if self._is_bound:
            return None, "no step was simulated"
        try:
            return self._simulations.measure(step, facts), ""
        except UserError:
            raise
        except Exception as error:  # each architecture fails in its own way on fake tensors
            return None, f"no step of {facts.kind} can be simulated: {first_line(error)}"

    def _policy(
        self, kept: KeptBytes, states: StateBytes, layout: Layout, most_groups: int | None = None
    ) -> ReshardPolicy:
        free = self._machine.memory_bytes - self._machine.allowance_bytes(layout) - states.total
        fixed = fixed_policy(layout)
        return decide(kept, free, layout.micro_batches, fixed, most_groups)[0]

    def _keep(
        self,
        model: PreTrainedModel,
        kept: KeptBytes,
        states: StateBytes,
        world: World,
        peak_bytes: int,
        traffic: Counter[Collective],
    ) -> tuple[ReshardPolicy, int]:
        """Keep groups gathered in the room beside the peak, and take their gathers from `traffic`.

        Return the policy, and the bytes that these groups add to the peak.
        """
        groups = _gathered_by_ranks(model, world)
        # A group that one rank holds whole is only copied, which costs less than its memory.
        shared = sum(any(len(ranks) > 1 for ranks in gathered) for gathered in groups)
        fitting = groups_in(kept, room_beside(peak_bytes, self._machine.memory_bytes))
        policy = self._policy(kept, states, world.layout, min(fitting, shared))
        sizes = kept.parameters[: policy.kept_groups]
        micro_batches = world.layout.micro_batches
        for number, gathered in enumerate(groups[: policy.kept_groups]):
            # FSDP2 keeps the root (embedding, norm, head) from the forward to the backward anyway.
            gathers = 2 * micro_batches if number else micro_batches
            for ranks, n_bytes in gathered.items():
                traffic[Collective("all-gather", ranks)] -= (gathers - 1) * n_bytes
        return policy, sum(sizes[1:])  # without the root, which each peak counts


def _moved(plan: Plan, by: int) -> Plan:
    """Copy the plan of a stage for a later stage that is alike; shift its ranks by `by`."""
    (traffic,) = plan.traffic
    moved = Counter({Collective(k, tuple(r + by for r in rs)): n for (k, rs), n in traffic.items()})
    return replace(plan, traffic=(moved,))


def _join(stages: Sequence[Plan]) -> Plan:
    """Join the plans of stages to the plan of a run, whose memory is the fullest stage's."""
    storage = join_storage([stage.storage for stage in stages])
    times = [stage.kernels_s for stage in stages if stage.kernels_s is not None]
    return replace(
        max(stages, key=lambda stage: stage.peak_bytes),
        pinned_bytes=storage.pinned_bytes,
        traffic=tuple(stage.traffic[0] for stage in stages),
        host_link=max((stage.host_link for stage in stages), key=lambda link: link.update),
        states=max((stage.states for stage in stages), key=lambda states: states.total),
        policies=tuple(stage.policies[0] for stage in stages),
        needed_bytes=max(stage.needed_bytes for stage in stages),
        rows_bytes=max(stage.rows_bytes for stage in stages),
        storage=storage,
        kernels_s=max(times, default=None),
    )


def _kernel_seconds(measured: Measured | None, plan: Plan) -> float | None:
    """Return the seconds of a step's kernels and update; None on CPUs and unknown cards."""
    layout, machine, states = plan.layout, plan.machine, plan.states
    if not measured or not machine.is_gpu or not machine.card:
        return None
    gpu = gpu_of(machine.card)
    update_s = plan.host_link.update.seconds(machine)  # an offloaded update lasts as its copies
    if not layout.offloads:
        # Adapters, their gradients and moments are float32.
        weights = states.gradients if layout.is_lora else states.parameters
        # The update is one kernel a piece, and the norm reads the gradients before it.
        update_s = 2 * (weights + states.optimizer + states.gradients) / gpu.bytes_per_s
    kernels_s = seconds(measured.step_kernels(layout.micro_batches), gpu) + update_s
    inside = Counter(plan.received[1])
    gathered_bytes = inside["all-gather"] + inside["reduce-scatter"]
    is_hidden = not plan.has_experts or layout.expert > 1
    # Blocks wait for the rows that ranks of `tensor` gather, and for their sums.
    rows_bytes = plan.rows_bytes * (1 - 1 / layout.tensor)
    rows_s = rows_bytes / gpu.gather_bytes_per_s
    return with_gathers(kernels_s + rows_s, gathered_bytes - rows_bytes, gpu, is_hidden)


def _gathered_by_ranks(model: PreTrainedModel, world: World) -> list[Counter[tuple[int, ...]]]:
    """Return, for each of `gathered_groups`, the bytes that ranks gather together."""
    itemsize, groups = DTYPES[world.layout.compute_dtype].itemsize, []
    for parameters in gathered_groups(model).values():
        gathered: Counter[tuple[int, ...]] = Counter()
        for parameter in parameters:
            mesh = world.mesh["shard"]
            if world.expert_mesh and is_spread(parameter):
                mesh = world.expert_mesh["expert_shard"]
            elif world.meshes.tensor_mesh and is_cut(parameter):
                mesh = world.meshes.tensor_mesh["tensor_shard"]
            ranks = tuple(dist.get_process_group_ranks(mesh.get_group()))
            gathered[ranks] += gathered_numel(parameter) * itemsize
        groups.append(gathered)
    return groups


def _count_flops(facts: ModelFacts, rows: int, length: int) -> list[float | None]:
    """Return the FLOPs of a step of full rows, and of all layers' forward; None if not known."""
    if not facts.flops:
        return [None, None]
    lengths, trained = np.full(rows, length), rows * (length - 1)
    return [facts.flops.per_step(lengths, trained), facts.flops.forward(lengths, 0)]


_PASSES = ("evaluate", "forward", "backward")
_COPIES_OF_GATHERED = 2  # FSDP's buffer, and the parameters that are copied out of it
_COPIES_OF_ACTIVATIONS = 4  # input and output of a product, with norms, and gradients of both
_WIDEST_BYTES = 4  # float32


def step_memory(
    measured: Measured,
    states: StateBytes,
    optimizer: ShardedOptimizer,
    pieces: int,
    machine: Machine,
    gathered: int = 0,
) -> tuple[dict[str, Peak], int]:
    """Return the peak of each phase, and the memory that the allocator takes.

    `pieces`: bytes of an offloaded update's pieces. `gathered`: bytes of parameters that stay
    gathered in all passes.
    """
    workspace = max(map(optimizer.eager_bytes, optimizer.trained))
    peaks = _peaks(measured, states, workspace + pieces, gathered)
    # A GPU's allocator keeps freed memory for its stream, so the streams' peaks add up.
    pools: Counter[int] = Counter()
    for (phase, _, stream), size in measured.pools.items():
        more = gathered * (phase in _PASSES and stream == 0)
        pools[stream] = max(pools[stream], size + more)
    # The default stream holds the optimizer's state, too.
    kept = pools.total() + states.optimizer + pieces if machine.is_gpu else 0
    highest = max(kept, *(peak.n_bytes for peak in peaks.values()))
    return peaks, highest


def _peaks(
    measured: Measured, states: StateBytes, update_bytes: int, gathered: int
) -> dict[str, Peak]:
    """Return the peak of each phase, with the optimizer's state, which the simulation lacks."""
    optimizer = Counter({Cause.OPTIMIZER: states.optimizer})
    weights = Counter({Cause.PARAMETERS: states.parameters})
    gradients = 0 if states.host else states.gradients
    updated = weights + optimizer + Counter({Cause.GRADIENTS: gradients})
    updated[Cause.UPDATE] = update_bytes
    by_cause = {"load": weights}
    for phase in (*_PASSES, "optimizer"):
        peaks = (peak for (name, _), peak in measured.peaks.items() if name == phase)
        by_cause[phase] = max(peaks, key=lambda peak: peak.n_bytes).by_cause + optimizer
    for phase in _PASSES:
        by_cause[phase][Cause.GATHERED] += gathered
    # The update frees its workspace before new weights are gathered: the larger one counts.
    by_cause["optimizer"] = max(updated, by_cause["optimizer"], key=Counter.total)
    by_cause["save"] = weights + optimizer  # gradients are dropped before
    return {phase: Peak(causes.total(), causes) for phase, causes in by_cause.items()}


def bounded_memory(
    model: PreTrainedModel, shapes: Shapes, config: Config, states: StateBytes, world: World
) -> Peak:
    """Return an upper bound of the peak of any phase, by shapes alone.

    `model` comes from `build_on_meta`. All parameters and gradients count as unsharded at once,
    each product as kept for the backward, and attention as masked: a bound that is too low would
    start a run that cannot end.
    """
    head: Any = model.get_output_embeddings()
    logits = head.weight.shape[0] if getattr(head, "weight", None) is not None else 0
    # With recomputation layers keep their inputs alone, and the backward has one layer whole.
    scores = max(heads.queries for heads in shapes.heads) * world.layout.max_length
    layers = shapes.by_stage(world.layout.stages)[world.stage].per_layer
    kept = [layer.products + scores for layer in layers]
    if world.layout.keeps_inputs_alone:
        kept = [max(kept, default=0), len(kept) * shapes.hidden_size]
    activations = world.layout.tokens_per_rank * (sum(kept) + logits) * _WIDEST_BYTES
    largest = max(gathered_numel(p) for p in model.parameters()) * _WIDEST_BYTES
    # The copies of an asynchronous save are in a CPU process's own memory.
    staging = 0
    if world.device.type == "cpu" and config.checkpoint.mode == "async":
        staging = states.parameters + states.optimizer
    parameters, *others = kept_bytes(model, world.layout)
    gathered = _COPIES_OF_GATHERED * (sum(parameters) + sum(others))
    # A parameter is loaded and updated in float32.
    beside = gathered + _COPIES_OF_ACTIVATIONS * activations + 2 * largest + staging
    by_cause = Counter(
        {
            Cause.PARAMETERS: states.parameters,
            Cause.GRADIENTS: states.gradients,
            Cause.OPTIMIZER: states.optimizer,
            Cause.BOUNDED: beside,
        }
    )
    return Peak(by_cause.total(), by_cause)
