"""Search the fastest mesh that fits, or settings that make one fit.

Arithmetic on shapes compares all meshes of the same effective batch. At most four steps are
simulated: of the three fastest meshes, and if none of them fits, of the leanest one. Where a mesh
fits, settings that round no more and train no less are tried in as many further steps if they make
it much faster.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import chain, islice, product
from typing import Any

from shardtune.config import Config
from shardtune.errors import UserError
from shardtune.model.facts.trial import require_exact_copy
from shardtune.planner.arithmetic.shapes import Shapes
from shardtune.planner.make_plan import bound_plan, make_plan
from shardtune.planner.mesh import (
    ADAPTERS,
    MESH,
    Setting,
    every_mesh,
    less_training,
    mesh_arguments,
    same_training,
    settings,
    together,
    value_of,
    with_values,
)
from shardtune.planner.plan import Estimate, Plan, estimate
from shardtune.planner.simulation.extrapolate import Simulations, with_layers

Say = Callable[[str], None]  # says each part of the work before it begins
_MOST_SIMULATED = 4
_MOST_WANTED = 3
_SLOW = 1.5  # ratio to the fastest mesh's step from which a run suggests that mesh
_FASTER = 0.95  # a change must shorten a step at least to this share
_MARGIN = 0.95  # share of the memory that a mesh may take by arithmetic alone
_TRIAL_LAYERS = 4
_MOST_RANKS = 512
_ROUNDING = {"model.master_dtype", "model.reduce_dtype", "optimizer.name"}


def silent(_: str) -> None:
    """Say nothing."""


def say(text: str) -> None:
    print(f"Plan: {text}", file=sys.stderr, flush=True)


class Search:
    """Looks for changes of keys that `may_change` with which a planned run is faster, or fits."""

    def __init__(
        self,
        plan: Plan,
        simulations: Simulations,
        may_change: Callable[[str], bool] = bool,  # every key: a name is not empty
        say: Say = silent,
    ) -> None:
        """Search around `plan`, and call `say` before each simulated step."""
        self.plan, self.simulations = plan, simulations
        self._may_change, self._say = may_change, say
        self.fallen: list[Plan] = []  # simulated runs that do not fit
        self._exact: dict[str, bool] = {}  # by degree of the mesh

    @cached_property
    def configured(self) -> Estimate:
        """The arithmetic's estimate of the configured run."""
        return self._estimate(self.plan.config, self.plan.shapes)

    def much_faster_mesh(self) -> Estimate | None:
        """Return the fastest mesh, if a step of the configured one takes 1.5 times as long."""
        limit, slowest_s = _MARGIN * self.plan.machine.memory_bytes, self.configured.floor_s / _SLOW
        fitting = (mesh for mesh in self._estimates({}, "") if mesh.peak_bytes <= limit)
        fast = (mesh for mesh in fitting if mesh.floor_s <= slowest_s)
        return next(filter(self._can_be_cut, fast), None)

    def changes(self) -> list[Plan]:
        """Return plans that fit, the fastest first.

        For a run that fits, return a faster mesh, if any. For one that does not, return up to
        three plans with the fewest other settings, and a much faster one with one setting more.
        """
        plan = self.plan
        # Assume the same error factor for all meshes.
        factor = plan.needed_bytes / self.configured.peak_bytes if plan.is_simulated else 1.0
        less = less_training(plan.layout)
        groups = settings([*same_training(plan.layout, plan.shapes, plan.machine)], less)
        if plan.fits:
            slowest_s = _FASTER * plan.floor_s
            return self._try(islice(groups, 1), factor, slowest_s=slowest_s)
        if found := self._try(groups, factor):
            slowest_s = found[0].floor_s / _SLOW
            inexact = _ROUNDING.union(*(values for values, _ in less))
            exact = [setting for setting in next(groups, []) if not inexact & setting[0].keys()]
            found = self._try([exact], factor, slowest_s=slowest_s, wanted=1) + found
        return found

    def fastest(self) -> Plan | None:
        """Return the fastest run that fits and trains the same, with the fewest other settings.

        `plan` may be a bound.
        """
        plan = next(iter(self._try(self._same_training(), 1 / _MARGIN, wanted=1)), None)
        if plan and plan.layout.checkpointing == "full":
            return self._keeping_more(plan)
        return plan

    def _keeping_more(self, plan: Plan) -> Plan:
        """Return the run with selective checkpointing if a simulated step shows it faster."""
        values = {key: value for key, value in plan.values.items() if key not in MESH}
        values |= {"model.activation_checkpointing": "selective"}
        limit, step_s = _MARGIN * plan.machine.memory_bytes, plan.about_s or plan.floor_s
        slowest_s = plan.floor_s - (1 - _FASTER) * step_s  # else it saves little of a step
        faster = (
            mesh
            for mesh in self._estimates(values, plan.price)
            if mesh.peak_bytes <= limit and mesh.floor_s < slowest_s
        )
        other = next(map(self._simulate, filter(self._can_be_cut, faster)), None)
        if not other or not other.fits or (other.is_tight and not plan.is_tight):
            return plan
        return min(plan, other, key=lambda run: run.about_s or run.floor_s)

    def fastest_by_arithmetic(
        self, is_possible: Callable[[Estimate], bool] = lambda run: True
    ) -> Estimate | None:
        """Return the run that `fastest` simulates first."""
        limit = _MARGIN * self.plan.machine.memory_bytes

        def fitting(group: list[Setting]) -> list[Estimate]:
            runs = (run for setting in group for run in self._estimates(*setting))
            return sorted((run for run in runs if run.peak_bytes <= limit), key=_rank)

        groups = [*self._same_training()]
        # The last ones round all that may be rounded: where none of them fits, nothing does.
        if not any(map(fitting, groups[-3:])):
            return None
        runs = chain.from_iterable(map(fitting, groups))
        return next(filter(is_possible, runs), None)

    def _same_training(self) -> Iterator[list[Setting]]:
        """Yield groups of settings that train the same, those with fewer settings first.

        Offload is tried with all others, since its time is known. Settings that round more come
        last.
        """
        same = [*same_training(self.plan.layout, self.plan.shapes, self.plan.machine)]
        moves = [kind for kind in same if "optimizer.offload" in kind[0][0]]
        rounding = [kind for kind in same if _ROUNDING & kind[0][0].keys()]
        others = [kind for kind in same if kind not in moves + rounding]
        anywhere: list[Setting] = [({}, ""), *chain(*moves)]
        for group in settings(others, [setting for (setting,) in rounding]):
            yield [together(pair) for pair in product(anywhere, group)]

    def fewest_nodes(self, more_than: int = 0) -> Estimate | None:
        """Return, by arithmetic, a run that trains the same on about the fewest nodes.

        `more_than`: nodes on which a simulated step has shown that it does not fit.
        """
        nodes = max(self.plan.machine.nodes, more_than + 1)
        most = _MOST_RANKS // self.plan.machine.ranks_per_node
        while nodes <= most:
            if mesh := self._on_nodes(nodes):
                # After a doubling half as many did not hold it: try some numbers in between.
                step = max(1, nodes // 8)
                first = max(nodes // 2 + step, more_than + 1)
                fewer = map(self._on_nodes, range(first, nodes, step))
                return next(filter(None, fewer), mesh)
            nodes *= 2
        return None

    def _on_nodes(self, nodes: int) -> Estimate | None:
        """Return the fastest run that fits on this number of nodes."""
        plan = replace(self.plan, machine=replace(self.plan.machine, nodes=nodes))
        search = Search(plan, self.simulations, self._may_change)
        return search.fastest_by_arithmetic(self._can_be_cut)

    def _try(
        self,
        groups: Iterable[list[Setting]],
        factor: float,
        slowest_s: float = math.inf,
        wanted: int = _MOST_WANTED,
    ) -> list[Plan]:
        """Return the plans that fit of the first group in which any does, the fastest first.

        `factor`: ratio of simulated peaks to those by arithmetic. `wanted`: the most plans.
        """
        left, memory_bytes = _MOST_SIMULATED, self.plan.machine.memory_bytes
        # Prefer the factor of a simulated mesh with the same stages, and ranks that share a row.
        factors: dict[tuple[int, int], float] = {}

        def fits(mesh: Estimate) -> bool:
            return mesh.peak_bytes * factors.get(_stages_and_rows(mesh), factor) <= memory_bytes

        for group in groups:
            estimates: list[Estimate] = []
            leanest: list[Estimate] = []
            for values, price in group:
                if all(map(self._may_change, values)):
                    fitting = [mesh for mesh in self._estimates(values, price) if fits(mesh)]
                    estimates += fitting[: 1 if values else None]  # one mesh is enough per price
                    leanest += sorted(fitting, key=lambda mesh: mesh.peak_bytes)[:1]
            leanest.sort(key=lambda mesh: mesh.peak_bytes)
            plans: list[Plan] = []
            for fastest in sorted(estimates, key=_rank):
                # The last simulation goes to the leanest mesh: the faster ones did not fit.
                is_last = left == 1 and not plans
                mesh = leanest[0] if is_last else fastest
                # All of a group without a price are meshes alone, so one that fits is enough.
                is_enough = len(plans) == wanted or (plans and not mesh.price)
                if not left or mesh.floor_s >= slowest_s or is_enough:
                    break
                if any(mesh.price == plan.price for plan in plans):
                    continue  # a faster mesh fits at this price
                is_risky = is_last and mesh.peak_bytes > memory_bytes
                if is_risky or not fits(mesh) or not self._can_be_cut(mesh):
                    continue
                plan = self._simulate(mesh)
                left -= 1
                if plan and plan.fits:
                    plans.append(plan)
                elif plan:
                    self.fallen.append(plan)
                    ratio = plan.needed_bytes / mesh.peak_bytes
                    key = _stages_and_rows(mesh)
                    factors[key] = max(ratio, factors.get(key, factor))
            if plans or not left:
                return sorted(plans, key=lambda plan: plan.seconds_per_token)
        return []

    def _simulate(self, estimate: Estimate) -> Plan | None:
        named = " ".join(mesh_arguments(estimate))
        self._say(f"simulating a step with {named or 'no other keys'}")
        model_config, machine = self.simulations.model_config, self.plan.machine
        try:
            plan = make_plan(estimate.config, model_config, machine, self.simulations)
        except UserError:  # shards would cut the blocks of an optimizer
            return None
        return replace(plan, values=estimate.values, price=estimate.price)

    def _estimates(self, values: Mapping[str, Any], price: str) -> list[Estimate]:
        """Return the meshes with these settings that fit host memory, the fastest first."""
        config = with_values(self.plan.config, values)
        shapes = self._with_adapters if "lora.rank" in values else self.plan.shapes
        estimates = []
        for mesh in every_mesh(self.plan.machine.layout(config), shapes, self.plan.machine):
            changed = {key: n for key, n in mesh.items() if n != value_of(config, key)}
            if all(map(self._may_change, changed)):
                changed = {**values, **changed}
                run = self._estimate(with_values(config, mesh), shapes)
                estimates.append(replace(run, values=changed, price=price))
        return sorted((run for run in estimates if run.host_fits), key=_rank)

    def _estimate(self, config: Config, shapes: Shapes) -> Estimate:
        plan = self.plan
        return estimate(config, shapes, plan.machine, plan.step_flops, plan.forward_flops)

    @cached_property
    def _with_adapters(self) -> Shapes:
        config = with_values(self.plan.config, ADAPTERS)
        simulations, machine = self.simulations, self.plan.machine
        return bound_plan(config, simulations.model_config, machine, None, simulations).shapes

    def _can_be_cut(self, estimate: Estimate) -> bool:
        """Return whether parts of the model compute what the whole does."""
        now, asked = self.plan.layout, estimate.layout
        more = [n for n in ("context", "tensor", "stages") if getattr(asked, n) > getattr(now, n)]
        for degree in more:
            if degree not in self._exact:
                self._exact[degree] = self._is_exact(degree)
        return all(self._exact[degree] for degree in more)

    def _is_exact(self, degree: str) -> bool:
        """Try the first layers, cut in two by a degree of the mesh: all take seconds."""
        layers = min(_TRIAL_LAYERS, self.plan.shapes.n_layers)
        shallow = with_layers(self.simulations.model_config, layers)
        degrees: dict[str, Any] = dict.fromkeys(("context", "tensor", "stages"), 1)
        layout = replace(self.plan.layout, packing=False, **degrees | {degree: 2})
        try:
            require_exact_copy(layout, shallow)
        except UserError:
            return False
        return True


def _stages_and_rows(estimate: Estimate) -> tuple[int, int]:
    return estimate.layout.stages, estimate.layout.row_ranks


def _rank(estimate: Estimate) -> tuple[float, float, int]:
    """Return a sort key: fastest, then least traffic, then fewest changes."""
    return estimate.floor_s, sum(estimate.floors_s.values()), len(estimate.values)
