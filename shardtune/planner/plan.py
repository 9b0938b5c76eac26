"""What a run takes of each rank: memory by cause and phase, traffic by link, and time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedConfig, PreTrainedModel

from shardtune.config import Config
from shardtune.model.build import build_on_meta, require_trainable
from shardtune.model.flops import NotCounted, count_flops
from shardtune.planner.simulate import (
    Measured,
    cuts,
    fake_world,
    layer_kinds,
    simulate,
    with_layers,
)
from shardtune.planner.tracker import Cause, Collective, Peak
from shardtune.training.memory import StateBytes, state_bytes
from shardtune.training.optim import build_optimizer
from shardtune.training.reshard import ReshardPolicy, decide, unsharded_bytes

# CUDA's context, NCCL's buffers, and memory that the allocator cannot use: no GPU has measured it.
ALLOWANCE_BYTES = 4 * 10**9
# Of a CPU process: gloo's buffers, and libraries that load at their first use.
_CPU_ALLOWANCE_BYTES = 10**8


@dataclass(frozen=True)
class Machine:
    """The nodes that a plan is for. 1 GB is 1e9 bytes, and rates are those of one direction."""

    nodes: int
    ranks_per_node: int
    memory_bytes: float  # of one rank
    node_bytes_per_s: float  # between one node and all others
    rank_bytes_per_s: float  # between one rank and the others of its node
    flops_per_s: float  # of one rank, in the compute dtype
    is_gpu: bool = True  # else ranks are processes that share their node's memory

    @property
    def allowance_bytes(self) -> int:
        """What the device or the process takes for itself, beside tensors."""
        return ALLOWANCE_BYTES if self.is_gpu else _CPU_ALLOWANCE_BYTES

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class Plan:
    """A run on a machine. Memory is that of rank 0, the fullest; a step has full rows."""

    config: Config
    machine: Machine
    parameters: int  # of the whole model
    trained_parameters: int
    states: StateBytes
    policy: ReshardPolicy
    peaks: dict[str, Peak]  # by phase, the states included and the allowance not
    traffic: Counter[Collective]  # of a step
    step_tokens: int
    step_flops: float | None  # recomputation not counted; None where it is not known
    checkpoint_bytes: int  # of all ranks

    @property
    def peak_bytes(self) -> int:
        """The most memory at once, the allowance included."""
        return max(peak.n_bytes for peak in self.peaks.values()) + self.machine.allowance_bytes

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.machine.memory_bytes

    @property
    def floors_s(self) -> dict[str, float]:
        """The seconds that a step takes at least: of arithmetic, between nodes, inside a node."""
        between, inside = link_bytes(self.traffic, self.machine)
        floors = {
            "between nodes": sum(between.values()) / self.machine.node_bytes_per_s,
            "inside a node": sum(inside.values()) / self.machine.rank_bytes_per_s,
        }
        if self.step_flops is not None:
            floors["arithmetic"] = arithmetic_s(self.step_flops, self.config, self.machine)
        return floors


def make_plan(config: Config, model_config: PreTrainedConfig, machine: Machine) -> Plan:
    """Plan a run without a device, weights, tokenizer or data.

    Raises:
        UserError: the run would be refused for its model, its mesh or its keys.
    """
    with fake_world(machine.nodes, machine.ranks_per_node, config) as world:
        require_trainable(config, model_config, world)
        whole = build_on_meta(config, model_config, world)
        states = state_bytes(whole, build_optimizer(whole, config), config)
        free = machine.memory_bytes - machine.allowance_bytes - states.total
        policy, *_ = decide(
            *unsharded_bytes(whole, config, world),
            free,
            config.train.gradient_accumulation_steps,
        )
        kinds = layer_kinds(whole)
        if lengths := cuts(kinds):
            short, long = (
                simulate(config, with_layers(model_config, length), policy, world)
                for length in lengths
            )
            measured = extrapolate(short, long, len(kinds))
        else:
            measured = simulate(config, model_config, policy, world)
        micro_batches = config.train.gradient_accumulation_steps
        rows = config.train.micro_batch_size * machine.ranks * micro_batches
        parameters = list(whole.parameters())
        return Plan(
            config=config,
            machine=machine,
            parameters=sum(p.numel() for p in parameters),
            trained_parameters=sum(p.numel() for p in parameters if p.requires_grad),
            states=states,
            policy=policy,
            peaks=_peaks(measured, states),
            traffic=micro_batch_sum(measured.traffic, micro_batches),
            step_tokens=rows * config.data.max_length,
            step_flops=count_step_flops(whole, rows, config.data.max_length),
            checkpoint_bytes=_checkpoint_bytes(whole, states, world.replicas, machine.ranks),
        )


def _peaks(measured: Measured, states: StateBytes) -> dict[str, Peak]:
    """Return the peak of each phase, with the optimizer's state, which the simulation lacks."""
    parameters = Counter({Cause.PARAMETERS: states.parameters})
    gradients = Counter({Cause.GRADIENTS: states.gradients})
    optimizer = Counter({Cause.OPTIMIZER: states.optimizer})
    peaks = {
        "load": Peak(states.parameters, parameters),
        "update": Peak(states.total, parameters + gradients + optimizer),
    }
    for (phase, _), peak in measured.peaks.items():
        if phase and (phase not in peaks or peak.n_bytes + states.optimizer > peaks[phase].n_bytes):
            peaks[phase] = Peak(peak.n_bytes + states.optimizer, peak.by_cause + optimizer)
    return peaks


def arithmetic_s(step_flops: float, config: Config, machine: Machine) -> float:
    """Return the seconds that all ranks take at least for a step's FLOPs."""
    # Full checkpointing runs each layer's forward, a third of the rest, once more.
    again = 4 / 3 if config.model.activation_checkpointing == "full" else 1
    return again * step_flops / (machine.ranks * machine.flops_per_s)


def count_step_flops(model: PreTrainedModel, rows: int, length: int) -> float | None:
    """Return the FLOPs of a step of full rows, recomputation left out; None if not known."""
    try:
        return count_flops(model).per_step(np.full(rows, length), rows * (length - 1))
    except NotCounted:
        return None


def _checkpoint_bytes(model: PreTrainedModel, states: StateBytes, replicas: int, ranks: int) -> int:
    """Return the bytes of what is trained and its moments, once for all copies of the model."""
    trained = sum(p.numel() * p.itemsize for p in model.parameters() if p.requires_grad)
    return trained + states.optimizer * ranks // replicas


def extrapolate(short: Measured, long: Measured, layers: int) -> Measured:
    """Return what a model of so many layers would have measured.

    Every place of a step grows by the same bytes with each further period of layers, so places in
    the middle have no more than those at the ends.
    """
    times = (layers - long.layers) // (long.layers - short.layers)

    def grow(small: Mapping[Any, int], large: Mapping[Any, int]) -> Counter[Any]:
        return Counter({key: n + times * (n - small.get(key, 0)) for key, n in large.items()})

    peaks = {}
    for key, peak in long.peaks.items():
        if key in short.peaks:
            by_cause = grow(short.peaks[key].by_cause, peak.by_cause)
            peaks[key] = Peak(by_cause.total(), by_cause)
    traffic = [grow(*both) for both in zip(short.traffic, long.traffic, strict=True)]
    return Measured(layers, peaks, traffic)


def micro_batch_sum(traffic: list[Counter[Collective]], micro_batches: int) -> Counter[Collective]:
    """Return the traffic of a step; `traffic` is that of `Measured`."""
    _, first, *others = traffic
    total = first.copy()
    if others:
        total += others[-1]
    for collective, size in others[0].items() if len(others) > 1 else ():
        total[collective] += (micro_batches - 2) * size
    return total


def link_bytes(
    traffic: Mapping[Collective, int], machine: Machine
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the bytes that a node gets from the others, and a rank from those of its node.

    By kind of collective, as in a ring: of an unsharded size S, a group of g ranks on n nodes moves
    S (n - 1) / n into each node and S (g - 1) / g into each rank; an all-reduce twice as much. In
    an all-to-all a rank keeps 1 / g of S, and sends an equal part to each other rank.
    """
    between: defaultdict[str, float] = defaultdict(float)
    inside: defaultdict[str, float] = defaultdict(float)
    for (kind, ranks), size in traffic.items():
        nodes = Counter(rank // machine.ranks_per_node for rank in ranks)
        group, here = len(ranks), nodes[0]
        if kind == "all-to-all":
            between[kind] += machine.ranks_per_node * size * (group - here) / group
            inside[kind] += size * (here - 1) / group
            continue
        passes = 2 if kind == "all-reduce" else 1
        groups = machine.ranks_per_node / here  # each rank of a node has an equal one
        between[kind] += passes * groups * size * (len(nodes) - 1) / len(nodes)
        inside[kind] += passes * size * (group - 1) / group if here > 1 else 0.0
    return dict(between), dict(inside)
