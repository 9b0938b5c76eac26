"""The fastest mesh that fits; where none does, other settings with which one would.

All meshes at the same effective batch are compared by arithmetic on shapes. At most four steps are
simulated: those of the three most promising ones, and where none fits, of the surest.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, combinations, islice, product
from typing import Any

from transformers import PreTrainedConfig

from shardtune.config import KEYS, Config
from shardtune.distributed.layout import Layout
from shardtune.errors import UserError
from shardtune.model.documents.attention_check import require_documents_apart
from shardtune.model.stages import require_composable
from shardtune.optimizers.rules import smaller_rules, updates
from shardtune.planner.arithmetic.host_link import host_link, host_states_bytes
from shardtune.planner.arithmetic.machine import Machine
from shardtune.planner.arithmetic.shapes import (
    Shapes,
    host_inputs_bytes,
    least_traffic,
    rough_memory,
)
from shardtune.planner.plan import Estimate, Plan, bound_plan, make_plan
from shardtune.planner.simulation.extrapolate import Simulations, with_layers
from shardtune.planner.status_lines import Say, silent

_MOST_SIMULATED = 4
_MOST_WANTED = 3
_SLOW = 1.5  # times the step of the fastest mesh: then a run says so
_FASTER = 0.95  # times a step: a smaller gain is not worth a change
_MARGIN = 0.95  # of the memory, where no step is simulated
_TRIAL_LAYERS = 4
_MOST_RANKS = 4096
_SHORT_ROW = 1024  # tokens: neither halved nor shared
ADAPTERS: dict[str, Any] = {"lora.rank": 16}
_ROUNDING = {"model.master_dtype", "model.reduce_dtype", "optimizer.name"}
_MESH = (
    "parallel.stages",
    "parallel.replicate",
    "parallel.expert",
    "parallel.context",
    "train.micro_batch_size",
    "train.gradient_accumulation_steps",
)
Setting = tuple[dict[str, Any], str]  # values of keys, and their price


class Search:
    """Looks for changes of keys that `may_change` with which a planned run is faster, or fits."""

    def __init__(
        self,
        plan: Plan,
        simulations: Simulations,
        may_change: Callable[[str], bool] = bool,  # a key is not empty
        say: Say = silent,
    ) -> None:
        """`say` is called before each step that is simulated."""
        self.plan, self._simulations = plan, simulations
        self._may_change, self._say = may_change, say

    @cached_property
    def own(self) -> Estimate:
        """The run's own mesh, by arithmetic."""
        return self._estimate({}, "", self.plan.config, self.plan.shapes)

    def much_faster_mesh(self) -> Estimate | None:
        """Return the fastest mesh, if a step of the run's own is slower by half."""
        return self._by_arithmetic({}, self.own.floor_s / _SLOW)

    def changes(self) -> list[Plan]:
        """Return changes that fit, the fastest first; none if a run that fits is the fastest.

        That is one other mesh, or where none fits, several, each with the fewest other settings.
        """
        plan = self.plan
        # Assume the same error factor for all meshes.
        factor = 1.0 if plan.reason else plan.needed_bytes / self.own.peak_bytes
        groups = _settings(self._same_training(), _less_training(plan.layout))
        if plan.fits:
            slowest_s = _FASTER * plan.floor_s
            return self._try(islice(groups, 1), factor, slowest_s=slowest_s)
        return self._try(groups, factor)

    def fastest(self) -> Plan | None:
        """Return the fastest run that fits and trains the same, with the fewest other settings.

        States may be in host memory, whose time is known. Settings that round more come last. The
        plan may be a bound.
        """
        same = self._same_training()
        moves = [kind for kind in same if "optimizer.offload" in kind[0][0]]
        rounding = [kind for kind in same if _ROUNDING & kind[0][0].keys()]
        others = [kind for kind in same if kind not in moves + rounding]
        anywhere: list[Setting] = [({}, ""), *chain(*moves)]
        groups = (
            [_together(pair) for pair in product(anywhere, group)]
            for group in _settings(others, [setting for (setting,) in rounding])
        )
        return next(iter(self._try(groups, 1 / _MARGIN, wanted=1)), None)

    def fewest_nodes(self) -> Estimate | None:
        """Return a mesh on as few nodes of this kind as hold the run, by arithmetic.

        Layers keep their inputs alone: with all activations long rows fit on no number of nodes.
        """
        nodes, most = self.plan.machine.nodes, _MOST_RANKS // self.plan.machine.ranks_per_node
        while nodes <= most:
            if found := self._on(nodes):
                step = max(1, nodes // 8)
                fewer = map(self._on, range(nodes // 2 + step, nodes, step))
                return next(filter(None, fewer), found)
            nodes *= 2
        return None

    def _on(self, nodes: int) -> Estimate | None:
        """Return the fastest mesh on so many nodes that fits."""
        plan = replace(self.plan, machine=replace(self.plan.machine, nodes=nodes))
        is_lean = plan.layout.keeps_inputs_alone
        kept = {} if is_lean else {"model.activation_checkpointing": "full"}
        return Search(plan, self._simulations, self._may_change)._by_arithmetic(kept)

    def _by_arithmetic(
        self, values: Mapping[str, Any], slowest_s: float = math.inf
    ) -> Estimate | None:
        """Return the fastest mesh that fits with a margin, since no step is simulated."""
        limit = _MARGIN * self.plan.machine.memory_bytes
        fitting = (each for each in self._estimates(values, "") if each.peak_bytes <= limit)
        fast = (each for each in fitting if each.floor_s <= slowest_s)
        return next(filter(self._can_be_cut, fast), None)

    def _try(
        self,
        groups: Iterable[list[Setting]],
        factor: float,
        slowest_s: float = math.inf,
        wanted: int = _MOST_WANTED,
    ) -> list[Plan]:
        """Return what fits of the first group of which a part does, the fastest first.

        `factor`: from peaks by arithmetic to simulated ones. `wanted`: how many at most.
        """
        left, memory_bytes = _MOST_SIMULATED, self.plan.machine.memory_bytes
        # Prefer the factor of a simulated mesh with the same stages, and ranks that share a row.
        factors: dict[tuple[int, int], float] = {}

        def fits(each: Estimate) -> bool:
            return each.peak_bytes * factors.get(_stages_and_context(each), factor) <= memory_bytes

        for settings in groups:
            estimates: list[Estimate] = []
            leanest: list[Estimate] = []
            for values, price in settings:
                if all(map(self._may_change, values)):
                    found = [each for each in self._estimates(values, price) if fits(each)]
                    estimates += found[: 1 if values else None]  # with a price one is enough
                    leanest += sorted(found, key=lambda each: each.peak_bytes)[:1]
            leanest.sort(key=lambda each: each.peak_bytes)
            plans: list[Plan] = []
            for fastest in sorted(estimates, key=_rank):
                # The last simulation goes to the leanest mesh: the faster ones did not fit.
                is_last = left == 1 and not plans
                each = leanest[0] if is_last else fastest
                is_enough = len(plans) == wanted or (plans and not each.price)
                if not left or each.floor_s >= slowest_s or is_enough:
                    break
                if any(each.price == plan.price for plan in plans):
                    continue  # another degree fits, and is faster
                is_risky = is_last and each.peak_bytes > memory_bytes
                if is_risky or not fits(each) or not self._can_be_cut(each):
                    continue
                plan = self._simulate(each)
                left -= 1
                if plan and plan.fits:
                    plans.append(plan)
                elif plan:
                    by = plan.needed_bytes / each.peak_bytes
                    key = _stages_and_context(each)
                    factors[key] = max(by, factors.get(key, factor))
            if plans or not left:
                return sorted(plans, key=lambda plan: plan.seconds_per_token)
        return []

    def _same_training(self) -> list[list[Setting]]:
        return list(_same_training(self.plan.layout, self._degrees()))

    def _simulate(self, estimate: Estimate) -> Plan | None:
        named = " ".join(mesh_arguments(estimate))
        self._say(f"simulating a step with {named or 'no other keys'}")
        model_config, machine = self._simulations.model_config, self.plan.machine
        try:
            plan = make_plan(estimate.config, model_config, machine, self._simulations)
        except UserError:  # shards would cut the blocks of an optimizer
            return None
        return replace(plan, values=estimate.values, price=estimate.price)

    def _estimates(self, values: Mapping[str, Any], price: str) -> list[Estimate]:
        """Return the meshes with other settings that a node's own memory holds, fastest first."""
        config = with_values(self.plan.config, values)
        shapes = self._with_adapters if "lora.rank" in values else self.plan.shapes
        estimates = []
        for mesh in _meshes(self.plan.machine.layout(config), shapes, self.plan.machine):
            changed = {key: n for key, n in mesh.items() if n != _value(config, key)}
            if all(map(self._may_change, changed)):
                changed = {**values, **changed}
                estimates.append(self._estimate(changed, price, with_values(config, mesh), shapes))
        return sorted((each for each in estimates if each.host_fits), key=_rank)

    def _estimate(
        self, values: Mapping[str, Any], price: str, config: Config, shapes: Shapes
    ) -> Estimate:
        machine, traffic, peaks, links = self.plan.machine, [], [], []
        states, inputs = [], []  # in host memory
        layout, free = machine.layout(config), machine.memory_bytes - machine.allowance_bytes
        for stage in range(layout.stages):
            memory, keeps = rough_memory(shapes, stage, layout, free)
            peaks.append(memory + machine.allowance_bytes)
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
            step_flops=self.plan.step_flops,
            values=values,
            price=price,
        )

    @cached_property
    def _with_adapters(self) -> Shapes:
        config = with_values(self.plan.config, ADAPTERS)
        return bound_plan(config, self._simulations.model_config, self.plan.machine).shapes

    def _degrees(self) -> list[int]:
        """Return the numbers of a node's ranks that could share each row, and do not now."""
        layout, shapes = self.plan.layout, self.plan.shapes
        now = layout.context
        if layout.max_length <= _SHORT_ROW:
            return []
        degrees = [n for n in _divisors(self.plan.machine.ranks_per_node) if n % now == 0]
        return [n for n in degrees if n > now and shapes.may_share(n)]

    def _can_be_cut(self, estimate: Estimate) -> bool:
        if estimate.layout.context > self.plan.layout.context and not self._is_shareable:
            return False
        return estimate.layout.stages == 1 or self._is_composable

    @cached_property
    def _is_shareable(self) -> bool:
        """Whether layers attend without a mask, as ranks that share rows must."""
        return self._accepts(require_documents_apart, replace(self.plan.layout, context=2))

    @cached_property
    def _is_composable(self) -> bool:
        return self._accepts(require_composable, replace(self.plan.layout, stages=2))

    def _accepts(
        self, require: Callable[[Layout, PreTrainedConfig], object], layout: Layout
    ) -> bool:
        """Whether its first layers can be divided: a trial of all of them takes seconds."""
        layers = min(_TRIAL_LAYERS, self.plan.shapes.n_layers)
        shallow = with_layers(self._simulations.model_config, layers)
        try:
            require(layout, shallow)
        except UserError:
            return False
        return True


def _stages_and_context(estimate: Estimate) -> tuple[int, int]:
    return estimate.layout.stages, estimate.layout.context


def _rank(estimate: Estimate) -> tuple[float, float, int]:
    """Return a sort key: fastest, then least traffic, then fewest changes."""
    return estimate.floor_s, sum(estimate.floors_s.values()), len(estimate.values)


def launch_command(run: Estimate, given: Sequence[str]) -> str:
    """Return the command of a run with its values and its whole mesh in place of those `given`."""
    named = mesh_arguments(run)
    keys = {each.partition("=")[0] for each in named}
    kept = [each for each in given if each.partition("=")[0] not in keys]
    sizes = {"NNODES": (run.machine.nodes, 2), "GPUS_PER_NODE": (run.machine.ranks_per_node, 8)}
    environment = [f"{name}={n}" for name, (n, default) in sizes.items() if n != default]
    return shlex.join([*environment, "./launch_node0.sh", *kept, *named])


def mesh_arguments(run: Estimate) -> list[str]:
    """Return a run's values as arguments, and before them what its mesh needs beside defaults."""
    mesh = {key: _value(run.config, key) for key in _MESH}
    named = {k: n for k, n in mesh.items() if k in run.values or n != KEYS[k].default}
    return [*as_arguments({**named, **run.values})]


def as_arguments(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield values of keys as arguments of a run."""
    for key, value in values.items():
        yield f"{key}={str(value).lower() if isinstance(value, bool) else value}"


def _settings(same: list[list[Setting]], less: list[Setting]) -> Iterator[list[Setting]]:
    """Yield groups of settings, each with its price: first none, then the fewest that may help, and
    only at last those that train less.
    """
    for n_less, n_same in product(range(len(less) + 1), range(len(same) + 1)):
        yield [
            _together([*others, *chosen])
            for others in combinations(less, n_less)
            for kinds in combinations(same, n_same)
            for chosen in product(*kinds)
        ]


def _together(settings: Iterable[Setting]) -> Setting:
    both = [each for each in settings if each[0]]
    values = {key: n for values, _ in both for key, n in values.items()}
    return values, "; ".join(price for _, price in both)


def _same_training(layout: Layout, degrees: Sequence[int]) -> Iterator[list[Setting]]:
    """Yield settings that train all of the data, those among which there is a choice together.

    `degrees`: the numbers of ranks that could share each row.
    """
    is_gpu, trains_all = layout.is_gpu, not layout.is_lora
    if not layout.keeps_inputs_alone:
        price = "about a third more arithmetic"
        yield [({"model.activation_checkpointing": "full"}, price)]
    elif is_gpu and layout.checkpointing == "full":
        price = "layers' inputs travel to host memory and back"
        yield [({"model.activation_checkpointing": "offload"}, price)]
    elif is_gpu:  # host memory may be what is short
        yield [({"model.activation_checkpointing": "full"}, "layers' inputs take the GPU's memory")]
    if layout.offloads:
        yield [({"optimizer.offload": False}, "masters and moments take the GPU's memory")]
    elif trains_all and is_gpu:
        yield [({"optimizer.offload": True}, "states travel to host memory and back")]
    if trains_all and layout.master_dtype != "bfloat16" and updates(layout.optimizer, "bfloat16"):
        price = "weights rounded at random to bfloat16"
        yield [({"model.master_dtype": "bfloat16"}, price)]
    for rule in smaller_rules(layout.optimizer, layout.master_dtype) if trains_all else ():
        yield [({"optimizer.name": rule.name}, rule.price)]
    if trains_all and layout.reduce_dtype != "bfloat16":
        price = "gradients summed with 8 bits of precision"
        yield [({"model.reduce_dtype": "bfloat16"}, price)]
    if degrees:
        now, steps = layout.context, layout.micro_batches
        price = "heads travel between the ranks that share a row"
        # As many more micro-batches, so that a step trains the same rows.
        accumulation = "train.gradient_accumulation_steps"
        yield [
            ({"parallel.context": degree, accumulation: steps * degree // now}, price)
            for degree in degrees
        ]


def _less_training(layout: Layout) -> list[Setting]:
    less: list[Setting] = []
    if not layout.is_lora:
        less.append((ADAPTERS, "trains adapters alone"))
    if layout.max_length > _SHORT_ROW:
        rows = {"data.max_length": layout.max_length // 2}
        less.append((rows, "longer records lose turns"))
    return less


def _meshes(layout: Layout, shapes: Shapes, machine: Machine) -> Iterator[dict[str, int]]:
    """Yield every division of the ranks, with micro-batches of the same effective batch."""
    ranks, context, rows = layout.ranks, layout.context, layout.rows_per_step
    nodes = [rank // machine.ranks_per_node for rank in range(ranks)]
    for stages in _divisors(ranks):
        stage_ranks = ranks // stages
        if (
            stages > shapes.n_layers
            or stage_ranks % context
            or replace(layout, stages=stages).split_stage(nodes)
        ):
            continue
        rows_of_rank, rest = divmod(rows * context, stage_ranks)
        if rest:
            continue
        for replicate in _divisors(stage_ranks):
            for expert in _divisors(stage_ranks // replicate):
                copies = stage_ranks // replicate // expert
                if expert > 1 and not shapes.may_spread(expert, copies):
                    continue
                for size in _divisors(rows_of_rank):
                    micro_batches = rows_of_rank // size
                    if micro_batches >= stages:
                        mesh = stages, replicate, expert, context, size, micro_batches
                        yield dict(zip(_MESH, mesh, strict=True))


def _divisors(number: int) -> list[int]:
    return [other for other in range(1, number + 1) if number % other == 0]


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """Return the configuration with other values of some keys, `section.key`, that are allowed."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    updated = {n: getattr(config, n).model_copy(update=v) for n, v in sections.items()}
    return config.model_copy(update=updated)


def _value(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)
